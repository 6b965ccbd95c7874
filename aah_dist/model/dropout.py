"""Stateless dropout on hidden states: the mask is a function of (seed, step, sample, layer, site) alone.

Megatron draws hidden dropout from a random state per rank, which recomputation, TP size and resume all disturb.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from aah_dist.model.context import StepContext, dropout_keys
from aah_dist.parallel.device import generator


class StatelessDropout(nn.Module):
    """Dropout on [T, B, N], or on this rank's [T / TP, B, N] under sequence parallelism."""

    def __init__(self, p: float, context: StepContext, layer: int, site: int, shard: int = 0, shards: int = 1) -> None:
        super().__init__()
        self.p, self.context, self.layer, self.site, self.shard, self.shards = p, context, layer, site, shard, shards

    def forward(self, x_TBN: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return x_TBN
        return x_TBN * self._scaled_mask(x_TBN)

    def _scaled_mask(self, x_TBN: torch.Tensor) -> torch.Tensor:
        """0 or 1/(1-p).  Every rank draws all T rows and takes its own: drawing is cheap beside the layer."""
        rows, _, width = x_TBN.shape
        keys = dropout_keys(self.context, self.layer, self.site, np.zeros(1, dtype=np.int64))[:, 0]
        source = generator(x_TBN.device)
        mask = torch.empty(len(keys), rows * self.shards, width, device=x_TBN.device)
        for sample, key in enumerate(keys.tolist()):
            mask[sample].bernoulli_(1.0 - self.p, generator=source.manual_seed(key))
        mine = mask[:, self.shard * rows:(self.shard + 1) * rows].transpose(0, 1)
        return mine.to(x_TBN.dtype).div_(1.0 - self.p)


class BiasDropoutAdd(StatelessDropout):
    """Megatron's bias-dropout-add with stateless dropout: residual + dropout(x + bias)."""

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        def apply(x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor,
                  p: float) -> torch.Tensor:
            x, bias = x_with_bias
            x = x if bias is None else x + bias
            return residual + StatelessDropout.forward(self, x)
        return apply
