"""Attention whose heads each have their own window, executed so that what lies outside a window is not computed."""

from __future__ import annotations

import torch
from torch import Tensor

from aah_dist.attention.backends import Inputs, check_backend, resolve
from aah_dist.attention.dropout import draw_seeds
from aah_dist.attention.windows import Windows, as_windows
from aah_dist.config.schema import ConfigError

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
    scale: factor on the scores; D ** -0.5 unless given.
    dropout_p: in [0, 1), the probability with which a softmax probability is dropped; kept ones are scaled by
        1 / (1 - dropout_p).  The mask is a function of (dropout_seeds[b, h], i, j) alone.
    dropout_seeds: int64 [B, H]; drawn from torch's default CPU generator when dropout_p > 0 and none are given.

    Returns [B, H, T, D] in q's dtype, differentiable once in q, k and v.  Results do not vary from run to run on CPU
    for a given number of threads, nor on CUDA with triton; with flash they do not under
    torch.use_deterministic_algorithms.
    Raises ConfigError (a ValueError) when an argument does not fit this description or the backend cannot take it.
    """
    _check_tensors(q, k, v)
    if not 0 <= dropout_p < 1:
        raise ConfigError(f"dropout_p is {dropout_p}; it must be at least 0 and below 1.")
    batch, heads, length, size = q.shape
    windows = as_windows(windows, heads)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    chosen = resolve(backend, Inputs(q.device, q.dtype, length, size, dropout_p, training))
    seeds = None
    if dropout_p > 0:
        seeds = draw_seeds(batch, heads) if dropout_seeds is None else dropout_seeds
        if seeds.shape != (batch, heads) or seeds.dtype != torch.int64:
            raise ConfigError(f"dropout_seeds are {seeds.dtype} {list(seeds.shape)}; int64 {[batch, heads]}, one for "
                              "each sample and head, are needed.")
        seeds = seeds.to(q.device)
    return chosen.run(q, k, v, windows, size**-0.5 if scale is None else scale, dropout_p, seeds)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or 0 in q.shape:
        raise ConfigError(f"q has shape {list(q.shape)}; a non-empty [batch, heads, tokens, head size] is needed.")
    if k.shape != v.shape or k.dim() != 4 or (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        raise ConfigError(f"k has shape {list(k.shape)} and v {list(v.shape)}; both must equal q's {list(q.shape)} but "
                          "for the number of heads.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ConfigError(f"q has {q.shape[1]} heads and k, v have {k.shape[1]}; the first must be a multiple of the "
                          "second.")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ConfigError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}; they "
                          "must be alike.")
