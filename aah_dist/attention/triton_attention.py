"""The triton backend: triton_kernels.py as a differentiable function, and how its kernels are launched.

Deterministic: no atomics, and no choice that is made while running.  Proven without a GPU, in Triton's interpreter: the
mathematics and the bounds of every loop.  Not proven there: the rounding of bf16 and fp16 products on a device, races
between the threads of a program, and speed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aah_dist.attention.dropout import row_keys
from aah_dist.parallel.device import has_gpu

MAX_STRIDE = 1 << 23  # rows this far apart, in elements, still have 32-bit offsets within a tile of 128


class Launch(NamedTuple):
    """How a kernel is compiled: query rows and key rows of a tile, warps of a program, depth of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


LAUNCHES = {
    ("forward", 2, 64): Launch(64, 64, 4, 3),
    ("forward", 2, 128): Launch(64, 64, 4, 2),
    ("forward", 4, 64): Launch(32, 32, 4, 2),
    ("forward", 4, 128): Launch(32, 32, 8, 1),
    ("backward_q", 2, 64): Launch(64, 64, 4, 2),
    ("backward_q", 2, 128): Launch(64, 64, 4, 2),
    ("backward_q", 4, 64): Launch(32, 32, 4, 2),
    ("backward_q", 4, 128): Launch(32, 32, 8, 1),
    ("backward_kv", 2, 64): Launch(64, 64, 4, 2),
    ("backward_kv", 2, 128): Launch(32, 64, 4, 2),
    ("backward_kv", 4, 64): Launch(32, 32, 4, 2),
    ("backward_kv", 4, 128): Launch(32, 32, 8, 1),
}
"""By kernel, bytes of an element and head size; chosen from what the assembler reports, not by time on a device.  With
two bytes an element no more than 8 bytes a thread are spilled and the shared memory is what every GPU since sm_80 has
(tests/test_triton_compile.py).  fp32 is there to be exact: backward_q spills some 360 bytes at head size 128."""


def launch_of(kernel: str, dtype: torch.dtype, size: int) -> Launch:
    return LAUNCHES[kernel, dtype.itemsize, max(64, padded(size))]


def padded(size: int) -> int:
    """The head size that the kernels compute with: a power of two that tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing() -> str | None:
    """Why this backend cannot run in this environment at all, in one sentence, or None when it can."""
    if find_spec("triton") is None:
        return "the triton backend needs the package triton, which is not installed; pip install triton."
    if not has_gpu() and not interpreted():
        return ("the triton backend needs a CUDA device, which this torch build or machine lacks; to test it on CPU "
                "set TRITON_INTERPRET=1 before the start.")
    return None


def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, ...], scale: float, dropout_p: float, seeds: Tensor | None
) -> Tensor:
    """Attention by Triton kernels, all heads in one launch; shapes as window_attention.

    fp32, bf16 or fp16; products of fp32 are in full precision, softmax and sums in fp32.  D up to 128; one that is not
    a power of two costs as much as the next.  Key/value heads are not expanded, and strided inputs are not copied when
    D's stride is 1.  A change of windows causes one small upload: no compilation, no wait for the device.  Kept for the
    backward pass beside inputs and output: 4 bytes a row of each head.
    """
    return _Attention.apply(q, k, v, windows, scale, dropout_p, seeds if dropout_p > 0 else None)


@lru_cache(maxsize=256)
def _plan(windows: tuple[int, ...], num_kv_heads: int, device: torch.device) -> Tensor:
    """int32 [2 H + H_kv] on the device: windows, heads by falling window, key/value heads by falling sum of windows."""
    heads = sorted(range(len(windows)), key=lambda h: -windows[h])
    group = len(windows) // num_kv_heads
    work = [sum(windows[group * head : group * (head + 1)]) for head in range(num_kv_heads)]
    kv_heads = sorted(range(num_kv_heads), key=lambda head: -work[head])
    return torch.tensor([*windows, *heads, *kv_heads], dtype=torch.int32).to(device, non_blocking=True)


class _Call(NamedTuple):
    """What the three kernels of one call share."""

    shape: tuple[int, ...]  # of q
    kv_heads: int
    dtype: torch.dtype
    plan: Tensor
    scale: float
    dropout_p: float
    seeds: Tensor | None

    def row_keys(self) -> Tensor | None:
        """int32 [B, H, T, 2], made anew for the backward pass: cheaper than keeping them."""
        if self.seeds is None:
            return None
        return row_keys(self.seeds, self.shape[2]).movedim(0, -1).contiguous()

    def run(self, kernel: str, tensors: tuple[Tensor, ...], keys: Tensor | None, strided: tuple[Tensor, ...]) -> None:
        """Launch a kernel: a program for each sample, head and tile."""
        from aah_dist.attention import triton_kernels

        batch, heads, length, size = self.shape
        launch = launch_of(kernel, self.dtype, size)
        programs = batch * heads * -(-length // launch.block_m)
        if kernel == "backward_kv":
            programs = batch * self.kv_heads * -(-length // launch.block_n)
        limit = (round(self.dropout_p * 65536) - 32768) * 65536
        getattr(triton_kernels, kernel)[(programs,)](
            *tensors, self.plan, self.plan if keys is None else keys, *(x.stride()[:3] for x in strided),
            batch, heads, heads // self.kv_heads, length, self.scale, limit, 1 / (1 - self.dropout_p), SIZE=size,
            BLOCK_D=padded(size), BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, DROPOUT=keys is not None,
            num_warps=launch.num_warps, num_stages=launch.num_stages)


def _readable(x: Tensor) -> Tensor:
    """x itself where the kernels' offsets reach it, else a contiguous copy."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= MAX_STRIDE else x.contiguous()


def _on(device: torch.device) -> AbstractContextManager:
    """Kernels are launched on the current device, which need not be the tensors'."""
    return torch.accelerator.device_index(device.index) if device.type == "cuda" else nullcontext()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, ...], scale: float, dropout_p: float,
                seeds: Tensor | None) -> Tensor:
        q, k, v = (_readable(x) for x in (q, k, v))
        out = torch.empty_like(q)
        log_sums = q.new_empty(q.shape[:3], dtype=torch.float32)
        plan = _plan(tuple(min(w, q.shape[2]) for w in windows), k.shape[1], q.device)
        call = _Call(tuple(q.shape), k.shape[1], q.dtype, plan, scale, dropout_p, seeds)
        with _on(q.device):
            call.run("forward", (q, k, v, out, log_sums), call.row_keys(), (q, k, v, out))
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        q, k, v, out, log_sums = ctx.saved_tensors
        call, grad = ctx.call, _readable(grad)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        deltas = torch.empty_like(log_sums)
        with _on(q.device):
            keys = call.row_keys()
            call.run("backward_q", (q, k, v, out, grad, dq, log_sums, deltas), keys, (q, k, v, out, grad, dq))
            call.run("backward_kv", (q, k, v, grad, dk, dv, log_sums, deltas), keys, (q, k, v, grad, dk, dv))
        return dq, dk, dv, None, None, None, None
