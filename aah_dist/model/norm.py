"""LayerNorm and RMSNorm whose parameters say which gradients are partial over TP.

Megatron's WrappedTorchNorm refuses sequence parallelism; its other norms need Apex or Transformer Engine.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class Norm(nn.Module):
    """Normalises the last axis; LayerNorm has a bias, RMSNorm none."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, bias: bool = True,
                 **unused: object) -> None:
        super().__init__()
        self.size, self.eps = hidden_size, eps
        self.rms = config.normalization == "RMSNorm"
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None if self.rms or not bias else nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rms:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)


class HeadNorm(Norm):
    """Norm of each head's queries or keys, without a bias: one on the keys would shift a query's scores alike and do
    nothing.  Each TP rank feeds it its own heads, so its gradient is always partial over TP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object) -> None:
        super().__init__(config, hidden_size, eps, bias=False)
        self.weight.fed_by_local_heads = True
