"""Heads that are computed together, and how they are taken out of and put back into [B, heads, T, D]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Heads that are computed together: `share` query heads to each of `kv_heads`."""

    window: int
    share: int
    heads: tuple[int, ...]  # those of one key/value head next to each other
    kv_heads: tuple[int, ...]


@lru_cache(maxsize=256)
def plan(windows: tuple[int, ...], num_kv_heads: int) -> tuple[Group, ...]:
    """Groups of heads for these windows, narrow first."""
    per_kv = len(windows) // num_kv_heads
    members: dict[tuple[int, int], list[int]] = {}
    for head, window in enumerate(windows):
        members.setdefault((window, head // per_kv), []).append(head)
    groups: dict[tuple[int, int], list[int]] = {}
    for (window, kv_head), heads in members.items():
        groups.setdefault((window, len(heads)), []).append(kv_head)
    return tuple(
        Group(window, share, tuple(h for kv in kv_heads for h in members[window, kv]), tuple(kv_heads))
        for (window, share), kv_heads in sorted(groups.items())
    )


@lru_cache(maxsize=256)
def index_of(heads: tuple[int, ...]) -> slice | Tensor:
    first, last = heads[0], heads[-1]
    return slice(first, last + 1) if heads == tuple(range(first, last + 1)) else torch.tensor(heads)


def take(x: Tensor, heads: tuple[int, ...], share: int, dtype: torch.dtype) -> Tensor:
    """Those heads of [B, heads, T, D] as [N, T*share, D] in `dtype`, without a copy where strides allow."""
    _, _, length, size = x.shape
    x = x[:, index_of(heads)].unflatten(1, (-1, share)).transpose(2, 3)
    return x.reshape(-1, length * share, size).to(dtype)


def put(target: Tensor, heads: tuple[int, ...], share: int, x: Tensor) -> None:
    """The reverse of take: write [N, T*share, D] into those heads of [B, heads, T, D]."""
    batch, _, length, size = target.shape
    target[:, index_of(heads)] = x.view(batch, -1, length, share, size).transpose(2, 3).flatten(1, 2).to(target.dtype)


def in_place_view(target: Tensor, heads: tuple[int, ...], share: int, dtype: torch.dtype) -> Tensor | None:
    """Those heads of the contiguous [B, heads, T, D] as a view [N, T, D], or None where there is no such view."""
    index = index_of(heads)
    whole = target.shape[0] == 1 or len(heads) == target.shape[1]
    if share > 1 or target.dtype != dtype or not whole or not isinstance(index, slice):
        return None
    return target[:, index].view(-1, *target.shape[2:])
