"""The controller of a run: when it decides, what it remembers, which windows each step gets."""

from dataclasses import dataclass

import numpy as np

from aah_dist.config.schema import ConfigError
from aah_dist.control.decision import LayerDecision, LayerState, decide_layer
from aah_dist.control.execution import ablate, ramp, smooth_choice
from aah_dist.control.features import NUM_FEATURES, history_from_sums, merge_heads, smooth, unit_features
from aah_dist.control.settings import Settings
from aah_dist.control.simple import simple_choice
from aah_dist.control.weights import ScorerWeights, draw_scorers


@dataclass(frozen=True)
class Decision:
    """What the layers decided from one step's statistics.

    choice: int64 [layers, units], indices into the windows.  maps: int64 [layers, units], level-0 groups.
    update: whether it is executed; otherwise it is shown only.
    """

    choice: np.ndarray
    maps: np.ndarray
    layers: list[LayerDecision]
    update: bool
    windows_changed: float
    """Mean |index - previous index| over units; 0 where nothing was decided before."""
    choices_changed: float
    """Share of units whose index changed."""
    groups_changed: float
    """Share of units whose group number changed."""


class Controller:
    """Steps are 0-based optimizer steps.  Before step s runs, `execute(s)` gives its windows; if `wants(s)`, its
    statistics are gathered, `decide(s + 1, sums)` is called with them on one rank and `adopt(s + 1, choice)` with the
    result on all.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.weights: list[ScorerWeights] = [draw_scorers(settings, layer) for layer in range(settings.layers)]
        self.layers = [LayerState()] * settings.layers
        self.choice: np.ndarray | None = None
        self.ema: np.ndarray | None = None
        self.last_update: int | None = None
        self.has_history = False

    @property
    def active(self) -> bool:
        """Whether windows can ever differ from full attention."""
        return self.settings.aah.window_control

    def in_warmup(self, step: int) -> bool:
        return step < self.settings.aah.warmup_steps

    def is_update(self, step: int) -> bool:
        """Whether a decision is due for `step`."""
        aah = self.settings.aah
        if self.in_warmup(step) or step == 0:
            return False
        return self.last_update is None or step - self.last_update >= aah.interval

    def wants(self, step: int, shown: bool = False) -> bool:
        """Whether the statistics of `step` are needed: for the first map, a decision, or to show a shadow choice."""
        return step == 0 or self.is_update(step + 1) or (shown and self.in_warmup(step + 1))

    def decide(self, step: int, sums: np.ndarray) -> Decision:
        """The decision for `step` from the sums of the step before, float64 [layers, heads, columns].

        Changes the layers' state, and neither choice nor schedule: see adopt.
        """
        settings = self.settings
        update = self.is_update(step)
        shadow = not (update and self.active)
        made, choices, maps = [], [], []
        old_maps = [state.map for state in self.layers]
        sums = merge_heads(sums, settings.units)
        history = history_from_sums(sums, settings.length)
        if not self.has_history:  # as in the paper: there is no call before the first
            history = np.zeros_like(history)
        for layer in range(settings.layers):
            state, decision, choice = self._decide_layer(layer, sums[layer], history[layer], shadow)
            if update or not self.has_history:  # what is only shown leaves no trace
                self.layers[layer] = state
            made.append(decision)
            choices.append(choice)
            maps.append(np.zeros(settings.units, np.int64) if state.map is None else state.map)
        self.has_history = True
        choice, maps = np.stack(choices), np.stack(maps)
        known = [(old, new) for old, new in zip(old_maps, maps, strict=True) if old is not None]
        steps = np.zeros(1) if self.choice is None else np.abs(choice - self.choice)
        return Decision(choice, maps, made, update, windows_changed=float(steps.mean()),
                        choices_changed=float((steps > 0).mean()),
                        groups_changed=float(np.mean([old != new for old, new in known])) if known else 0.0)

    def _decide_layer(self, layer: int, sums: np.ndarray, history: np.ndarray,
                      shadow: bool) -> tuple[LayerState, LayerDecision, np.ndarray]:
        settings, state = self.settings, self.layers[layer]
        if settings.aah.policy == "simple":
            ema = smooth(state.ema, unit_features(sums, history), settings.aah.feature_ema)
            return LayerState(ema), LayerDecision("simple_update", ema), simple_choice(ema, settings)
        state, decision = decide_layer(state, sums, history, self.weights[layer], settings, shadow=shadow)
        return state, decision, decision.selection.choice

    def adopt(self, step: int, choice: np.ndarray) -> None:
        """The raw choice from `step` on; with window control off only the schedule goes on."""
        self.choice, self.last_update = choice, step

    def execute(self, step: int) -> np.ndarray:
        """The windows of `step`, int64 [layers, heads] in tokens.  Called once a step: the resolution EMA advances."""
        settings = self.settings
        windows = np.full((settings.layers, settings.units), settings.length, dtype=np.int64)
        if self.active and not self.in_warmup(step) and self.choice is not None:
            index = self.choice
            if settings.aah.resolution_ema > 0:
                self.ema, index = smooth_choice(self.ema, index, settings.aah.resolution_ema, len(settings.windows))
            windows = np.array(settings.windows)[ramp(index, step, settings)]
        return settings.to_heads(ablate(windows, step, settings))

    def state(self) -> tuple[dict[str, np.ndarray], dict]:
        """Everything that is remembered, exact: arrays by name, and plain values.  Complete on the deciding rank."""
        arrays = {"choice": self.choice, "resolution_ema": self.ema}
        for layer, (state, weights) in enumerate(zip(self.layers, self.weights, strict=True)):
            arrays |= {f"{layer}/feature_ema": state.ema, f"{layer}/map": state.map}
            for kind in ("independent", "joint"):
                arrays |= {f"{layer}/{kind}/{i}": p for i, p in enumerate(getattr(weights, kind))}
        values = {"head_blocks": self.settings.head_blocks, "units": self.settings.units,
                  "last_update": self.last_update, "has_history": self.has_history,
                  "topologies": [state.topology for state in self.layers]}
        return {name: a for name, a in arrays.items() if a is not None}, values

    def restore(self, arrays: dict[str, np.ndarray], values: dict) -> None:
        """Raises: ConfigError if it is not the state of a controller like this one."""
        settings = self.settings
        shapes = {"choice": (settings.layers, settings.units), "resolution_ema": (settings.layers, settings.units)}
        for layer, weights in enumerate(self.weights):
            shapes |= {f"{layer}/feature_ema": (settings.units, NUM_FEATURES), f"{layer}/map": (settings.units,)}
            for kind in ("independent", "joint"):
                shapes |= {f"{layer}/{kind}/{i}": p.shape for i, p in enumerate(getattr(weights, kind))}
        expected = {"head_blocks", "units", "last_update", "has_history", "topologies"}
        same = set(values) == expected and len(values["topologies"]) == settings.layers \
            and (values["head_blocks"], values["units"]) == (settings.head_blocks, settings.units)
        scorers = {name for name in shapes if name.count("/") == 2}  # the rest depends on what was decided so far
        if not same or not scorers <= arrays.keys() or any(arrays[name].shape != shapes.get(name) for name in arrays):
            raise ConfigError(f"the checkpoint's controller state is not one of {settings.layers} layers, "
                              f"{settings.units} units and {settings.head_blocks} head blocks; move that checkpoint's "
                              "folder away to continue from the one before it.")
        self.choice, self.ema = arrays.get("choice"), arrays.get("resolution_ema")
        self.layers = [LayerState(arrays.get(f"{layer}/feature_ema"), arrays.get(f"{layer}/map"), topology)
                       for layer, topology in enumerate(values["topologies"])]
        self.weights = [ScorerWeights(*(tuple(arrays[f"{layer}/{kind}/{i}"] for i in range(4))
                                        for kind in ("independent", "joint"))) for layer in range(settings.layers)]
        self.last_update, self.has_history = values["last_update"], values["has_history"]
