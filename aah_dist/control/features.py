"""Features of heads and groups from sums (AAH-v3, features): nine numbers each.

    0, 1  mean |q|, std q      2, 3  mean |k|, std k      4, 5  mean |v|, std v       over batch, tokens, head size
    6  entropy / max(1, ln T)  7  mean output norm        8  mean mass on the last key    history, per query row

Standard deviations are unbiased (n - 1).  Sums are float64 [units, len(COLUMNS)].
"""

import math

import numpy as np

from aah_dist.config.statistics import COLUMNS

_COLUMN = {name: column for column, name in enumerate(COLUMNS)}
_SUM, _SQUARE, _ABS = ([_COLUMN[f"{x}_{kind}"] for x in "qkv"] for kind in ("sum", "square", "abs"))
_HISTORY = [_COLUMN[name] for name in ("entropy", "norm", "last_mass")]
NUM_FEATURES = 9


def merge_heads(sums: np.ndarray, units: int) -> np.ndarray:
    """[layers, heads, columns] -> [layers, units, columns]: a unit's sums are its heads' together."""
    layers, heads, columns = sums.shape
    return sums.reshape(layers, units, heads // units, columns).sum(2)


def history_from_sums(sums: np.ndarray, length: int) -> np.ndarray:
    """[..., units, 3]: entropy over max(1, ln T), output norm, last-key mass; means over query rows."""
    means = sums[..., _HISTORY] / sums[..., _COLUMN["rows"], None]
    means[..., 0] /= max(1.0, math.log(length))
    return means


def unit_features(sums: np.ndarray, history: np.ndarray) -> np.ndarray:
    """float64 [units, 9] from sums [units, columns] and history [units, 3]."""
    n = sums[:, _COLUMN["values"], None]
    total = sums[:, _SUM]
    variance = np.maximum(sums[:, _SQUARE] - total * total / n, 0) / (n - 1)
    features = np.empty((len(sums), NUM_FEATURES))
    features[:, 0:6:2] = sums[:, _ABS] / n
    features[:, 1:6:2] = np.sqrt(variance)
    features[:, 6:] = history
    return features


def pooled_features(sums: np.ndarray, history: np.ndarray, groups: list[list[int]]) -> np.ndarray:
    """[groups, 9]: moments of all members' values together, history averaged; not the mean of members' features."""
    return unit_features(np.stack([sums[g].sum(0) for g in groups]), mean_features(history, groups))


def mean_features(features: np.ndarray, groups: list[list[int]]) -> np.ndarray:
    """[groups, columns]: the mean of the members' rows."""
    out = np.empty((len(groups), features.shape[1]), features.dtype)
    for row, members in zip(out, groups, strict=True):
        np.divide(features[members].sum(0), len(members), out=row)
    return out


def smooth(old: np.ndarray | None, new: np.ndarray, weight_of_old: float) -> np.ndarray:
    """The feature EMA; the first value is taken as it is, weight 0 is no smoothing."""
    return new if old is None else weight_of_old * old + (1 - weight_of_old) * new
