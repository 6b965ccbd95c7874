"""What window_attention accepts, and one sentence for what it does not."""

from __future__ import annotations

from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from aah_dist.attention.dropout import rounded_rate
from aah_dist.config.schema import ConfigError

Windows = list[int] | tuple[int, ...] | np.ndarray | Tensor
LARGEST = torch.finfo(torch.float32).max


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ConfigError unless q is [B, H, T, D], k and v [B, H_kv, T, D], none empty, alike in all but heads."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name} is of type {type(x).__name__}; a tensor [batch, heads, tokens, head size] is "
                              "needed.")
        if x.is_nested or x.layout != torch.strided or x.device.type == "meta":
            kind = "is nested" if x.is_nested else f"is on {x.device} with layout {x.layout}"
            raise ConfigError(f"{name} {kind}; an ordinary tensor with strides and values is needed.")
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


def as_windows(windows: Windows, num_heads: int) -> tuple[int, ...]:
    """The windows as Python integers, one per head.

    A window of W is W keys, the query's own included: query i reads keys j with i - W < j <= i.
    Raises ConfigError when they are not `num_heads` integers of at least 1 in host memory.
    """
    if isinstance(windows, Tensor) and windows.device.type != "cpu":
        raise ConfigError(f"windows are on {windows.device}; this backend plans on the host and needs them in CPU "
                          "memory, once for each change of the windows.")
    if not isinstance(windows, list | tuple | np.ndarray | Tensor):
        raise ConfigError(f"windows are of type {type(windows).__name__}; give a list, tuple, numpy array or CPU "
                          f"tensor of {num_heads} integers, one for each head.")
    shape = list(windows.shape) if isinstance(windows, np.ndarray | Tensor) else [len(windows)]
    if shape != [num_heads]:
        raise ConfigError(f"windows have shape {shape}; one window for each of the {num_heads} heads is needed.")
    values = windows.tolist() if isinstance(windows, np.ndarray | Tensor) else windows
    for window in values:
        if not isinstance(window, Integral) or isinstance(window, bool):
            raise ConfigError(f"windows hold {window!r:.40} of type {type(window).__name__}; they are counts of keys "
                              "and must be integers.")
        if window < 1:
            raise ConfigError(f"windows hold {window}; a window counts the query's own key, so it is at least 1.")
    return tuple(map(int, values))


def checked_scale(scale: float | None, head_size: int) -> float:
    """The scale to use.  Raises ConfigError unless it is a number above 0 that fp32 can hold, or None."""
    if scale is None:
        return head_size**-0.5
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise ConfigError(f"scale is of type {type(scale).__name__}; give a number above 0, or None for D ** -0.5.")
    # The library's causal attention on CPU gives NaN at scales of 0 and below.
    if not 0 < scale <= LARGEST:
        raise ConfigError(f"scale is {scale}; it must be above 0 and finite in fp32.")
    return float(scale)


def checked_dropout(dropout_p: float, seeds: Tensor | None, batch: int, heads: int) -> float:
    """The dropout rate to use.  Raises ConfigError for a rate that cannot be, or seeds that are not int64 [B, H]."""
    if not isinstance(dropout_p, Real) or isinstance(dropout_p, bool):
        raise ConfigError(f"dropout_p is of type {type(dropout_p).__name__}; give a number of at least 0 and below 1.")
    if not 0 <= dropout_p < 1 or rounded_rate(dropout_p) == 1:
        raise ConfigError(f"dropout_p is {dropout_p}; it must be at least 0 and below 1, after rounding to a multiple "
                          "of 2^-16.")
    if seeds is not None:
        if not isinstance(seeds, Tensor):
            raise ConfigError(f"dropout_seeds are of type {type(seeds).__name__}; an int64 tensor {[batch, heads]}, "
                              "one for each sample and head, is needed.")
        if seeds.shape != (batch, heads) or seeds.dtype != torch.int64:
            raise ConfigError(f"dropout_seeds are {seeds.dtype} {list(seeds.shape)}; int64 {[batch, heads]}, one for "
                              "each sample and head, are needed.")
    return rounded_rate(dropout_p)
