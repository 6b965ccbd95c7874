"""Attention by compiled CPU kernels that compute each head's band only: the Python side of native.cpp.

Shapes: B samples, H query heads, H_kv key/value heads, T tokens, D head size.  All work is done in fp32, or in fp64 for
fp64 inputs; other dtypes are converted as a whole.  Heads run on as many threads as torch uses for one operator, with
the same result on any number.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aah_dist.attention.native_library import Call, Kernels, Matrices, load
from aah_dist.attention.threads import for_each
from aah_dist.config.pairs import pairs

INT_MAX = 2**31 - 1  # BLAS counts in C's int
FEW_PRODUCTS = 8 << 20  # below as many multiplications (cells x D) handing work to threads costs more than it gains


def missing() -> str | None:
    """Why the kernels cannot run here, without a full stop, or None; builds them where they are not there yet."""
    kernels = load()
    return None if isinstance(kernels, Kernels) else kernels


@lru_cache(maxsize=64)
def _units(windows: tuple[int, ...], batch: int, num_kv_heads: int, length: int) -> tuple[Tensor, Tensor, int]:
    """Units of work of forward [B*H] and of backward [B*H_kv], the longest first, and all pairs inside the windows."""
    of_head = torch.tensor([pairs(w, length) for w in windows] * batch, device="cpu")
    of_kv_head = of_head.view(batch * num_kv_heads, -1).sum(1)
    return (*(work.argsort(descending=True, stable=True) for work in (of_head, of_kv_head)), int(of_head.sum()))


def _working(x: Tensor) -> Tensor:
    """In the dtype of the work, with rows that BLAS can read; without a copy where possible."""
    x = (x if x.dtype == torch.float64 else x.float()).resolve_neg()
    return x if x.stride(3) == 1 and (x.shape[2] == 1 or x.shape[3] <= x.stride(2) <= INT_MAX) else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Uninitialized, laid out in memory as x where BLAS can write such rows."""
    return _working(torch.empty_like(x))


def _matrices(x: Tensor) -> Matrices:
    return Matrices(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2) if x.shape[2] > 1 else x.shape[3])


def _run(q: Tensor, k: Tensor, windows: tuple[int, ...], scale: float, dropout_p: float, seeds: Tensor | None,
         backward: bool, log_sum_exp: Tensor, **matrices: Tensor) -> None:
    """Let the kernels work at all units; the tensors are in the dtype of the work."""
    kernels, (batch, heads, length, size) = load(), q.shape
    *orders, inside = _units(windows, batch, k.shape[1], length)
    units, of_heads = orders[backward], torch.tensor(windows, device="cpu")
    call = Call(**{name: _matrices(x) for name, x in {"q": q, "k": k, **matrices}.items()},
                log_sum_exp=log_sum_exp.data_ptr(), windows=of_heads.data_ptr(),
                seeds=None if seeds is None else seeds.data_ptr(), heads=heads, kv_heads=k.shape[1], length=length,
                size=size, scale=scale, keep_scale=1 / (1 - dropout_p), threshold=round(dropout_p * 65536) - 32768,
                units=units.data_ptr(), num_units=len(units), gemm=kernels.gemm[q.dtype],
                set_threads=kernels.set_threads)
    # Threads may outlive this function when a signal's exception ends it.
    call.alive = q, k, matrices, log_sum_exp, of_heads, seeds, units

    def work(_: int) -> None:
        kernels.run(ctypes.byref(call), q.dtype == torch.float64, backward)

    threads = min(torch.get_num_threads(), len(units)) if inside * size >= FEW_PRODUCTS else 1
    for_each(work, range(threads))


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, windows, scale, dropout_p, seeds):
        ctx.options = windows, scale, dropout_p
        q_w, k_w, v_w = map(_working, (q, k, v))
        out = _like(q_w)
        log_sum_exp = q_w.new_empty(q.shape[:3])
        _run(q_w, k_w, *ctx.options, seeds, False, log_sum_exp, v=v_w, out=out)
        ctx.save_for_backward(q, k, v, out, log_sum_exp, seeds)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, log_sum_exp, seeds = ctx.saved_tensors
        q_w, k_w, v_w, grad_w = map(_working, (q, k, v, grad))
        dq, dk, dv = _like(q_w), _like(k_w).zero_(), _like(v_w).zero_()
        _run(q_w, k_w, *ctx.options, seeds, True, log_sum_exp, v=v_w, out=out, grad=grad_w, dq=dq, dk=dk, dv=dv)
        return *(x.to(q.dtype) for x in (dq, dk, dv)), None, None, None, None


def native_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, ...], scale: float, dropout_p: float, seeds: Tensor | None
) -> Tensor:
    """Attention over each head's band; shapes and meaning as window_attention."""
    length = q.shape[2]
    seeds = None if seeds is None else seeds.contiguous()  # saved, so that a change in place is noticed
    return _NativeAttention.apply(q, k, v, tuple(min(w, length) for w in windows), scale, dropout_p, seeds)
