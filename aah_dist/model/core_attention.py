"""Megatron's core attention, executing the policy's windows of this rank's heads."""

import numpy as np
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from aah_dist.attention import window_attention
from aah_dist.model.context import ATTENTION, StepContext, dropout_keys


class WindowCoreAttention(nn.Module):
    """Reads windows from the shared StepContext; has no parameters and no state of its own."""

    def __init__(self, config: TransformerConfig, layer_number: int, *unused: object, context: StepContext,
                 tp_rank: int, softmax_scale: float | None = None, **also_unused: object) -> None:
        super().__init__()
        self.layer = layer_number - 1
        self.context, self.scale, self.p = context, softmax_scale, config.attention_dropout
        local = config.num_attention_heads // config.tensor_model_parallel_size
        self.heads = np.arange(tp_rank * local, (tp_rank + 1) * local)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: object,
                **also_unused: object) -> torch.Tensor:
        """q [T, B, H_local, D], k and v [T, B, H_kv_local, D] -> [T, B, H_local * D]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        p = self.p if self.training else 0.0
        seeds = torch.from_numpy(dropout_keys(self.context, self.layer, ATTENTION, self.heads)) if p else None
        windows = self.context.windows[self.layer, self.heads]
        scale = q.shape[-1]**-0.5 if self.scale is None else self.scale
        out = window_attention(q, k, v, windows, backend=self.context.backend, scale=scale, dropout_p=p,
                               dropout_seeds=seeds)
        if self.context.statistics is not None:
            self.context.statistics.write(self.layer, q, k, v, out, windows, scale)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
