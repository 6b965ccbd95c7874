"""The simple policy: no scorer, no hierarchy.

The paper plans a simple policy and does not define it; this is ours.  Heads are sorted by their entropy feature (the
smoothed one; equal ones by index), inside each head block, and the window list is filled by fixed quotas: the most
concentrated heads get the smallest windows.  Entropy is bounded by the window it is measured under, so a head with a
small window tends to keep it.
"""

import numpy as np

from aah_dist.control.settings import Settings

_ENTROPY = 6


def quota_counts(shares: list[float] | None, windows: int, units: int) -> list[int]:
    """Units for each window, summing to `units`: the shares by largest remainder, equal shares where None."""
    exact = np.asarray(shares if shares is not None else [1 / windows] * windows) * units
    counts = np.floor(exact + 1e-9).astype(int)
    for k in np.argsort(counts - exact, kind="stable")[: units - counts.sum()]:
        counts[k] += 1
    return counts.tolist()


def simple_choice(features: np.ndarray, settings: Settings) -> np.ndarray:
    """int64 [units] window indices from smoothed features [units, 9]."""
    choice = np.empty(settings.units, dtype=np.int64)
    for block in settings.blocks():
        order = block[np.argsort(features[block, _ENTROPY], kind="stable")]
        counts = quota_counts(settings.aah.quotas, len(settings.windows), len(block))
        choice[order] = np.repeat(np.arange(len(settings.windows)), counts)
    return choice
