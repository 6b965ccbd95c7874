"""Dense attention under a band mask: what every other backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from aah_dist.attention.dropout import drop_mask, row_keys


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, ...], scale: float, dropout_p: float, seeds: Tensor | None
) -> Tensor:
    """Attention with all T x T scores in memory, in fp32 (fp64 for fp64 inputs); shapes as window_attention."""
    length, share = q.shape[2], q.shape[1] // k.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        keys, values = (x.to(dtype).repeat_interleave(share, dim=1) for x in (k, v))
        scores = q.to(dtype) @ keys.transpose(-1, -2) * scale
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position
        window = torch.tensor(windows, device=q.device)[:, None, None]
        probabilities = scores.masked_fill((distance < 0) | (distance >= window), float("-inf")).softmax(-1)
        if dropout_p > 0:
            dropped = drop_mask(row_keys(seeds, length), 0, length, dropout_p)
            probabilities = probabilities.masked_fill(dropped, 0) / (1 - dropout_p)
        return (probabilities @ values).to(q.dtype)
