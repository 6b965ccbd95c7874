"""The controller beyond the golden data: head blocks, units, schedule, what is remembered, simple policy, precision."""

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest

from aah_dist.config.schema import AahConfig, ConfigError
from aah_dist.config.statistics import COLUMNS
from aah_dist.control.controller import Controller
from aah_dist.control.diagnostics import GroupHistory, decision_figures
from aah_dist.control.features import merge_heads, unit_features
from aah_dist.control.hierarchy import build, fixed_map
from aah_dist.control.metrics import group_overlap, tensor_parallel_imbalance
from aah_dist.control.settings import Settings
from aah_dist.control.simple import quota_counts
from aah_dist.control.weights import ScorerWeights

WINDOWS = (6, 12, 24, 48)
LAYERS, HEADS, LENGTH = 3, 12, 48


def make_settings(blocks: int = 1, units: int = HEADS, windows: tuple[int, ...] = WINDOWS, **aah: object) -> Settings:
    config = AahConfig(**{"policy": "adaptive", "warmup_steps": 5, "interval": 5, **aah})
    return Settings(aah=config, layers=LAYERS, heads=HEADS, units=units, length=LENGTH, windows=windows,
                    head_blocks=blocks, seed=7)


def make_sums(seed: int) -> np.ndarray:
    """Statistics as of random q, k, v whose scale differs by head: float64 [LAYERS, HEADS, columns]."""
    rng = np.random.default_rng(seed)
    sums = np.zeros((LAYERS, HEADS, len(COLUMNS)))
    rows, values = 2 * LENGTH, 2 * LENGTH * 8
    sums[..., 0], sums[..., 1] = rows, values
    for first in (2, 5, 8):
        x = rng.normal(0, rng.uniform(0.5, 2, (LAYERS, HEADS, 1)), (LAYERS, HEADS, values))
        sums[..., first], sums[..., first + 1], sums[..., first + 2] = x.sum(-1), (x * x).sum(-1), abs(x).sum(-1)
    sums[..., 11:] = rng.uniform(0, 2, (LAYERS, HEADS, 3)) * rows
    return sums


def widened(controller: Controller) -> Controller:
    """Scorers whose choices differ from group to group."""
    rng = np.random.default_rng(6)
    gains = (2.0, 0.3, 1.5, 0.3)
    controller.weights = [
        ScorerWeights(*(tuple(gain * rng.normal(size=p.shape) for gain, p in zip(gains, mlp, strict=True))
                        for mlp in (w.independent, w.joint))) for w in controller.weights]
    return controller


def run(controller: Controller, first: int, steps: int) -> list[np.ndarray]:
    """Windows of the steps after `first` as the trainer gets them, every layer's sums drawn from the step."""
    windows = []
    for step in range(first, first + steps):
        if controller.wants(step):
            decision = controller.decide(step + 1, make_sums(step))
            if decision.update:
                controller.adopt(step + 1, decision.choice)
        windows.append(controller.execute(step + 1))
    return windows


def test_schedule():
    controller = Controller(make_settings())
    wanted, updates = [], []
    for step in range(22):
        if controller.wants(step):
            wanted.append(step)
        if controller.is_update(step + 1):
            updates.append(step + 1)
            controller.adopt(step + 1, np.zeros((LAYERS, HEADS), np.int64))
    assert updates == [5, 10, 15, 20] and wanted == [0, 4, 9, 14, 19]


def test_without_warmup_the_first_decision_follows_step_0():
    controller = Controller(make_settings(warmup_steps=0))
    assert (controller.execute(0) == LENGTH).all()
    assert controller.wants(0) and controller.is_update(1) and not controller.is_update(0)


def test_first_decision_has_no_history():
    """As in the paper, whose first call has no call before it."""
    controller = Controller(make_settings())
    sums = make_sums(0)
    controller.decide(1, sums)
    np.testing.assert_array_equal(controller.layers[0].ema[:, 6:], 0)
    expected = unit_features(sums[0], np.zeros((HEADS, 3)))
    np.testing.assert_array_equal(controller.layers[0].ema, expected)


def test_what_is_only_shown_leaves_no_trace():
    shown, quiet = Controller(make_settings()), Controller(make_settings())
    for controller in (shown, quiet):
        controller.decide(1, make_sums(0))
    for step in (2, 3, 4):
        shown.decide(step, make_sums(step))
    for (a, b) in zip(*(c.state() for c in (shown, quiet)), strict=True):
        np.testing.assert_equal(a, b)


def test_resuming_between_decisions_changes_nothing():
    for regime in ({}, {"topology": "freeze_learned", "max_depth": 1}, {"ablation": "shuffle"}, {"topology": "reuse"},
                   {"resolution_ema": 0.5}, {"ramp_steps": 7}):
        whole = widened(Controller(make_settings(**regime)))
        expected = run(whole, 0, 30)
        first = widened(Controller(make_settings(**regime)))
        run(first, 0, 13)
        arrays, values = first.state()
        second = Controller(make_settings(**regime))
        second.restore({name: a.copy() for name, a in arrays.items()}, json.loads(json.dumps(values)))
        found = run(second, 13, 17)
        np.testing.assert_array_equal(found, expected[13:])
        assert len({w.tobytes() for w in expected}) > 2


def test_state_of_another_controller_is_refused():
    arrays, values = Controller(make_settings()).state()
    for other in (make_settings(blocks=4), make_settings(units=4), make_settings(windows=(6, 12))):
        with pytest.raises(ConfigError, match="controller state is not one of 3 layers"):
            Controller(other).restore(arrays, values)
    with pytest.raises(ConfigError, match="controller state"):
        Controller(make_settings()).restore(arrays, {**values, "topologies": []})


@pytest.mark.parametrize("blocks", [1, 2, 4, 6, 12])
def test_groups_stay_inside_head_blocks(blocks: int):
    features = unit_features(make_sums(3)[0], np.zeros((HEADS, 3)))
    levels = build(features, None, make_settings(blocks))
    groups = levels[0].groups
    size = HEADS // blocks
    assert all(len({head // size for head in members}) == 1 for members in groups)
    assert [members[0] // size for members in groups] == sorted(members[0] // size for members in groups)
    assert len(groups) >= min(2, size) * blocks
    assert sorted(head for members in groups for head in members) == list(range(HEADS))


def test_a_block_is_clustered_as_if_alone():
    features = unit_features(make_sums(3)[0], np.zeros((HEADS, 3)))
    both = build(features, None, make_settings(2))[0].groups
    alone = dataclasses.replace(make_settings(1), units=6, heads=6)
    first, second = (build(features[part], None, alone)[0].groups for part in (slice(0, 6), slice(6, 12)))
    assert both == first + [[6 + head for head in members] for members in second]


def test_fixed_maps_by_block():
    random_map = fixed_map("fixed_random", make_settings(3))
    assert [sorted(random_map[block]) for block in np.split(np.arange(HEADS), 3)] == [[0, 0, 1, 1], [2, 2, 3, 3],
                                                                                      [4, 4, 5, 5]]
    assert fixed_map("fixed_alternating", make_settings(4)).tolist() == [0, 1, 0, 2, 3, 2, 4, 5, 4, 6, 7, 6]
    assert fixed_map("fixed_alternating", make_settings(12)).tolist() == list(range(HEADS))


def test_kv_groups_get_one_window():
    settings = make_settings(units=4)
    controller = widened(Controller(settings))
    windows = run(controller, 0, 12)[-1]
    by_group = windows.reshape(LAYERS, 4, 3)
    assert (by_group == by_group[..., :1]).all() and len(np.unique(windows)) > 1
    sums = make_sums(1)
    merged = merge_heads(sums, 4)
    np.testing.assert_allclose(merged[:, 1], sums[:, 3:6].sum(1))


def test_window_control_off_keeps_full_attention_and_groups():
    controller = widened(Controller(make_settings(window_control=False)))
    assert (np.array(run(controller, 0, 20)) == LENGTH).all()
    assert controller.layers[0].map is not None and controller.last_update == 20


def test_t_not_among_the_windows_is_full_attention_in_warmup():
    controller = widened(Controller(make_settings(windows=(6, 12), ramp_steps=4)))
    windows = run(controller, 0, 12)
    assert (windows[3] == LENGTH).all()
    assert set(np.unique(windows[4:])) <= {6, 12}


@pytest.mark.parametrize("kind", ["shuffle", "random_uniform"])
def test_ablations_redraw_every_step(kind: str):
    controller = widened(Controller(make_settings(ablation=kind)))
    plain = widened(Controller(make_settings()))
    windows, raw = run(controller, 0, 14), run(plain, 0, 14)
    assert any((a != b).any() for a, b in pairwise(windows[9:]))
    same = [(np.sort(a) == np.sort(b)).all() for a, b in zip(windows, raw, strict=True)]
    assert all(same) if kind == "shuffle" else not all(same)
    np.testing.assert_array_equal(windows[-1], controller.execute(14))


def test_ramp_comes_from_full_attention():
    plain = widened(Controller(make_settings(resolution_ema=0.0)))
    ramped = widened(Controller(make_settings(resolution_ema=0.0, ramp_steps=10)))
    decided, ramping = np.array(run(plain, 0, 20)), np.array(run(ramped, 0, 20))
    assert (ramping >= decided).all() and (ramping[4] > decided[4]).any()
    np.testing.assert_array_equal(ramping[14:], decided[14:])


def test_simple_policy_fills_quotas_by_entropy():
    settings = make_settings(policy="simple", quotas=[0.5, 0.25, 0.25, 0.0])
    controller = Controller(settings)
    windows = run(controller, 0, 6)[-1]
    for layer, row in enumerate(windows):
        assert sorted(row.tolist()) == [6] * 6 + [12] * 3 + [24] * 3
        entropy = controller.layers[layer].ema[:, 6]
        assert (np.diff(row[np.argsort(entropy)]) >= 0).all()
    by_block = run(Controller(make_settings(3, policy="simple")), 0, 6)[-1]
    assert all(sorted(part.tolist()) == [6, 12, 24, 48] for row in by_block for part in np.split(row, 3))


@pytest.mark.parametrize("shares, units, expected", [(None, 12, [3, 3, 3, 3]), (None, 10, [3, 3, 2, 2]),
                                                     ([0.7, 0.1, 0.1, 0.1], 8, [5, 1, 1, 1]), (None, 1, [1, 0, 0, 0])])
def test_quotas_by_largest_remainder(shares: list | None, units: int, expected: list[int]):
    assert quota_counts(shares, 4, units) == expected


def trained_features(seed: int, spread: float) -> np.ndarray:
    """Rows as real heads have them: positive, alike but for a relative `spread`; float64 [HEADS, 9]."""
    base = np.array([0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.8, 1.0, 1e-5])
    return base * (1 + spread * np.random.default_rng(seed).normal(size=(HEADS, 9)))


def groups_in(precision: str, features: np.ndarray) -> list:
    settings = make_settings(control_precision=precision)
    return build(features.astype(settings.arithmetic.dtype), None, settings)[0].groups


def test_decisions_are_made_in_double_precision():
    """Heads that fp32 cannot tell apart: rounding to fp32 changes the groups, a disturbance of 1e-12 does not."""
    changed = 0
    for seed in range(20):
        features = trained_features(seed, 1e-4)
        groups = groups_in("fp64", features)
        assert groups_in("fp64", features * (1 + 1e-12)) == groups
        changed += groups_in("fp32", features) != groups
    assert changed > 0


def test_reference_bf16_falls_to_even_and_odd_heads():
    even_odd = [[list(range(0, HEADS, 2)), list(range(1, HEADS, 2))]] * 10
    features = [trained_features(seed, 1e-4) for seed in range(10)]
    assert [groups_in("reference_bf16", f) for f in features] == even_odd
    assert sum(groups_in("fp64", f) == even_odd[0] for f in features) <= 1


def test_figures_are_plain_numbers_for_every_topology():
    for aah in ({}, {"grouping": False}, {"policy": "simple"}, {"topology": "fixed_random"}, {"window_control": False}):
        controller = Controller(make_settings(**aah))
        history = GroupHistory()
        for step in (1, 5, 10):
            decision = controller.decide(step, make_sums(step))
            if decision.update:
                controller.adopt(step, decision.choice)
            figures = decision_figures(decision, controller.settings) | history.figures(decision.maps)
            assert json.loads(json.dumps(figures, allow_nan=False)) == figures
        assert ("aah/shadow_W_mean" in figures) == (aah == {"window_control": False})


def test_overlap_and_imbalance():
    assert group_overlap(np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0])) == 1.0
    assert group_overlap(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])) == 0.0
    assert group_overlap(np.arange(3), np.arange(3)) == 1.0
    assert tensor_parallel_imbalance(np.array([[1, 1, 3, 3]]), 2) == pytest.approx(1.5)
    # The busier rank of each layer counts, though over both layers the ranks are even.
    assert tensor_parallel_imbalance(np.array([[1, 3], [3, 1]]), 2) == pytest.approx(1.5)
