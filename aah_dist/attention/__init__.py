"""Attention whose heads each have their own window, executed so that what lies outside a window is not computed."""

from __future__ import annotations

import torch
from torch import Tensor

from aah_dist.attention.arguments import Windows, as_windows, check_tensors, checked_dropout, checked_scale
from aah_dist.attention.backends import Inputs, check_backend, resolve
from aah_dist.attention.dropout import draw_seeds

__all__ = ["check_backend", "window_attention"]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Windows,
    *,
    backend: str = "auto",
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seeds: Tensor | None = None,
) -> Tensor:
    """Causal attention in which query i of head h reads keys j with i - W < j <= i, W = windows[h].

    A window of W is W keys, the query's own included; W of at least T is plain causal attention.

    q: [B, H, T, D]; k, v: [B, H_kv, T, D] with H a multiple of H_kv (head h reads key/value head h // (H / H_kv)).
    Any strides; fp32, fp64, bf16 or fp16, all three alike, as far as the backend takes them.  Softmax and sums are in
    fp32 (fp64 for fp64).
    windows: H integers of at least 1 (list, tuple, numpy array or CPU tensor); they may change from call to call.
    backend: "auto" or a name that `python -m aah_dist.attention` lists.
    scale: factor on the scores, above 0; D ** -0.5 unless given.
    dropout_p: in [0, 1), the probability with which a softmax probability is dropped, rounded to a multiple of 2^-16;
        kept ones are scaled by 1 / (1 - dropout_p).  The mask is a function of (dropout_seeds[b, h], i, j) alone.
    dropout_seeds: int64 [B, H]; drawn from torch's default CPU generator when dropout_p > 0 and none are given.

    Returns [B, H, T, D] in q's dtype, differentiable once in q, k and v by torch.autograd (torch.func's transforms,
    forward-mode derivatives and torch.compile's fullgraph need backend="dense").  Numbers outside a window never
    matter, but a NaN or Inf there may spread to other rows of its block.  Results do not vary from run to run on CPU
    for a given number of threads, nor on CUDA with triton; with flash they do not under
    torch.use_deterministic_algorithms.
    Raises ConfigError (a ValueError) when an argument does not fit this description or the backend cannot take it.
    """
    check_tensors(q, k, v)
    batch, heads, length, size = q.shape
    rate = checked_dropout(dropout_p, dropout_seeds, batch, heads)
    windows, scale = as_windows(windows, heads), checked_scale(scale, size)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    chosen = resolve(str(backend), Inputs(q.device, q.dtype, length, size, dropout_p, training))
    seeds = None
    if rate > 0:
        seeds = (draw_seeds(batch, heads) if dropout_seeds is None else dropout_seeds).to(q.device)
    return chosen.run(q, k, v, windows, scale, rate, seeds)
