"""Attention by torch's compiled FlexAttention, under a mask of blocks that is computed from the windows alone.

The windows reach the compiled kernel as a tensor that the mask captures, so new windows need no new compilation; only
new shapes, strides, dtypes or devices do.  Which blocks of BLOCK x BLOCK cells the band touches, and which lie in it
whole, follows from the windows and the length by arithmetic: torch's create_block_mask would evaluate all T x T cells
of every head.

On CPU this backend has a forward pass only.  Attention dropout is not offered: FlexAttention has none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aah_dist.parallel import device as devices

if TYPE_CHECKING:  # at run time it is imported where it is used: it is slow to import
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # side of a block, the library's own default


def missing() -> str | None:
    """Why this backend cannot run in this environment at all, as one sentence, or None when it can."""
    if devices.has_gpu():
        if find_spec("triton") is None:
            return "the flex backend needs the package triton for CUDA, which is not installed; pip install triton."
        return None
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"the flex backend needs a C++ compiler for CPU, and there is no {compiler}; install one or set CXX."
    return None


@cache
def _compiled() -> Callable[..., Tensor]:
    """FlexAttention, compiled for each combination of shapes and dtypes it meets.

    With fullgraph, too many combinations are an error; without, torch would go on uncompiled, with T x T scores.
    """
    from torch.nn.attention.flex_attention import flex_attention as library

    return torch.compile(library, dynamic=False, fullgraph=True)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [H, n, n] -> number of chosen key blocks in each row [1, H, n], and the chosen ones first [1, H, n, n]."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None], order.int()[None]


@lru_cache(maxsize=64)  # layers with windows of their own; a mask of 12 heads is 0.2 MiB at T 4096, 12 MiB at 32768
def block_mask(windows: tuple[int, ...], length: int, device: torch.device) -> BlockMask:
    """The blocks of each head's band; equal to what create_block_mask gives for the same mask."""
    from torch.nn.attention.flex_attention import BlockMask

    with torch.inference_mode(False):  # the cache outlives a caller's inference mode, and backward passes use it
        limits = torch.tensor(windows, device=device)
        number = torch.arange(-(-length // BLOCK), device=device)
        apart = (number[:, None] - number) * BLOCK  # between the first query and the first key of a block
        window = limits[:, None, None]
        touched = (apart >= 0) & (apart - (BLOCK - 1) < window)
        # The last block of queries counts as whole only if its last row exists.
        whole = (apart > 0) & (apart + (BLOCK - 1) < window) & ((number[:, None] + 1) * BLOCK <= length)

        def in_band(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query - key < limits[head])

        return BlockMask.from_kv_blocks(*_ordered(touched & ~whole), *_ordered(whole), BLOCK_SIZE=BLOCK,
                                        mask_mod=in_band, seq_lengths=(length, length))


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, ...], scale: float, dropout_p: float, seeds: Tensor | None
) -> Tensor:
    """Attention by compiled FlexAttention; shapes as window_attention, dropout_p 0, no gradients on CPU."""
    length = q.shape[2]
    if not torch.is_grad_enabled():
        # On CPU the library refuses tensors that require gradients even where none will be asked for.
        q, k, v = (x.detach() for x in (q, k, v))
    mask = block_mask(tuple(min(w, length) for w in windows), length, q.device)
    return _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
