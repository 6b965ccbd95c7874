"""Attention by flash-attn 2, or by torch's own varlen attention: one call per distinct window.

Query heads that share a key/value head can only go into one call when every key/value head of that call serves
equally many of them, so under GQA a window whose heads are unevenly shared takes one call per number of sharers; K
and V are never expanded.  Shapes inside are those of the libraries, [B, T, heads, D].

Attention dropout is not offered: the libraries draw their own masks, which recomputation, another TP size and a
resumed run would not draw again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aah_dist.parallel import device as devices

Heads = slice | Tensor
# (q, k, v, scale, window) -> out, of the heads of one call.
Call = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]


class Group(NamedTuple):
    """What one call computes: query heads, and the key/value heads that they share evenly."""

    window: int
    heads: tuple[int, ...]  # those of one key/value head next to each other
    kv_heads: tuple[int, ...]


@lru_cache(maxsize=256)
def plan(windows: tuple[int, ...], num_kv_heads: int) -> tuple[Group, ...]:
    """The calls for these windows, narrow first."""
    per_kv = len(windows) // num_kv_heads
    sharers: dict[tuple[int, int], list[int]] = {}  # by window and key/value head
    for head, window in enumerate(windows):
        sharers.setdefault((window, head // per_kv), []).append(head)
    kv_heads: dict[tuple[int, int], list[int]] = {}  # by window and number of sharers
    for (window, kv_head), heads in sharers.items():
        kv_heads.setdefault((window, len(heads)), []).append(kv_head)
    return tuple(Group(window, tuple(h for kv in kvs for h in sharers[window, kv]), tuple(kvs))
                 for (window, _), kvs in sorted(kv_heads.items()))


def missing() -> str | None:
    """Why this backend cannot run in this environment at all, as one sentence, or None when it can."""
    if not devices.has_gpu():
        return "the flash backend needs a CUDA device, which this torch build or machine lacks."
    try:
        library()
    except ImportError as error:
        return (f"the installed flash-attn does not load ({str(error).splitlines()[0]}), so reinstall flash-attn 2 for "
                "this torch, or uninstall it to have torch's own varlen attention taken.")
    return None


@cache
def library() -> tuple[str, Call]:
    """The library that is called, by name, and how.

    Raises ImportError when flash-attn is installed and broken: that is not passed over in silence.
    """
    try:
        import flash_attn
    except ModuleNotFoundError as error:
        if error.name != "flash_attn":
            raise
        return "torch varlen_attn", _call_varlen
    if not hasattr(flash_attn, "flash_attn_func"):  # flash-attn 4 alone: flash_attn.cute, called differently
        return "torch varlen_attn", _call_varlen
    return f"flash-attn {flash_attn.__version__}", _call_flash_attn


def _window_size(window: int, length: int) -> tuple[int, int]:
    """The libraries count the keys before and after a query's own, its own excluded; -1 is no limit."""
    return (-1, -1) if window >= length else (window - 1, 0)


def _call_flash_attn(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=scale, causal=True,
                           window_size=_window_size(window, q.shape[1]),
                           deterministic=torch.are_deterministic_algorithms_enabled())


def _call_varlen(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Samples one after the other, [B*T, heads, D]; this library has no flag for causal, only the limit of 0 after."""
    from torch.nn.attention.varlen import varlen_attn

    batch, length = q.shape[:2]
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    before, _ = _window_size(window, length)
    out = varlen_attn(*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, length, length, scale=scale,
                      window_size=(before, 0), enable_gqa=q.shape[2] != k.shape[2])
    return out.unflatten(0, (batch, length))


@lru_cache(maxsize=256)
def _index(heads: tuple[int, ...], device: torch.device) -> Heads:
    """These heads as a slice where they are neighbours (no copy), or as an index on the device (no copy per call)."""
    first, last = heads[0], heads[-1]
    if heads == tuple(range(first, last + 1)):
        return slice(first, last + 1)
    return torch.tensor(heads, device=device)


class _Take(torch.autograd.Function):
    """Some heads of [B, T, heads, D] for each call.

    One function for all calls: autograd's own indexing would fill and add a whole gradient for every call.
    """

    @staticmethod
    def forward(ctx, x: Tensor, parts: tuple[Heads, ...]) -> tuple[Tensor, ...]:
        ctx.shape, ctx.parts = x.shape, parts
        return tuple(x[:, :, heads] for heads in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        taken = sum(grad.shape[2] for grad in grads)
        if taken == ctx.shape[2]:  # every head by one call
            total = grads[0].new_empty(ctx.shape)
            for heads, grad in zip(ctx.parts, grads, strict=True):
                total[:, :, heads] = grad
            return total, None
        total = grads[0].new_zeros(ctx.shape, dtype=torch.promote_types(grads[0].dtype, torch.float32))
        for heads, grad in zip(ctx.parts, grads, strict=True):
            total[:, :, heads] += grad
        return total.to(grads[0].dtype), None


class _Join(torch.autograd.Function):
    """The reverse: the outputs of all calls in their places of [B, T, heads, D]."""

    @staticmethod
    def forward(ctx, parts: tuple[Heads, ...], *outs: Tensor) -> Tensor:
        ctx.parts = parts
        batch, length, _, size = outs[0].shape
        whole = outs[0].new_empty(batch, length, sum(out.shape[2] for out in outs), size)
        for heads, out in zip(parts, outs, strict=True):
            whole[:, :, heads] = out
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad[:, :, heads] for heads in ctx.parts)


def _rows_whole(x: Tensor) -> Tensor:
    """The libraries take any strides but the last, which must be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, ...], scale: float, dropout_p: float, seeds: Tensor | None
) -> Tensor:
    """Attention by one library call per distinct window; shapes as window_attention, bf16 or fp16, dropout_p 0.

    With torch.use_deterministic_algorithms the backward pass is the libraries' deterministic one; by default dq varies
    from run to run in its last bits.
    """
    length, (_, call) = q.shape[2], library()
    q, k, v = (_rows_whole(x).transpose(1, 2) for x in (q, k, v))
    groups = plan(tuple(min(w, length) for w in windows), k.shape[2])
    if len(groups) == 1:
        return call(q, k, v, scale, groups[0].window).transpose(1, 2)
    parts = tuple(_index(group.heads, q.device) for group in groups)
    kv_parts = tuple(_index(group.kv_heads, q.device) for group in groups)
    inputs = zip(_Take.apply(q, parts), _Take.apply(k, kv_parts), _Take.apply(v, kv_parts), groups, strict=True)
    outs = [call(q_g, k_g, v_g, scale, group.window) for q_g, k_g, v_g, group in inputs]
    return _Join.apply(parts, *outs).transpose(1, 2)
