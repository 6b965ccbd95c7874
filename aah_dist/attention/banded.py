"""Attention that computes each head's band only, in chunks of queries; long full heads by causal flash on CPU.

Shapes: B samples, H query heads, H_kv key/value heads, T tokens, D head size.  The heads of one call are
grouped by window and by how many query heads of that window share a key/value head (m; 1 without GQA).
A group is computed as queries [N, T*m, D] against keys [N, T, D], N = B x its key/value heads: the m query
heads of one key/value head lie side by side at every position, so a chunk of positions is a plain slice and
K, V are never expanded.

Only q, k, v (and what flash needs) are saved; the backward pass computes the probabilities again.  All work is
done in fp32, or in fp64 for fp64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aah_dist.attention.dropout import drop_mask, row_keys
from aah_dist.attention.groups import Group, in_place_view, index_of, plan, put, take

# The operators behind F.scaled_dot_product_attention on CPU, called directly because the function below needs
# their log-sum-exp and their backward.  They take fewer key/value heads than query heads as they are.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

FLASH_MIN_LENGTH = 1024  # below, the coarse causal blocks of flash (256 x 512) cost more than chunks do
KEY_ALIGN = 16  # a chunk's keys start at a multiple of this: aligned rows, and even, as drop_mask needs
CACHE_BYTES = 4 << 20  # what one chunk may touch, over the heads that are computed in one go


def _uses_flash(group: Group, q: Tensor, dropout_p: float) -> bool:
    length = q.shape[2]
    return q.is_cpu and dropout_p == 0 and group.window >= length >= FLASH_MIN_LENGTH


def chunk_length(window: int, share: int) -> int:
    """Query positions per chunk: long enough to be worth a call, short enough to waste little in the corners."""
    return max(KEY_ALIGN, (64 if window <= 512 else 128) // share)


@lru_cache(maxsize=32)
def _corners(chunk: int, share: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Additive masks, 0 or -inf, of a chunk's two corners: keys after the query, and keys before its window.

    Both are aligned at the bottom right.  The last row is the chunk's last query, at position e; the last column
    is the key at e in the first mask and the key at e - W in the second.
    """
    query = torch.arange(-chunk, 0, device=device).repeat_interleave(share)[:, None]
    late_key = torch.arange(-chunk, 0, device=device)
    early_key = torch.arange(-chunk - KEY_ALIGN, 0, device=device)
    zero = torch.zeros((), dtype=dtype, device=device)
    return zero.masked_fill(late_key > query, float("-inf")), zero.masked_fill(early_key <= query, float("-inf"))


class _Chunk(NamedTuple):
    """One step of the loop: slices of the group's tensors."""

    heads: slice
    rows: slice  # of queries, gradients and outputs [N, T*m, D]
    keys: slice  # of keys and values [N, T, D]
    before: int  # leading keys that lie before some query's window


class _Band:
    """The chunk loop of one group, with the buffers that its chunks share."""

    def __init__(self, group: Group, q: Tensor, scale: float, dropout_p: float, seeds: Tensor | None) -> None:
        self.num, rows, size = q.shape
        self.share, self.scale, self.dropout_p = group.share, scale, dropout_p
        self.length = rows // group.share
        self.window = min(group.window, self.length)
        self.chunk = chunk_length(self.window, group.share)
        self.late, self.early = _corners(self.chunk, group.share, q.dtype, q.device)
        most_keys = min(self.length, self.window + self.chunk + KEY_ALIGN)
        most_cells = min(self.chunk, self.length) * group.share * most_keys
        touched = q.element_size() * (2 * most_cells + 4 * most_keys * size)
        self.slab = min(self.num, max(1, CACHE_BYTES // touched))
        self.buffers = q.new_empty(2, self.slab * most_cells)
        self.keys = None
        if dropout_p > 0:
            of_group = seeds[:, index_of(group.heads)].reshape(self.num, group.share).to(q.device)
            self.keys = row_keys(of_group, self.length).transpose(-1, -2).reshape(2, self.num, rows)

    def __iter__(self) -> Iterator[_Chunk]:
        for head in range(0, self.num, self.slab):
            heads = slice(head, min(head + self.slab, self.num))
            for start in range(0, self.length, self.chunk):
                end = min(start + self.chunk, self.length)
                first = max(0, start + 1 - self.window) // KEY_ALIGN * KEY_ALIGN
                rows = slice(start * self.share, end * self.share)
                yield _Chunk(heads, rows, slice(first, end), max(0, end - self.window - first))

    def product(self, buffer: int, x: Tensor, y: Tensor, alpha: float) -> Tensor:
        """alpha * x y^T, [n, rows, keys], in one of the two buffers."""
        shape = x.shape[0], x.shape[1], y.shape[1]
        out = self.buffers[buffer, : shape[0] * shape[1] * shape[2]].view(shape)
        return out.baddbmm_(x, y.transpose(1, 2), beta=0, alpha=alpha)

    def probabilities(self, chunk: _Chunk, q: Tensor, k: Tensor) -> Tensor:
        """Softmax of a chunk's scores under the window."""
        scores = self.product(0, q, k, self.scale)
        rows, keys = scores.shape[1:]
        positions = rows // self.share
        scores[:, :, keys - positions :].add_(self.late[-rows:, -positions:])
        if chunk.before:
            scores[:, :, : chunk.before].add_(self.early[-rows:, -chunk.before :])
        if scores.is_cpu:
            return torch.ops.aten._softmax.out(scores, -1, False, out=scores)
        return scores.softmax(-1)

    def dropped(self, chunk: _Chunk) -> Tensor | None:
        """Where dropout removes a probability, [n, rows, keys]; None without dropout."""
        if self.keys is None:
            return None
        first, end = chunk.keys.start, chunk.keys.stop
        return drop_mask(self.keys[:, chunk.heads, chunk.rows], first, end - first, self.dropout_p)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write the outputs [N, T*m, D] into `out`."""
        for chunk in self:
            heads, rows, keys, _ = chunk
            p = self.probabilities(chunk, q[heads, rows], k[heads, keys])
            dropped = self.dropped(chunk)
            if dropped is not None:
                p = p.masked_fill_(dropped, 0)
            out[heads, rows].baddbmm_(p, v[heads, keys], beta=0, alpha=1 / (1 - self.dropout_p))

    def backward(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write the gradient of q into `dq`; add those of k and v to `dk`, `dv`."""
        keep_scale = 1 / (1 - self.dropout_p)
        for chunk in self:
            heads, rows, keys, _ = chunk
            q_c, k_c, grad_c = q[heads, rows], k[heads, keys], grad[heads, rows]
            p = self.probabilities(chunk, q_c, k_c)
            ds = self.product(1, grad_c, v[heads, keys], keep_scale)
            dropped = self.dropped(chunk)
            kept = p
            if dropped is not None:
                kept = p.masked_fill(dropped, 0)
                ds.masked_fill_(dropped, 0)
            dv[heads, keys].baddbmm_(kept.transpose(1, 2), grad_c, alpha=keep_scale)
            if ds.is_cpu:
                torch.ops.aten._softmax_backward_data.out(ds, p, -1, ds.dtype, grad_input=ds)
            else:
                ds = torch.ops.aten._softmax_backward_data(ds, p, -1, ds.dtype)
            dq[heads, rows].baddbmm_(ds, k_c, beta=0, alpha=self.scale)
            dk[heads, keys].baddbmm_(ds.transpose(1, 2), q_c, alpha=self.scale)


def _flash_heads(x: Tensor, heads: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Those heads of [B, heads, T, D] as the flash operators need them: they take the last stride to be 1."""
    x = x[:, index_of(heads)].to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _BandedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, windows, scale, dropout_p, seeds):
        dtype = _working_dtype(q)
        ctx.groups, ctx.scale, ctx.dropout_p = plan(windows, k.shape[1]), scale, dropout_p
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        flash_saved = []
        with torch.autocast(q.device.type, enabled=False):
            for group in ctx.groups:
                if _uses_flash(group, q, dropout_p):
                    inputs = [_flash_heads(q, group.heads, dtype)]
                    inputs += [_flash_heads(x, group.kv_heads, dtype) for x in (k, v)]
                    out_g, log_sum_exp = _flash(*inputs, 0.0, True, scale=scale)
                    flash_saved += [out_g, log_sum_exp]
                    if len(ctx.groups) == 1:
                        out = out_g.to(q.dtype)
                    else:
                        out[:, index_of(group.heads)] = out_g.to(q.dtype)
                    continue
                q_g = take(q, group.heads, group.share, dtype)
                k_g, v_g = (take(x, group.kv_heads, 1, dtype) for x in (k, v))
                view = in_place_view(out, group.heads, group.share, dtype)
                out_g = torch.empty_like(q_g) if view is None else view
                _Band(group, q_g, scale, dropout_p, seeds).forward(q_g, k_g, v_g, out_g)
                if view is None:
                    put(out, group.heads, group.share, out_g)
        ctx.save_for_backward(q, k, v, seeds, *flash_saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, seeds, *flash_saved = ctx.saved_tensors
        dtype = _working_dtype(q)
        with torch.autocast(q.device.type, enabled=False):
            if len(ctx.groups) == 1 and flash_saved:
                grads = _flash_group_backward(ctx.groups[0], q, k, v, grad, flash_saved, ctx.scale)
                return *(x.to(q.dtype) for x in grads), None, None, None, None
            dq = torch.empty(q.shape, dtype=dtype, device=q.device)
            dk, dv = (torch.zeros(k.shape, dtype=dtype, device=q.device) for _ in range(2))
            for group in ctx.groups:
                heads, kv_heads = index_of(group.heads), index_of(group.kv_heads)
                if _uses_flash(group, q, ctx.dropout_p):
                    saved, flash_saved = flash_saved[:2], flash_saved[2:]
                    dq[:, heads], dk_g, dv_g = _flash_group_backward(group, q, k, v, grad, saved, ctx.scale)
                    dk[:, kv_heads] += dk_g
                    dv[:, kv_heads] += dv_g
                    continue
                q_g, grad_g = (take(x, group.heads, group.share, dtype) for x in (q, grad))
                k_g, v_g = (take(x, group.kv_heads, 1, dtype) for x in (k, v))
                view, dk_view, dv_view = (in_place_view(dq, group.heads, group.share, dtype),
                                          *(in_place_view(x, group.kv_heads, 1, dtype) for x in (dk, dv)))
                dq_g = torch.empty_like(q_g) if view is None else view
                dk_g, dv_g = (torch.zeros_like(k_g) if x is None else x for x in (dk_view, dv_view))
                _Band(group, q_g, ctx.scale, ctx.dropout_p, seeds).backward(q_g, k_g, v_g, grad_g, dq_g, dk_g, dv_g)
                if view is None:
                    put(dq, group.heads, group.share, dq_g)
                if dk_view is None:
                    dk[:, kv_heads] += dk_g.view(-1, len(group.kv_heads), *dk.shape[2:])
                    dv[:, kv_heads] += dv_g.view(-1, len(group.kv_heads), *dv.shape[2:])
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None, None


def _flash_group_backward(
    group: Group, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, saved: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _working_dtype(q)
    grad, q = (_flash_heads(x, group.heads, dtype) for x in (grad, q))
    k, v = (_flash_heads(x, group.kv_heads, dtype) for x in (k, v))
    return _flash_backward(grad, q, k, v, *saved, 0.0, True, scale=scale)


def banded_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, ...], scale: float, dropout_p: float, seeds: Tensor | None
) -> Tensor:
    """Attention over each head's band; shapes and meaning as window_attention."""
    length = q.shape[2]
    return _BandedAttention.apply(q, k, v, tuple(min(w, length) for w in windows), scale, dropout_p, seeds)
