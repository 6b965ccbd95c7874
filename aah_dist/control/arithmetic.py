"""The number format decisions are made in (aah.control_precision)."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Arithmetic:
    """fp64 in training: at 12 heads of 128 the level-0 similarities differ by less than 1e-5, so that fp32 rounding
    decides about the map.  fp32 is the paper's.  reference_bf16 is what the paper's training did: under bf16 autocast
    every matrix product of the controller is a bf16 product, and all similarities of level 0 become 1.
    """

    dtype: type
    bf16_products: bool = False

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a @ b."""
        if self.bf16_products:
            return (_bf16(a) @ _bf16(b)).float().numpy()
        return a @ b

    def mlp(self, x: np.ndarray, layers: tuple[np.ndarray, ...]) -> np.ndarray:
        """[n, in] -> [n, out] through Linear, exact GELU, Linear; layers: weight, bias, weight, bias in [out, in]."""
        if self.bf16_products:
            w1, b1, w2, b2 = (_bf16(p) for p in layers)
            return F.linear(F.gelu(F.linear(_bf16(x), w1, b1)), w2, b2).float().numpy()
        w1, b1, w2, b2 = layers
        return F.gelu(torch.from_numpy(x @ w1.T + b1)).numpy() @ w2.T + b2


def _bf16(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16()


ARITHMETIC = {
    "fp64": Arithmetic(np.float64),
    "fp32": Arithmetic(np.float32),
    "reference_bf16": Arithmetic(np.float32, bf16_products=True),
}
