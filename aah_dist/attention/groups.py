"""What is computed together, and in which chunks: the plan of the banded backend.

Heads are counted over the batch: query head h of sample b is b * H + h, key/value head g is b * H_kv + g.  A slab is
some key/value heads with all query heads that read them, so that slabs write to different places and can run in any
order, on any thread.  A part of a slab is its query heads of one window, as many for each of its key/value heads.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

KEY_ALIGN = 16  # a chunk's keys start at a multiple of this: aligned rows, and even, as drop_mask needs
CACHE_BYTES = 4 << 20  # what one chunk may touch, over the heads of a slab
FLASH_BLOCK = 256, 512  # queries and keys in a block of the library's causal flash on CPU, from 768 tokens on

Index = int | slice | Tensor


class Chunk(NamedTuple):
    """Queries start .. end-1, which read keys first .. end-1, the first `before` of them not all of the queries."""

    start: int
    end: int
    first: int
    before: int


class Part(NamedTuple):
    window: int
    share: int  # query heads to each key/value head
    heads: Index  # those of one key/value head next to each other
    flash: bool  # by the library's causal flash, not in chunks


class Slab(NamedTuple):
    kv_heads: Index
    num: int  # key/value heads
    parts: tuple[Part, ...]
    cells: int  # query-key cells that are computed


def chunk_length(window: int, share: int) -> int:
    """Query positions per chunk: long enough to be worth a call, short enough to waste little in the corners."""
    return max(1, (64 if window <= 1024 else 128) // share // KEY_ALIGN) * KEY_ALIGN


@lru_cache(maxsize=64)
def chunks(length: int, window: int, share: int) -> tuple[Chunk, ...]:
    step = chunk_length(window, share)
    result = []
    for start in range(0, length, step):
        end = min(start + step, length)
        first = max(0, start + 1 - window) // KEY_ALIGN * KEY_ALIGN
        result.append(Chunk(start, end, first, max(0, end - window - first)))
    return tuple(result)


def _cells(length: int, window: int, share: int, flash: bool) -> int:
    """Query-key cells computed for the `share` query heads of one key/value head."""
    if flash:
        queries, keys = FLASH_BLOCK
        ends = (min(start + queries, length) for start in range(0, length, queries))
        rows = (min(queries, length - start) for start in range(0, length, queries))
        return share * sum(n * min(-(-end // keys) * keys, length) for n, end in zip(rows, ends, strict=True))
    return share * sum((c.end - c.start) * (c.end - c.first) for c in chunks(length, window, share))


def _index(heads: list[int]) -> Index:
    """A number, or the slice or tensor that selects these ascending or arbitrary heads; a slice gives a view."""
    if len(heads) == 1:
        return heads[0]
    step = heads[1] - heads[0]
    if step > 0 and heads == list(range(heads[0], heads[-1] + 1, step)):
        return slice(heads[0], heads[-1] + 1, step)
    return torch.tensor(heads)


@lru_cache(maxsize=64)
def plan(windows: tuple[int, ...], batch: int, num_kv_heads: int, length: int, size: int, item_bytes: int,
         flash_from: int) -> tuple[Slab, ...]:
    """Slabs for these windows (at most `length` each), those with the most work first.

    size: of a head; item_bytes: of a number at work; flash_from: the shortest full window that flash computes.
    """
    per_kv = len(windows) // num_kv_heads
    alike: dict[tuple[tuple[int, int], ...], list[tuple[int, dict[int, list[int]]]]] = {}
    for kv_head in range(num_kv_heads):
        members: dict[int, list[int]] = {}
        for head in range(kv_head * per_kv, (kv_head + 1) * per_kv):
            members.setdefault(windows[head], []).append(head)
        alike.setdefault(tuple((w, len(members[w])) for w in sorted(members)), []).append((kv_head, members))
    slabs = []
    for kind, kv_heads in alike.items():
        units = [(sample, *unit) for sample in range(batch) for unit in kv_heads]
        count = -(-len(units) // _most_units(kind, length, size, item_bytes, flash_from))
        count = min(len(units), count + count % 2)  # an even number, for two threads
        cells = sum(_cells(length, w, share, w >= max(length, flash_from)) for w, share in kind)
        for turn in range(count):
            some = units[len(units) * turn // count:len(units) * (turn + 1) // count]
            parts = tuple(
                Part(w, share, _index([sample * len(windows) + h for sample, _, of in some for h in of[w]]),
                     w >= max(length, flash_from))
                for w, share in kind)
            kv_index = _index([sample * num_kv_heads + kv_head for sample, kv_head, _ in some])
            slabs.append(Slab(kv_index, len(some), parts, cells * len(some)))
    return tuple(sorted(slabs, key=lambda slab: -slab.cells))


def _most_units(kind: tuple[tuple[int, int], ...], length: int, size: int, item_bytes: int, flash_from: int) -> int:
    """Key/value heads that fit the cache together."""
    touched = 1
    for window, share in kind:
        if window >= max(length, flash_from):
            return 1
        rows = min(chunk_length(window, share), length)
        keys = min(length, window + rows + KEY_ALIGN)
        touched = max(touched, item_bytes * (2 * rows * share * keys + 4 * keys * size))
    return max(1, CACHE_BYTES // touched)
