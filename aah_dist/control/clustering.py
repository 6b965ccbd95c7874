"""Greedy clustering of feature rows (AAH-v3, clustering)."""

import math
from dataclasses import dataclass

import numpy as np

from aah_dist.control.arithmetic import Arithmetic

_TINY = 1e-6
_TIE = 1e-8

Groups = list[list[int]]


@dataclass(frozen=True)
class Rule:
    """How rows are compared.  metric: cosine, centered_cosine, cosine_normdiff (cosine minus norm_scale times the
    relative difference of norms) or l2 (minus the distance)."""

    threshold: float
    metric: str
    norm_scale: float
    min_group_size: int


@dataclass(frozen=True)
class Clustering:
    """groups: member lists in order of opening; after a forced bipartition each list starts with its anchor.

    similarity: [n, n]; anchor: the pair a forced bipartition grew from, or None; before_merge: number of groups.
    margin: how far the similarities could move before a comparison of the greedy pass or the bipartition would turn.
    """

    groups: Groups
    similarity: np.ndarray
    anchor: tuple[int, int] | None
    before_merge: int
    margin: float


def cluster(x: np.ndarray, rule: Rule, arithmetic: Arithmetic, *, force: bool, previous: np.ndarray | None = None,
            churn_bonus: float = 0.0) -> Clustering:
    """Group the rows of x [n, 9].

    force: split in two where everything would be one group.  previous: each row's group before, int [n]; rows that
    shared one get churn_bonus on their similarity, which only the choice of a forced split's anchors sees (and only
    under the cosine metric).
    """
    n = len(x)
    if n == 1:
        return Clustering([[0]], np.ones((1, 1), x.dtype), None, 1, np.inf)
    norms = np.sqrt((x * x).sum(1))
    z = _directions(x, norms, rule.metric)
    similarity = _similarities(z, norms, rule, arithmetic)
    groups, margin = _all_joined(z, rule, arithmetic) or _lead(x, z, norms, rule, arithmetic)
    if force and len(groups) == 1:
        anchors = similarity
        if rule.metric == "cosine" and previous is not None:
            bonus = np.asarray(churn_bonus, x.dtype) * (previous[:, None] == previous[None])
            anchors = np.minimum(similarity + bonus, 1)
        groups, anchor, split_margin = _bipartition(z, anchors, arithmetic)
        return Clustering(groups, similarity, anchor, len(groups), min(margin, split_margin))
    before = len(groups)
    if rule.min_group_size > 1 and before > 2:  # two always remain
        groups = _merge_small(z, groups, rule, arithmetic)
    return Clustering(groups, similarity, None, before, margin)


def _directions(x: np.ndarray, norms: np.ndarray, metric: str) -> np.ndarray:
    if metric == "l2":
        return x
    if metric == "centered_cosine":
        x = x - x.mean(0)
        norms = np.sqrt((x * x).sum(1))
    return x / np.maximum(norms, _TINY)[:, None]


def _similarities(z: np.ndarray, norms: np.ndarray, rule: Rule, arithmetic: Arithmetic) -> np.ndarray:
    if rule.metric == "l2":
        return -np.sqrt(((z[:, None] - z[None]) ** 2).sum(-1))
    s = arithmetic.product(z, z.T)
    # Equal in both directions to the last bit: the first minimum must not depend on the matrix library.
    s = np.minimum(s, s.T)
    return s - _norm_penalty(norms[:, None], norms[None], rule) if rule.metric == "cosine_normdiff" else s


def _norm_penalty(a: np.ndarray, b: np.ndarray, rule: Rule) -> np.ndarray:
    return rule.norm_scale * np.abs(a - b) / np.maximum(np.maximum(a, b), _TINY)


def _all_joined(z: np.ndarray, rule: Rule, arithmetic: Arithmetic) -> tuple[Groups, float] | None:
    """What _lead gives under the cosine metric if all rows join one group, else None.

    The one group's mean is a running mean, which needs no loop; heads' features always take this way in practice.
    """
    n = len(z)
    if rule.metric != "cosine" or n < 3:
        return None
    means = (np.cumsum(z[:-1], 0) / np.arange(1, n, dtype=z.dtype)[:, None])[:, None]
    centroids = means / np.maximum(np.sqrt(means @ means.swapaxes(1, 2)), _TINY)
    centroids[0] = z[0]
    s = arithmetic.product(centroids, z[1:, :, None])
    return None if s.min() < rule.threshold else ([list(range(n))], float(np.abs(s - rule.threshold).min()))


def _lead(x: np.ndarray, z: np.ndarray, norms: np.ndarray, rule: Rule,
          arithmetic: Arithmetic) -> tuple[Groups, float]:
    """One pass in index order: a row joins the most similar group (the first of equals) or opens a new one."""
    groups: Groups = [[0]]
    margin = np.inf
    by_norm = rule.metric == "cosine_normdiff"
    z_sums, x_sums, centroids = z.copy(), x.copy(), z.copy()  # row g is group g's; those above the count are unused
    group_norms = norms.copy()
    for i in range(1, len(z)):
        count = len(groups)
        if rule.metric == "l2":
            s = -np.sqrt(((centroids[:count] - z[i]) ** 2).sum(1))
        else:
            s = arithmetic.product(centroids[:count], z[i])
            if by_norm:
                s = s - _norm_penalty(group_norms[:count], norms[i], rule)
        best = int(s.argmax())
        margin = min(margin, abs(s[best] - rule.threshold))
        if s[best] < rule.threshold:
            z_sums[count], x_sums[count], centroids[count], group_norms[count] = z[i], x[i], z[i], norms[i]
            groups.append([i])
            continue
        if count > 1:
            margin = min(margin, s[best] - np.partition(s, -2)[-2])
        groups[best].append(i)
        size = len(groups[best])
        z_sums[best] += z[i]
        mean = z_sums[best] / size
        centroids[best] = mean if rule.metric == "l2" else mean / max(_length(mean), _TINY)
        if by_norm:
            x_sums[best] += x[i]
            group_norms[best] = _length(x_sums[best] / size)
    return groups, float(margin)


def _length(v: np.ndarray) -> float:
    return math.sqrt(v @ v)


def _bipartition(z: np.ndarray, similarity: np.ndarray,
                 arithmetic: Arithmetic) -> tuple[Groups, tuple[int, int], float]:
    """Two groups around the least similar pair; ties go to the smaller group, then to the first."""
    s = similarity.copy()
    np.fill_diagonal(s, 2.0)
    first, second = divmod(int(s.argmin()), len(s))
    margin = np.partition(s.ravel(), 2)[2] - s[first, second]  # every pair is there twice
    towards = arithmetic.product(z, z[[first, second]].T)
    lean = (towards[:, 0] - towards[:, 1]).tolist()
    groups: Groups = [[first], [second]]
    for j, difference in enumerate(lean):
        if j in (first, second):
            continue
        margin = min(margin, abs(difference))
        if difference > _TIE:
            groups[0].append(j)
        elif difference < -_TIE:
            groups[1].append(j)
        else:
            groups[len(groups[1]) < len(groups[0])].append(j)
    return groups, (first, second), float(margin)


def _merge_small(z: np.ndarray, groups: Groups, rule: Rule, arithmetic: Arithmetic) -> Groups:
    """Small groups join the most similar other one above the threshold, as long as more than two remain.

    An emptied group keeps its mean and may be chosen, and so revived, by a later one: the paper's behaviour.
    """
    groups = [list(g) for g in groups]
    means = np.stack([z[g].sum(0) / len(g) for g in groups])
    for g in [g for g, members in enumerate(groups) if len(members) < rule.min_group_size]:
        if len(groups[g]) >= rule.min_group_size:
            continue
        s = arithmetic.product(means, means[g])
        s[g] = -1.0
        best = int(s.argmax())
        if s[best] < rule.threshold or sum(map(bool, groups)) <= 2:
            continue
        groups[best] += groups[g]
        groups[g] = []
        means[best] = z[groups[best]].sum(0) / len(groups[best])
    return [g for g in groups if g]
