"""Levels of groups over the units of one layer (AAH-v3, hierarchy)."""

from dataclasses import dataclass

import numpy as np
import torch

from aah_dist.control.clustering import Clustering, Groups, Rule, cluster
from aah_dist.control.features import mean_features, pooled_features
from aah_dist.control.settings import Settings


@dataclass(frozen=True)
class Level:
    """groups: members are units at level 0, groups of the level below above it.  features: [groups, 9].

    clustering: how the level came about; for level 0 one for each head block, empty where nothing was clustered.
    """

    groups: Groups
    features: np.ndarray
    clustering: tuple[Clustering, ...] = ()


def build(features: np.ndarray, previous: np.ndarray | None, settings: Settings) -> list[Level]:
    """Level 0 from features [units, 9], inside each head block, then the levels above.

    previous: each unit's group of the decision before, int [units], or None.
    """
    aah = settings.aah
    rule = Rule(aah.similarity_threshold, "cosine", aah.norm_difference_scale, aah.min_group_size)
    groups: Groups = []
    found = []
    for block in settings.blocks():
        before = None if previous is None else previous[block]
        clustering = cluster(features[block], rule, settings.arithmetic, force=True, previous=before,
                             churn_bonus=aah.churn_bonus)
        units = block.tolist()
        groups += [[units[i] for i in members] for members in clustering.groups]
        found.append(clustering)
    return add_upper_levels(Level(groups, mean_features(features, groups), tuple(found)), settings)


def from_map(map_: np.ndarray, sums: np.ndarray, history: np.ndarray, settings: Settings) -> Level:
    """Level 0 of a known map, int [units], with pooled features."""
    groups = groups_of(map_)
    return Level(groups, _rounded(pooled_features(sums, history, groups), settings))


def add_upper_levels(level0: Level, settings: Settings) -> list[Level]:
    """Levels above, each from the one below, until one would be a single group."""
    aah = settings.aah
    threshold = -aah.upper_l2_threshold if aah.upper_metric == "l2" else aah.upper_threshold
    rule = Rule(threshold, aah.upper_metric, aah.norm_difference_scale, aah.min_group_size)
    levels = [level0]
    if len(level0.groups) > 1:
        while len(levels) < aah.max_depth:
            below = levels[-1].features
            clustering = cluster(below, rule, settings.arithmetic, force=False)
            if len(clustering.groups) == 1:
                break
            level = Level(clustering.groups, mean_features(below, clustering.groups), (clustering,))
            levels.append(level)
            if all(len(members) == 1 for members in level.groups):  # the next ones come from the same features
                levels += [level] * (aah.max_depth - len(levels))
    return levels


def pass_through(level0: Level, settings: Settings) -> list[Level]:
    """Upper levels that repeat the groups of level 0."""
    singles = [[g] for g in range(len(level0.groups))]
    return [level0] + [Level(singles, level0.features)] * (settings.aah.max_depth - 1)


def from_topology(topology: list[Groups], sums: np.ndarray, history: np.ndarray, settings: Settings) -> list[Level]:
    """Stored groups of all levels with new features: level 0 pooled, means above."""
    levels = [Level(topology[0], _rounded(pooled_features(sums, history, topology[0]), settings))]
    for groups in topology[1:]:
        levels.append(Level(groups, mean_features(levels[-1].features, groups)))
    return levels


def fixed_map(kind: str, settings: Settings) -> np.ndarray:
    """int [units]: two groups a head block, random halves (one generator of the run's seed, the same map in every
    layer) or alternating units."""
    map_ = np.empty(settings.units, dtype=np.int64)
    generator = torch.Generator().manual_seed(settings.seed)
    for b, block in enumerate(settings.blocks()):
        if kind == "fixed_random":
            order = torch.randperm(len(block), generator=generator).numpy()
            local = np.ones(len(block), dtype=np.int64)
            local[order[: len(block) // 2]] = 0
        else:
            local = np.arange(len(block)) % 2
        map_[block] = 2 * b + local
    return np.unique(map_, return_inverse=True)[1]  # a block of one unit has one group


def groups_of(map_: np.ndarray) -> Groups:
    """Member lists, ascending, in the order of the groups' numbers."""
    return [np.flatnonzero(map_ == g).tolist() for g in range(int(map_.max()) + 1)]


def map_of(groups: Groups, size: int) -> np.ndarray:
    """int [size]: each member's group."""
    map_ = np.empty(size, dtype=np.int64)
    for g, members in enumerate(groups):
        map_[members] = g
    return map_


def _rounded(features: np.ndarray, settings: Settings) -> np.ndarray:
    return features.astype(settings.arithmetic.dtype)
