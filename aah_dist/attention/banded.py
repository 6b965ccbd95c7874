"""Attention that computes each head's band only, in chunks of queries; long full heads by causal flash on CPU.

Shapes: B samples, H query heads, H_kv key/value heads, T tokens, D head size, W window.  groups.py says what is
computed together: a slab of n key/value heads, and in it the m query heads of each that have the same window.  Their
queries [n*m, T, D] meet keys and values [n, T, D] in chunks of c positions, as products of [n, m*c, D] with
[n, keys, D]: K and V are never expanded.  Where n = 1 these tensors lack the dimension n, where n*m = 1 the dimension
n*m.

Only q, k, v are saved, with the output and its log-sum-exp if flash is used; the backward pass computes the
probabilities again.  All work is done in fp32, or in fp64 for fp64 inputs.  On CPU slabs run on as many threads as
torch uses, with the same result on any number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aah_dist.attention.dropout import drop_mask, row_keys
from aah_dist.attention.groups import KEY_ALIGN, Chunk, Index, Part, Slab, chunks, plan
from aah_dist.attention.threads import for_each

# The operators behind F.scaled_dot_product_attention on CPU, called directly because the function below needs
# their log-sum-exp and their backward.  They take fewer key/value heads than query heads as they are.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

FLASH_MIN_LENGTH = 1024  # below, the coarse causal blocks of flash (256 x 512) cost more than chunks do
FEW_PRODUCTS = 8 << 20  # below as many multiplications (cells x D) handing work to threads costs more than it gains


@lru_cache(maxsize=32)
def _corners(chunk: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Additive masks, 0 or -inf, of a chunk's two corners: keys after the query, and keys before its window.

    Both are aligned at the bottom right.  The last row is the chunk's last query, at position e; the last column
    is the key at e in the first mask and the key at e - W in the second.
    """
    query = torch.arange(-chunk, 0, device=device)[:, None]
    late_key = torch.arange(-chunk, 0, device=device)
    early_key = torch.arange(-chunk - KEY_ALIGN, 0, device=device)
    zero = torch.zeros((), dtype=dtype, device=device)
    return zero.masked_fill(late_key > query, float("-inf")), zero.masked_fill(early_key <= query, float("-inf"))


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def slabs_of(q: Tensor, num_kv_heads: int, windows: tuple[int, ...], dropout_p: float = 0.0) -> tuple[Slab, ...]:
    """What is computed for q [B, H, T, D] under these windows, each at most T."""
    flash_from = FLASH_MIN_LENGTH if q.is_cpu and dropout_p == 0 else sys.maxsize
    return plan(windows, q.shape[0], num_kv_heads, *q.shape[2:], _working_dtype(q).itemsize, flash_from)


def _select(x: Tensor, heads: Index, dtype: torch.dtype) -> Tensor:
    """Those heads of [B*heads, T, D] in `dtype` with unit stride along D; without a copy where possible."""
    x = x[heads].to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _target(x: Tensor, heads: Index, dtype: torch.dtype) -> Tensor:
    """Where results for those heads of the contiguous [B*heads, T, D] are written: in place, or to be put there."""
    chosen = x[heads]
    return chosen if chosen.dtype == dtype and not isinstance(heads, Tensor) else torch.empty_like(chosen, dtype=dtype)


def _put(x: Tensor, heads: Index, result: Tensor) -> None:
    if isinstance(heads, Tensor) or result.dtype != x.dtype:
        x[heads] = result.to(x.dtype)


class _Scores(NamedTuple):
    """Probabilities and their gradients for chunks of one shape, with the views of them that a chunk needs."""

    p: Tensor  # [n, m*c, keys]
    ds: Tensor
    p_by_head: Tensor  # [n*m, c, keys]
    ds_by_head: Tensor
    late: tuple[Tensor, Tensor]  # the keys that not all queries read, and the mask to add to them
    early: tuple[Tensor, Tensor] | None


class _Band:
    """The chunk loop of one part of a slab."""

    def __init__(self, num: int, part: Part, q: Tensor, scale: float, dropout_p: float, seeds: Tensor | None) -> None:
        self.length, self.size = q.shape[-2:]
        self.share, self.heads = part.share, num * part.share
        self.scale, self.dropout_p = scale, dropout_p
        self.lead, self.product = ((num,), torch.baddbmm) if num > 1 else ((), torch.addmm)
        self.chunks = chunks(self.length, part.window, part.share)
        self.step = self.chunks[0].end
        self.corners = _corners(self.step, q.dtype, q.device)
        self.buffers = q.new_empty(2, self.heads * max((c.end - c.start) * (c.end - c.first) for c in self.chunks))
        self.row_keys = None
        if dropout_p > 0:
            of_part = seeds.flatten()[part.heads].to(q.device).view(self.heads)
            self.row_keys = row_keys(of_part, self.length)

    def scores(self) -> Iterator[_Scores]:
        """What each chunk computes in; made anew only where the shape changes."""
        shape = found = None
        for chunk in self.chunks:
            positions, keys = chunk.end - chunk.start, chunk.end - chunk.first
            if shape != (positions, keys, chunk.before):
                shape = positions, keys, chunk.before
                p, ds = self.buffers[:, : self.heads * positions * keys].view(2, self.heads, positions, keys)
                late, early = (corner[-positions:] for corner in self.corners)
                found = _Scores(
                    *(x.view(*self.lead, self.share * positions, keys) for x in (p, ds)), p, ds,
                    (p[:, :, keys - positions :], late[:, -positions:]),
                    (p[:, :, : chunk.before], early[:, -chunk.before :]) if chunk.before else None)
            yield found

    def queries(self, x: Tensor) -> list[Tensor]:
        """[n*m, T, D] -> [n, m*c, D] for each chunk; views where m = 1."""
        parts = x.split(self.step, -2)
        return parts if self.share == 1 else [part.reshape(*self.lead, -1, self.size) for part in parts]

    def keys(self, x: Tensor) -> list[Tensor]:
        """[n, T, D] -> a view [n, keys, D] for each chunk."""
        views = [x.narrow(-2, c.first, c.end - c.first) for c in self.chunks if not self._is_inner(c)]
        inner = [i for i, c in enumerate(self.chunks) if self._is_inner(c)]
        if inner:  # one call for these: cutting each view by itself costs as much as a small product
            first, last = self.chunks[inner[0]], self.chunks[inner[-1]]
            band = x.narrow(-2, first.first, last.end - first.first).unfold(-2, first.end - first.first, self.step)
            views[inner[0] : inner[0]] = band.movedim(-3, 0).transpose(-1, -2).unbind(0)
        return views

    def _is_inner(self, chunk: Chunk) -> bool:
        return chunk.first > 0 and chunk.end - chunk.start == self.step

    def probabilities(self, s: _Scores, q: Tensor, k: Tensor) -> None:
        """The softmax of a chunk's scores under the window, into s.p."""
        self.product(s.p, q, k.transpose(-1, -2), beta=0, alpha=self.scale, out=s.p)
        for keys, mask in filter(None, (s.late, s.early)):
            keys.add_(mask)
        if s.p.is_cpu:
            torch.ops.aten._softmax.out(s.p, -1, False, out=s.p)
        else:
            s.p.copy_(s.p.softmax(-1))

    def dropped(self, chunk: Chunk) -> Tensor | None:
        """Where dropout removes a probability, [n*m, c, keys]; None without dropout."""
        if self.row_keys is None:
            return None
        rows = self.row_keys[..., chunk.start : chunk.end]
        return drop_mask(rows, chunk.first, chunk.end - chunk.first, self.dropout_p)

    def write(self, target: Tensor, x: Tensor, y: Tensor, alpha: float) -> None:
        """alpha * x y, [n, m*c, D], into target [n*m, c, D]."""
        if self.share == 1:
            self.product(target, x, y, beta=0, alpha=alpha, out=target)
        else:
            target.copy_(torch.matmul(x, y).mul_(alpha).view(target.shape))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write the outputs [n*m, T, D] into `out`."""
        loop = zip(self.chunks, self.scores(), self.queries(q), self.keys(k), self.keys(v), out.split(self.step, -2),
                   strict=True)
        for chunk, s, q_c, k_c, v_c, out_c in loop:
            self.probabilities(s, q_c, k_c)
            dropped = self.dropped(chunk)
            if dropped is not None:
                s.p_by_head.masked_fill_(dropped, 0)
            self.write(out_c, s.p, v_c, 1 / (1 - self.dropout_p))

    def backward(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write the gradient of q into `dq`; add those of k and v to `dk`, `dv`."""
        keep_scale = 1 / (1 - self.dropout_p)
        loop = zip(self.chunks, self.scores(), self.queries(q), self.queries(grad), dq.split(self.step, -2),
                   *map(self.keys, (k, v, dk, dv)), strict=True)
        for chunk, s, q_c, grad_c, dq_c, k_c, v_c, dk_c, dv_c in loop:
            self.probabilities(s, q_c, k_c)
            self.product(s.ds, grad_c, v_c.transpose(-1, -2), beta=0, alpha=keep_scale, out=s.ds)
            dropped, kept = self.dropped(chunk), s.p
            if dropped is not None:
                kept = s.p_by_head.masked_fill(dropped, 0).view_as(s.p)
                s.ds_by_head.masked_fill_(dropped, 0)
            self.product(dv_c, kept.transpose(-1, -2), grad_c, alpha=keep_scale, out=dv_c)
            if s.ds.is_cpu:
                torch.ops.aten._softmax_backward_data.out(s.ds, s.p, -1, s.ds.dtype, grad_input=s.ds)
            else:
                s.ds.copy_(torch.ops.aten._softmax_backward_data(s.ds, s.p, -1, s.ds.dtype))
            self.write(dq_c, s.ds, k_c, self.scale)
            self.product(dk_c, s.ds.transpose(-1, -2), q_c, alpha=self.scale, out=dk_c)


class _Call(NamedTuple):
    """What forward and backward of one call share; tensors are [B*heads, T, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    seeds: Tensor | None
    scale: float
    dropout_p: float

    @property
    def dtype(self) -> torch.dtype:
        return _working_dtype(self.q)

    def band(self, slab: Slab, part: Part, q: Tensor) -> _Band:
        return _Band(slab.num, part, q, self.scale, self.dropout_p, self.seeds)

    def forward(self, out: Tensor, slab: Slab) -> list[Tensor]:
        """Write the slab's outputs; returns the log-sum-exp of each part that flash computes."""
        saved = []
        k, v = (_select(x, slab.kv_heads, self.dtype) for x in (self.k, self.v))
        for part in slab.parts:
            q, out_p = _select(self.q, part.heads, self.dtype), _target(out, part.heads, self.dtype)
            if part.flash:
                out_f, log_sum_exp = _flash(*(_flash_shape(x, slab.num) for x in (q, k, v)), 0.0, True,
                                            scale=self.scale)
                out_p.copy_(out_f.view_as(out_p))
                saved.append(log_sum_exp)
            else:
                self.band(slab, part, q).forward(q, k, v, out_p)
            _put(out, part.heads, out_p)
        return saved

    def backward(self, out: Tensor | None, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
                 work: tuple[Slab, list[Tensor]]) -> None:
        """Write the slab's gradients; work: the slab and what forward returned for it."""
        slab, saved = work
        k, v = (_select(x, slab.kv_heads, self.dtype) for x in (self.k, self.v))
        dk_s, dv_s = (_target(x, slab.kv_heads, self.dtype).zero_() for x in (dk, dv))
        for part in slab.parts:
            q, grad_p = (_select(x, part.heads, self.dtype) for x in (self.q, grad))
            dq_p = _target(dq, part.heads, self.dtype)
            if part.flash:
                inputs = grad_p, q, k, v, _select(out, part.heads, self.dtype)
                grads = _flash_backward(*(_flash_shape(x, slab.num) for x in inputs), *saved, 0.0, True,
                                        scale=self.scale)
                dq_p.copy_(grads[0].view_as(dq_p))
                dk_s += grads[1].view_as(dk_s)
                dv_s += grads[2].view_as(dv_s)
            else:
                self.band(slab, part, q).backward(q, k, v, grad_p, dq_p, dk_s, dv_s)
            _put(dq, part.heads, dq_p)
        _put(dk, slab.kv_heads, dk_s)
        _put(dv, slab.kv_heads, dv_s)


def _flash_shape(x: Tensor, num: int) -> Tensor:
    """[n*m, T, D], the first dimension left out if 1, as [n, m, T, D]."""
    return x.view(num, -1, *x.shape[-2:]) if x.dim() == 2 else x.unflatten(0, (num, -1))


class _BandedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, windows, scale, dropout_p, seeds):
        call = _Call(*(x.flatten(0, 1) for x in (q, k, v)), seeds, scale, dropout_p)
        ctx.slabs = slabs_of(q, k.shape[1], windows, dropout_p)
        ctx.scale, ctx.dropout_p = scale, dropout_p
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            saved = _run(partial(call.forward, out.flatten(0, 1)), ctx.slabs, ctx.slabs, q)
        ctx.num_saved = [len(tensors) for tensors in saved]
        ctx.save_for_backward(q, k, v, seeds, out if any(saved) else None, *(x for tensors in saved for x in tensors))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, seeds, out, *flat = ctx.saved_tensors
        saved = [[flat.pop(0) for _ in range(num)] for num in ctx.num_saved]
        call = _Call(*(x.flatten(0, 1) for x in (q, k, v)), seeds, ctx.scale, ctx.dropout_p)
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        with torch.autocast(q.device.type, enabled=False):
            out = None if out is None else out.flatten(0, 1)
            work = partial(call.backward, out, grad.flatten(0, 1), *(x.flatten(0, 1) for x in grads))
            _run(work, list(zip(ctx.slabs, saved, strict=True)), ctx.slabs, q)
        return *grads, None, None, None, None


def _run(function: Callable, items: Sequence, slabs: Sequence[Slab], q: Tensor) -> list:
    """function(item) of each, on several threads where that pays."""
    if q.is_cpu and sum(slab.cells for slab in slabs) * q.shape[-1] >= FEW_PRODUCTS:
        return for_each(function, items)
    return [function(item) for item in items]


def banded_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, ...], scale: float, dropout_p: float, seeds: Tensor | None
) -> Tensor:
    """Attention over each head's band; shapes and meaning as window_attention."""
    length = q.shape[2]
    return _BandedAttention.apply(q, k, v, tuple(min(w, length) for w in windows), scale, dropout_p, seeds)
