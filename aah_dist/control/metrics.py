"""Figures about windows and groups, in the paper's definitions.

The FLOPs here are the paper's proxy: a formula over rectangular T x W attention, forward only.  They say nothing about
work that was executed.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FlopsProxy:
    """attention: 4 B D T sum(w).  total: with projections and MLP.  ratio: total over that of full attention."""

    attention: float
    total: float
    ratio: float


def flops_proxy(windows: np.ndarray, *, length: int, hidden: int, ffn: int, batch: int = 1) -> FlopsProxy:
    """windows: [layers, heads] in tokens."""
    layers, heads = windows.shape
    attention = 4.0 * batch * (hidden // heads) * length * float(np.minimum(windows, length).sum())
    full = 4.0 * batch * length**2 * hidden * layers
    rest = float(layers * (8 * batch * length * hidden**2 + 4 * batch * length * hidden * ffn))
    return FlopsProxy(attention, attention + rest, (attention + rest) / (full + rest))


def window_figures(windows: np.ndarray, candidates: tuple[int, ...], collapse_fraction: float) -> dict[str, float]:
    """Of windows [layers, heads]: each figure of a layer, averaged over the layers, under its logged name."""
    w = windows.astype(np.float64)
    at_low, at_high = (w == candidates[0]).mean(1), (w == candidates[-1]).mean(1)
    per_layer = {
        "W_mean": w.mean(1), "W_min": w.min(1), "W_max": w.max(1), "Lk_p90": np.quantile(w, 0.9, axis=1),
        "resolution_std": w.std(1), "resolution_min_frac": at_low, "resolution_max_frac": at_high,
        "resolution_collapse_min": at_low >= collapse_fraction, "resolution_collapse_max": at_high >= collapse_fraction}
    figures = {f"aah/{name}": float(values.mean()) for name, values in per_layer.items()}
    return figures | branch_usage(windows, candidates)


def branch_usage(windows: np.ndarray, candidates: tuple[int, ...], prefix: str = "aah/") -> dict[str, float]:
    """Share of all heads that have each window."""
    return {f"{prefix}branch_usage_freq/{w}": float((windows == w).mean()) for w in candidates}


def group_overlap(before: np.ndarray, after: np.ndarray) -> float:
    """Jaccard index of the pairs of units that share a group, over one layer's maps [units]; 1 where there are none."""
    pairs = np.triu(np.ones((len(before), len(before)), dtype=bool), 1)
    was, now = ((m[:, None] == m[None]) & pairs for m in (before, after))
    either = (was | now).sum()
    return float((was & now).sum() / either) if either else 1.0


def tensor_parallel_imbalance(pairs: np.ndarray, tp_size: int) -> float:
    """Exact pairs of the busiest TP rank over the mean of the ranks; pairs: [layers, heads].

    Ranks meet after every layer, so the busiest of each layer counts.
    """
    shares = pairs.reshape(len(pairs), tp_size, -1).sum(2)
    return float(shares.max(1).sum() / shares.mean(1).sum())
