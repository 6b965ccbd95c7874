"""Dropout masks that are a function of (seed, query, key) alone.

No generator and no state: whether the probability of query i and key j of one head of one sample is dropped
follows from that head's 64-bit seed, i and j.  So every backend, chunking, window and arrangement of the batch
sees the same mask, forward, backward and in recomputation, on every device.

A query's row gets two 32-bit keys by the splitmix64 finaliser of (seed, i); two neighbouring keys j, j+1 (j
even) share one 32-bit word, a murmur3 finaliser of j/2 keyed by both, whose halves decide for one each.  Drop
probabilities are therefore multiples of 2^-16 (rounded_rate).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int, bits: int) -> int:
    """The two's complement of an unsigned constant: torch's integers are signed and wrap around."""
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN_64 = _signed(0x9E3779B97F4A7C15, 64)
_MIX_64 = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
_GOLDEN_32 = _signed(0x9E3779B9, 32)
_MIX_32 = _signed(0x85EBCA6B, 32), _signed(0xC2B2AE35, 32)


def draw_seeds(batch: int, heads: int) -> Tensor:
    """Fresh seeds, int64 [batch, heads] on the CPU, from torch's default generator."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (batch, heads), dtype=torch.int64)


def rounded_rate(dropout_p: float) -> float:
    """The nearest probability with which a mask can drop."""
    return round(float(dropout_p) * 65536) / 65536


def _mix_64(x: Tensor) -> Tensor:
    for shift, factor in ((30, _MIX_64[0]), (27, _MIX_64[1])):
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, shift: int) -> Tensor:
    """Logical shift: torch's own repeats the sign bit, and x ^ (x >> n) would lose it."""
    return (x >> shift).bitwise_and_((1 << (x.element_size() * 8 - shift)) - 1)


def row_keys(seeds: Tensor, length: int) -> Tensor:
    """Keys of query rows 0 .. length-1: int64 seeds [...] -> int32 [2, ..., length]."""
    rows = torch.arange(1, length + 1, dtype=torch.int64, device=seeds.device) * _GOLDEN_64
    return _mix_64(_mix_64(seeds)[..., None] + rows).view(torch.int32).unflatten(-1, (length, 2)).movedim(-1, 0)


def drop_mask(keys: Tensor, first_key: int, num_keys: int, dropout_p: float) -> Tensor:
    """Which probabilities are dropped: row keys int32 [2, ...] -> bool [..., num_keys] (True: dropped).

    The columns are keys first_key .. first_key + num_keys - 1; first_key is even.  dropout_p is below 1.
    """
    first, second = keys[..., None]
    pairs = torch.arange(first_key // 2, (first_key + num_keys + 1) // 2, dtype=torch.int32, device=keys.device)
    word = first + pairs * _GOLDEN_32
    word ^= _shift_right(word, 16)
    word *= _MIX_32[0]
    word ^= second
    word ^= _shift_right(word, 15)
    word *= _MIX_32[1]
    word ^= _shift_right(word, 16)
    threshold = round(dropout_p * 65536) - 32768
    return word.view(torch.int16)[..., :num_keys] < threshold
