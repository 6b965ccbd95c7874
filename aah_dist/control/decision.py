"""One layer's decision (AAH-v3, per-call state machine): state and statistics in, state and choice out."""

from dataclasses import dataclass, field, replace

import numpy as np

from aah_dist.control.clustering import Groups
from aah_dist.control.features import smooth, unit_features
from aah_dist.control.hierarchy import (
    Level,
    add_upper_levels,
    build,
    fixed_map,
    from_map,
    from_topology,
    map_of,
    pass_through,
)
from aah_dist.control.scoring import Selection, select
from aah_dist.control.settings import Settings
from aah_dist.control.weights import ScorerWeights

FIXED = ("fixed_random", "fixed_alternating")


@dataclass(frozen=True)
class LayerState:
    """ema: smoothed features [units, 9].  map: each unit's level-0 group, int [units].  topology: the groups of all
    levels, once frozen."""

    ema: np.ndarray | None = None
    map: np.ndarray | None = None
    topology: list[Groups] | None = None


@dataclass(frozen=True)
class LayerDecision:
    """path: which way it was made.  features: the rows that were clustered or scored, [units or groups, 9].

    selection.choice is executed by an update, and only shown in warm-up or with window control off (shadow).
    """

    path: str
    features: np.ndarray
    levels: list[Level] = field(default_factory=list)
    selection: Selection | None = None

    @property
    def margin(self) -> float:
        """The smallest distance to another outcome: gaps between logits, and margins of what was clustered."""
        clustered = [c.margin for level in self.levels for c in level.clustering]
        return min([self.selection.margin, *clustered])


def decide_layer(state: LayerState, sums: np.ndarray, history: np.ndarray, weights: ScorerWeights, settings: Settings,
                 *, shadow: bool) -> tuple[LayerState, LayerDecision]:
    """sums: float64 [units, columns], history: [units, 3].

    shadow: in warm-up or with window control off, where only the first map (and the feature EMA that it came from) is
    kept.  With window control off no map is kept: every decision clusters anew.
    """
    aah = settings.aah
    if not aah.grouping:
        features = _features(sums, history, settings)
        level = Level([[u] for u in range(settings.units)], features)
        selection = select([level], weights, settings)
        return state, LayerDecision("ungrouped_control_update", features, [level], selection)
    if shadow:
        path = "warmup_or_disabled_control" if aah.window_control else "grouping_only_full_attention"
        known = state.map if aah.window_control else None
    else:
        path, known = _known_map(state, settings)
    if known is None:
        features = _features(sums, history, settings)
        ema = smooth(state.ema, features, aah.feature_ema)
        levels = build(ema, state.map if aah.window_control else None, settings)
        state = replace(state, ema=ema)
        clustered = ema
        if not shadow and aah.topology == "freeze_learned":
            state = replace(state, topology=[level.groups for level in levels])
    else:
        if not shadow and state.topology is not None:
            levels = from_topology(state.topology, sums, history, settings)
        else:
            level0 = from_map(known, sums, history, settings)
            passes = not shadow and aah.topology in (*FIXED, "freeze_after_warmup")
            levels = pass_through(level0, settings) if passes else add_upper_levels(level0, settings)
        clustered = levels[0].features
    state = replace(state, map=map_of(levels[0].groups, settings.units))
    return state, LayerDecision(path, clustered, levels, select(levels, weights, settings))


def _features(sums: np.ndarray, history: np.ndarray, settings: Settings) -> np.ndarray:
    return unit_features(sums, history).astype(settings.arithmetic.dtype)


def _known_map(state: LayerState, settings: Settings) -> tuple[str, np.ndarray | None]:
    """The path of an update, and the map it starts from; None where heads are clustered anew."""
    topology = settings.aah.topology
    if topology in FIXED:
        return f"grouped_control_{topology}_update", fixed_map(topology, settings)
    if topology == "freeze_learned" and state.topology is not None:
        return "grouped_control_frozen_learned_topology_update", map_of(state.topology[0], settings.units)
    if topology == "freeze_after_warmup" and state.map is not None:
        return "grouped_control_frozen_update", state.map
    if topology == "reuse" and state.map is not None:
        return "grouped_control_reuse_update", state.map
    return "grouped_control_update", None
