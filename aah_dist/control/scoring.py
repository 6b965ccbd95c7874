"""From levels to a window index for each unit (AAH-v3, controller)."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from aah_dist.control.arithmetic import Arithmetic
from aah_dist.control.hierarchy import Level, map_of
from aah_dist.control.settings import Settings
from aah_dist.control.weights import ENRICHED, ScorerWeights


@dataclass(frozen=True)
class Selection:
    """One array a level, bottom to top.  inputs [groups, 29], logits [groups, K], raw and clamped index [groups].

    choice: int64 [units], the clamped index of the unit's level-0 group.
    """

    inputs: list[np.ndarray]
    independent_logits: list[np.ndarray]
    logits: list[np.ndarray]
    raw: list[np.ndarray]
    clamped: list[np.ndarray]
    choice: np.ndarray

    @property
    def margin(self) -> float:
        """The smallest gap between the two best windows, over all groups of all levels."""
        gaps = [np.diff(np.sort(x, axis=1)[:, -2:], axis=1).min() for x in self.logits if x.shape[1] > 1]
        return float(min(gaps, default=np.inf))


def select(levels: list[Level], weights: ScorerWeights, settings: Settings) -> Selection:
    """Windows of all groups, from the top level down; a child's is never larger than its parent's."""
    aah, arithmetic = settings.aah, settings.arithmetic
    parents = [map_of(above.groups, len(level.groups)) for level, above in pairwise(levels)]
    inputs = enriched_inputs(levels, parents)
    scores = arithmetic.mlp(np.concatenate(inputs), weights.independent) * np.asarray(aah.logit_scale, inputs[0].dtype)
    ends = accumulate(len(x) for x in inputs)
    independent = [scores[end - len(x): end] for x, end in zip(inputs, ends, strict=True)]
    logits = independent
    if aah.scorer == "joint" and aah.grouping:
        logits = [_score_siblings(x, base, parent, weights, aah.joint_scale, arithmetic)
                  for x, base, parent in zip(inputs, independent, [*parents, None], strict=True)]
    raw = [x.argmax(1) for x in logits]
    clamped = raw[-1:]
    for index, parent in zip(raw[-2::-1], parents[::-1], strict=True):
        clamped.insert(0, np.minimum(index, clamped[0][parent]) if aah.parent_constraint else index)
    choice = clamped[0][map_of(levels[0].groups, settings.units)]
    return Selection(inputs, independent, logits, raw, clamped, choice)


def enriched_inputs(levels: list[Level], parents: list[np.ndarray]) -> list[np.ndarray]:
    """Per level [groups, 29]: features, level, minus parent's features, minus the level's mean, share of members."""
    inputs = []
    for number, level in enumerate(levels):
        x = level.features
        sizes = [len(g) for g in level.groups]
        n = x.shape[1]
        rows = np.zeros((len(x), ENRICHED), x.dtype)
        rows[:, :n] = x
        rows[:, n] = number / max(1, len(levels) - 1)
        if number + 1 < len(levels):
            np.subtract(x, levels[number + 1].features[parents[number]], out=rows[:, n + 1: 2 * n + 1])
        np.subtract(x, x.sum(0) / len(x), out=rows[:, 2 * n + 1: 3 * n + 1])
        rows[:, -1] = [size / sum(sizes) for size in sizes]
        inputs.append(rows)
    return inputs


def sibling_pairs(parent: np.ndarray | None, groups: int) -> np.ndarray:
    """int [pairs, 2]: children of one parent by ascending index, two by two; an odd one out has no pair.

    parent None: the top level, where all are siblings.
    """
    families = {}
    for child, p in enumerate([0] * groups if parent is None else parent.tolist()):
        families.setdefault(p, []).append(child)
    pairs = [pair for _, family in sorted(families.items()) for pair in zip(family[::2], family[1::2], strict=False)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _score_siblings(x: np.ndarray, base: np.ndarray, parent: np.ndarray | None, weights: ScorerWeights, scale: float,
                    arithmetic: Arithmetic) -> np.ndarray:
    """Joint logits replace the independent ones of paired siblings."""
    pairs = sibling_pairs(parent, len(x))
    if not len(pairs):
        return base
    a, b = x[pairs.T]
    scores = arithmetic.mlp(np.concatenate([a, b, a - b, b - a], axis=1), weights.joint)
    logits = base.copy()
    logits[pairs] = (scores * np.asarray(scale, x.dtype)).reshape(len(pairs), 2, -1)
    return logits
