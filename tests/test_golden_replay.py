"""Whole runs against the golden data, call by call: maps, levels, choices and windows exact.

The published code counts calls and takes q, k, v from the call it decides for; the trainer decides between steps.  Here
the state machine is driven as it was published.
"""

import numpy as np
import pytest
from golden_data import arrays, attend, cases, no_history, read_json, scorer_weights, settings, sums_of

from aah_dist.control.decision import LayerState, decide_layer
from aah_dist.control.execution import ablate, ramp, smooth_choice
from aah_dist.control.features import history_from_sums
from aah_dist.control.hierarchy import groups_of
from aah_dist.control.settings import Settings

WINDOWS = (8, 16, 32, 64)


class PublishedLayer:
    """One layer driven once a call."""

    def __init__(self, layer: int, weights, s: Settings) -> None:
        self.layer, self.weights, self.s = layer, weights, s
        self.state, self.choice, self.ema, self.last_update = LayerState(), None, None, None
        self.path, self.decision, self.counts = "", None, []

    def call(self, step: int, sums: np.ndarray | None, history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index, windows) [H]; sums None where the call is expected to use what it decided before."""
        s, aah = self.s, self.s.aah
        if not aah.window_control or step < aah.warmup_steps:
            self.decision = None
            if aah.grouping and sums is not None:
                self.state, self.decision = decide_layer(self.state, sums, history, self.weights, s, shadow=True)
                self.path = self.decision.path
                self.counts = [len(level.groups) for level in self.decision.levels]
            index = np.full(s.units, s.full_index)
            return index, self.ablated(index, step)
        due = aah.interval <= 1 or self.last_update is None or step - self.last_update >= aah.interval
        if due:
            assert sums is not None, "an update without statistics"
            self.state, self.decision = decide_layer(self.state, sums, history, self.weights, s, shadow=False)
            self.path, self.choice, self.last_update = self.decision.path, self.decision.selection.choice, step
            self.counts = [len(level.groups) for level in self.decision.levels]
        else:
            self.path = "grouped_control_cached" if aah.grouping else "ungrouped_control_cached"
        self.ema, index = smooth_choice(self.ema, self.choice, aah.resolution_ema, len(s.windows))
        index = ramp(index, step, s)
        return index, self.ablated(index, step)

    def ablated(self, index: np.ndarray, step: int) -> np.ndarray:
        windows = np.array(self.s.windows)[index]
        layers = np.tile(windows, (self.layer + 1, 1))
        return ablate(layers, step, self.s)[self.layer]


def digits(text: str) -> list[int]:
    return [int(c) for c in text]


@pytest.mark.parametrize("regime", [c for c in cases("g_end_to_end.npz") if "qkv_steps" in c], ids=lambda c: c["name"])
def test_end_to_end(regime: dict):
    data, name = arrays("g_end_to_end.npz"), regime["name"]
    s = settings(regime["overrides"])
    layers = [PublishedLayer(i, scorer_weights(data, f"ctrl/layer{i}"), s) for i in range(s.layers)]
    for number, call in enumerate(regime["calls"]):
        step = call["step"]
        stored = regime["qkv_steps"].index(step) if step in regime["qkv_steps"] and call["mode"] == "train" else None
        for i, (layer, expected) in enumerate(zip(layers, call["layers"], strict=True)):
            sums = None
            if stored is not None:
                q, k, v = data[f"{name}/qkv"][stored, i].astype(np.float32).transpose(2, 0, 3, 1, 4)
                sums = sums_of(q, k, v)
            index, windows = layer.call(step, sums, data[f"{name}/hist_before"][number, i].astype(np.float64))
            where = f"{name} call {number} layer {i}"
            assert index.tolist() == digits(expected["idx_after"]), where
            assert windows.sum() * s.length == expected["attn_elements"], where
            if s.aah.grouping:
                assert layer.state.map.tolist() == digits(expected["head_groups"]), where
                if stored is not None or step >= s.aah.warmup_steps:  # shown from q, k, v that are not stored
                    assert layer.counts == expected["group_counts"], where
                if expected["raw"]:
                    selection = layer.decision.selection
                    assert [x.tolist() for x in selection.raw] == expected["raw"], where
                    assert [x.tolist() for x in selection.clamped] == expected["post"], where
            if stored is not None and not (not s.aah.grouping and step < s.aah.warmup_steps):
                assert layer.path == expected["path"], where


G2 = read_json("g2_ablation_replay.json")["regimes"]


@pytest.mark.parametrize("name", G2)
def test_ablations_on_equal_inputs(name: str):
    regime, data = G2[name], arrays("g_end_to_end.npz")
    s = settings(regime["overrides"])
    fixed = regime["overrides"].get("aah_v3_fixed_window")
    for i, calls in enumerate(regime["layers"]):
        layer = PublishedLayer(i, scorer_weights(data, f"ctrl/layer{i}"), s)
        history = no_history(s.units)
        for u, expected in enumerate(calls):
            q, k, v = data["full_adaptive/qkv"][u, i].astype(np.float32).transpose(2, 0, 3, 1, 4)
            _, windows = layer.call(expected["step"], sums_of(q, k, v), history)
            if fixed:  # the regime fixed_window: the controller's choice is made and not used
                windows = np.full(s.units, fixed)
            where = f"{name} layer {i} step {expected['step']}"
            assert windows.tolist() == expected["windows"], where
            assert np.searchsorted(s.windows, windows).tolist() == expected["idx_after"], where
            if s.aah.grouping:
                assert layer.state.map.tolist() == expected["head_groups"], where
                assert layer.counts == expected["group_counts"], where
            if expected["raw"]:
                assert [x.tolist() for x in layer.decision.selection.raw] == expected["raw"], where
                assert [x.tolist() for x in layer.decision.selection.clamped] == expected["post"], where
            _, sums = attend(q, k, v, windows)
            history = history_from_sums(sums, s.length)
            if expected["hist"] is not None:
                np.testing.assert_allclose(history.T, expected["hist"], rtol=0, atol=1e-5, err_msg=where)


def test_replays_see_more_than_one_kind_of_choice():
    """Guards the comparisons above against data in which nothing is decided."""
    seen = {call["layers"][i]["idx_after"] for c in cases("g_end_to_end.npz") if "qkv_steps" in c
            for call in c["calls"] for i in range(2)}
    assert len(seen) > 4 and groups_of(np.array([0, 1, 0])) == [[0, 2], [1]]
