"""What the layers of a model read during a step, and where they leave statistics.

The policy changes only between steps, so one object shared by all layers carries it: no layer decides anything.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch


class StatisticsSink(Protocol):
    """Receives what a layer measured; written, never added to, so that a recomputed forward changes nothing."""

    def write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
              windows: np.ndarray, scale: float) -> None:
        """A forward of layer `layer` (0-based), this rank's heads: q, out [B, H, T, D], k, v [B, H_kv, T, D].

        windows: int64 [H], those that were executed.  scale: factor on the scores.
        """


@dataclass
class StepContext:
    """Shared by all layers of one model; set by the trainer before each forward."""

    seed: int
    windows: np.ndarray
    """int64 [layers, heads]: the policy in force, over all heads, not only this rank's."""
    backend: str = "auto"
    step: int = 0
    samples: list[int] = field(default_factory=list)
    """Place in the sample order of each sample of the current micro batch; dropout is keyed by it."""
    statistics: StatisticsSink | None = None


# Sites that draw dropout; part of the key, so that no two sites share a mask.
EMBEDDING, ATTENTION, ATTENTION_OUTPUT, MLP_OUTPUT = range(4)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64-bit integers whose every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def dropout_keys(context: StepContext, layer: int, site: int, heads: np.ndarray) -> np.ndarray:
    """One key a sample and head: int64 [B, len(heads)], a hash of (seed, step, sample, layer, site, global head).

    Nothing else enters, so recomputation, another TP size, another accumulation and a resume see the same masks.
    """
    with np.errstate(over="ignore"):
        key = np.zeros((), dtype=np.uint64)
        for part in (context.seed, context.step, layer, site):
            key = _mix(key + _GOLDEN + np.uint64(part & 0xFFFFFFFFFFFFFFFF))
        samples = _mix(key + _GOLDEN + np.asarray(context.samples, dtype=np.uint64))
        keys = _mix(samples[:, None] + _GOLDEN + heads.astype(np.uint64)[None])
    return (keys >> np.uint64(1)).astype(np.int64)
