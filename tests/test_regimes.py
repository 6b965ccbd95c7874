"""Every regime trains at TP 2 and does what sets it apart.

One launch trains them all (tests/regimes_worker.py), with scorers and heads that differ so much that windows do.
"""

import json
import pickle
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import regimes_worker as worker
from ranks import REPOSITORY, run_ranks

from aah_dist.config.load import FOLDER
from aah_dist.config.pairs import acr, exact_pair_ratio
from aah_dist.control.hierarchy import Level, map_of
from aah_dist.control.scoring import sibling_pairs

LAYERS, HEADS, LENGTH = (worker.BASE[f"model.{name}"] for name in ("num_layers", "num_heads", "seq_length"))
STEPS, WARMUP = worker.BASE["train.steps"], worker.BASE["aah.warmup_steps"]
TP = BLOCKS = 2
WINDOWS = [6, 12, 24, 48]
UPDATES = [5, 10, 15, 20, 25, 30]
FIRST, SHADOW = 1, worker.SHOWN + 1  # decisions of the warm-up: for the first map, and for a log line
PLAN = [[6, 6, 12, 24, 48, 6, 12, 48], [24, 12, 6, 48, 48, 24, 12, 6], [48, 48, 48, 6, 6, 6, 6, 6]]
REGIMES = sorted(path.stem for path in (FOLDER / "regimes").glob("*.yaml"))
NEVER_CHANGE = ["full_attention", "fixed_window", "fixed_1024", "fixed_2048", "layer_pattern", "frozen_policy",
                "uniform_matched", "random_heads_matched"]
SHALLOW = ["shallow_freeze", "shallow_control_interval_10", "shallow_no_512", "shallow_resolution_ema_030",
           "shallow_shuffle_post_select", "shallow_random_uniform"]
DEEP = ["full_adaptive", "full_adaptive_shuffle_post_select", "independent_scoring", "no_parent_constraint",
        "no_feature_ema"]
REDRAWN = ["full_adaptive_shuffle_post_select", "shallow_shuffle_post_select", "shallow_random_uniform"]
KEPT_MAPS = ["deep_practical_reuse", "freeze_after_warmup_passthrough", "fixed_random_grouping"]
GROUPED = [*SHALLOW, *DEEP, *KEPT_MAPS, "control_off"]
DECIDING = [*GROUPED, "grouping_off", "simple_policy"]


@pytest.fixture(scope="module")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """What regimes_worker recorded of each regime; windows are alike on both ranks."""
    folder = tmp_path_factory.mktemp("regimes")
    (folder / "plan.json").write_text(json.dumps({"windows": PLAN}))
    plan = {"aah.plan": str(folder / "plan.json")}
    cases = {regime: {} for regime in REGIMES}
    cases |= {regime: plan for regime in ("frozen_policy", "uniform_matched", "random_heads_matched")}
    cases["layer_pattern"] = {"model.num_layers": 4}
    # What the two regimes leave as it is, the rest of this model's setup must not change.
    cases["shallow_no_512"] = {"aah.windows": [0.25, 0.5, 1.0]}
    cases["shallow_control_interval_10"] = {"aah.interval": 10}
    job = {"tp": TP, "data": str(tiny_data), "out": str(folder), "cases": cases}
    (folder / "job.json").write_text(json.dumps(job))
    argv = [str(REPOSITORY / "tests" / "regimes_worker.py"), str(folder / "job.json")]
    for code, output in run_ranks(TP, argv, folder, timeout=1800):
        assert code == 0, output[-4000:]
    found = {}
    for regime in REGIMES:
        found[regime], other = (pickle.loads((folder / f"{regime}-{rank}.pickle").read_bytes()) for rank in range(TP))
        assert len(found[regime].windows) == STEPS + 1 and np.array_equal(found[regime].windows, other.windows)
    return found


def updates(run: SimpleNamespace) -> list:
    return [decision for decision in run.decisions.values() if decision.update]


def layers(run: SimpleNamespace) -> list:
    """LayerDecisions of all updates."""
    return [layer for decision in updates(run) for layer in decision.layers]


def maps(run: SimpleNamespace) -> np.ndarray:
    """[updates, layers, heads]."""
    return np.array([decision.maps for decision in updates(run)])


def paths(run: SimpleNamespace) -> list[set[str]]:
    """How each update was made."""
    return [{layer.path for layer in decision.layers} for decision in updates(run)]


def parents(levels: list[Level]) -> list[np.ndarray | None]:
    return [map_of(above.groups, len(level.groups)) for level, above in pairwise(levels)] + [None]


def test_every_regime_is_looked_at():
    assert sorted([*NEVER_CHANGE, *DECIDING]) == REGIMES


@pytest.mark.ranks
@pytest.mark.parametrize("regime", REGIMES)
def test_trains(runs, regime: str):
    losses = runs[regime].losses
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    assert runs[regime].losses[0] == runs["full_attention"].losses[0] or regime in [*NEVER_CHANGE, *REDRAWN]


@pytest.mark.ranks
@pytest.mark.parametrize("regime", NEVER_CHANGE)
def test_fixed_from_step_0(runs, regime: str):
    run = runs[regime]
    assert run.settings is None and not run.decisions
    first, plan = run.windows[0], np.array(PLAN)
    assert all(np.array_equal(windows, first) for windows in run.windows)
    if regime == "random_heads_matched":
        assert np.array_equal(np.sort(first), np.sort(plan)) and (first != plan).any(1).all()
        return
    uniform = np.full((LAYERS, HEADS), 1)
    expected = {"full_attention": 48 * uniform, "fixed_1024": 12 * uniform, "fixed_2048": 24 * uniform,
                "fixed_window": np.tile(WINDOWS, (LAYERS, 2)), "frozen_policy": plan,
                "layer_pattern": np.repeat([[12], [12], [12], [48]], HEADS, 1), "uniform_matched": None}[regime]
    if regime == "uniform_matched":
        [window] = set(first.flat)
        errors = [abs(exact_pair_ratio([w], LENGTH) - exact_pair_ratio(plan, LENGTH)) for w in range(1, LENGTH + 1)]
        expected = uniform * (1 + int(np.argmin(errors)))
        assert 6 < window < 48
    assert np.array_equal(first, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("regime", DECIDING)
def test_decisions_fall_on_their_steps(runs, regime: str):
    run = runs[regime]
    due = [5, 15, 25] if regime == "shallow_control_interval_10" else UPDATES
    assert list(run.decisions) == [FIRST, SHADOW, *due]
    assert [step for step, decision in run.decisions.items() if decision.update] == due
    assert run.settings.head_blocks == BLOCKS, "auto is the TP size"
    if regime not in REDRAWN:
        assert all((windows == LENGTH).all() for windows in run.windows[:WARMUP])
        changes = [step for step in range(1, STEPS + 1) if (run.windows[step] != run.windows[step - 1]).any()]
        lagging = {step + 1 for step in due} if regime == "shallow_resolution_ema_030" else set()
        assert set(changes) <= {*due, *lagging}


@pytest.mark.ranks
@pytest.mark.parametrize("regime", [name for name in DECIDING if name not in (*REDRAWN, "control_off")])
def test_windows_are_the_smoothed_choice(runs, regime: str):
    run = runs[regime]
    weight, candidates, ema = run.settings.aah.resolution_ema, np.array(run.settings.windows), None
    assert weight == (0.3 if regime == "shallow_resolution_ema_030" else 0.15)
    for step in range(WARMUP, STEPS + 1):
        ema = run.raw[step] if ema is None else weight * ema + (1 - weight) * run.raw[step]
        assert np.array_equal(run.windows[step], candidates[np.rint(ema).astype(int)])
    # Entropy grows with the window, so that under the simple policy heads tend to keep theirs.
    assert regime == "simple_policy" or len({windows.tobytes() for windows in run.windows[WARMUP:]}) > 1
    assert max(len(np.unique(row)) for windows in run.windows[WARMUP:] for row in windows) > 1


@pytest.mark.ranks
def test_resolution_ema_is_short_by_one_index_after_a_jump(runs):
    run, jumps = runs["shallow_resolution_ema_030"], 0
    candidates = np.array(run.settings.windows)
    for step in range(WARMUP + 1, STEPS):
        leap = run.raw[step] - run.raw[step - 1]
        short = run.raw[step] - np.searchsorted(candidates, run.windows[step])
        assert np.array_equal(short[np.abs(leap) >= 2], np.sign(leap[np.abs(leap) >= 2]))
        assert np.array_equal(run.windows[step + 1], candidates[run.raw[step]]) or step + 1 in UPDATES
        jumps += int((np.abs(leap) >= 2).sum())
    assert jumps > 0
    # At .15 nothing is ever short.
    other = runs["shallow_freeze"]
    assert all(np.array_equal(other.windows[step], np.array(WINDOWS)[other.raw[step]]) for step in range(5, STEPS))


@pytest.mark.ranks
@pytest.mark.parametrize("regime", SHALLOW)
def test_shallow_keeps_its_one_level(runs, regime: str):
    run = runs[regime]
    assert {len(layer.levels) for layer in layers(run)} == {1}
    first, *later = paths(run)
    assert first == {"grouped_control_update"}
    assert all(made == {"grouped_control_frozen_learned_topology_update"} for made in later)
    assert (maps(run) == maps(run)[0]).all()
    # Within level 0 all groups are siblings, so that the joint scorer decides everything.
    assert all((layer.selection.logits[0] != layer.selection.independent_logits[0]).all() for layer in layers(run))


@pytest.mark.ranks
@pytest.mark.parametrize("regime", DEEP)
def test_deep_regimes_build_levels_anew(runs, regime: str):
    run = runs[regime]
    assert all(made == {"grouped_control_update"} for made in paths(run))
    assert max(len(layer.levels) for layer in layers(run)) == 4
    assert (maps(run) != maps(run)[0]).any(), "groups follow the heads"


@pytest.mark.ranks
@pytest.mark.parametrize("regime", GROUPED)
def test_groups_stay_inside_the_blocks_of_a_rank(runs, regime: str):
    for decision in runs[regime].decisions.values():
        halves = decision.maps.reshape(LAYERS, BLOCKS, -1)
        for lower, upper in halves:
            assert not set(lower) & set(upper) and len(set(lower)) == len(set(upper)) == 2


@pytest.mark.ranks
@pytest.mark.parametrize("regime", [name for name in GROUPED if name != "independent_scoring"])
def test_siblings_are_scored_together(runs, regime: str):
    """Logits of paired siblings are replaced, those of an odd one out are not."""
    alone = 0
    for layer in layers(runs[regime]):
        chosen = layer.selection
        for parent, joint, own in zip(parents(layer.levels), chosen.logits, chosen.independent_logits, strict=True):
            paired = np.isin(np.arange(len(own)), sibling_pairs(parent, len(own)))
            assert (joint[paired] != own[paired]).all() and np.array_equal(joint[~paired], own[~paired])
            alone += int((~paired).sum())
    assert alone or regime in [*SHALLOW, *KEPT_MAPS]


@pytest.mark.ranks
def test_independent_scoring_scores_every_group_alone(runs):
    for layer in layers(runs["independent_scoring"]):
        for ours, own in zip(layer.selection.logits, layer.selection.independent_logits, strict=True):
            assert np.array_equal(ours, own)
    # Until the first update both have seen the same.
    (first, *_), (other, *_) = layers(runs["independent_scoring"]), layers(runs["full_adaptive"])
    assert np.array_equal(first.selection.independent_logits[0], other.selection.independent_logits[0])


def above_parent(run: SimpleNamespace) -> tuple[int, int]:
    """Groups of all updates that scored a larger window than their parent got, and that got one."""
    wanted = got = 0
    for layer in layers(run):
        chosen = layer.selection
        for level, parent in enumerate(parents(layer.levels)[:-1]):
            limit = chosen.clamped[level + 1][parent]
            wanted += int((chosen.raw[level] > limit).sum())
            got += int((chosen.clamped[level] > limit).sum())
    return wanted, got


@pytest.mark.ranks
def test_parent_constraint(runs):
    wanted, got = above_parent(runs["full_adaptive"])
    assert wanted > 0 and got == 0
    wanted, got = above_parent(runs["no_parent_constraint"])
    assert wanted == got > 0
    assert all(np.array_equal(raw, clamped) for layer in layers(runs["no_parent_constraint"])
               for raw, clamped in zip(layer.selection.raw, layer.selection.clamped, strict=True))


@pytest.mark.ranks
def test_feature_ema(runs):
    """Both runs are the same until step 5: .9 of the features of step 0 and .1 of those of step 4, or the latter."""
    smoothed, plain = runs["full_adaptive"], runs["no_feature_ema"]
    for layer in range(LAYERS):
        start, ours, theirs = (run.decisions[step].layers[layer].features for run, step in (
            (plain, FIRST), (smoothed, UPDATES[0]), (plain, UPDATES[0])))
        assert np.allclose(ours, 0.9 * start + 0.1 * theirs, rtol=1e-12, atol=0)
        assert np.abs(ours - theirs).max() > 1e-2
        assert (start[:, 6:] == 0).all() and (theirs[:, 6:] > 0).all(), "there is no call before the first"


@pytest.mark.ranks
def test_grouping_off_decides_for_every_head(runs):
    run = runs["grouping_off"]
    assert all(made == {"ungrouped_control_update"} for made in paths(run))
    for layer in layers(run):
        [level] = layer.levels
        assert level.groups == [[head] for head in range(HEADS)]
        assert np.array_equal(layer.selection.logits[0], layer.selection.independent_logits[0])
        assert layer.selection.inputs[0].shape == (HEADS, 29)
    by_head = np.array([decision.choice for decision in updates(run)])
    assert max(len(np.unique(row)) for row in by_head.reshape(-1, HEADS)) > 1


@pytest.mark.ranks
@pytest.mark.parametrize("regime, path", [
    ("deep_practical_reuse", "grouped_control_reuse_update"),
    ("freeze_after_warmup_passthrough", "grouped_control_frozen_update"),
    ("fixed_random_grouping", "grouped_control_fixed_random_update"),
])
def test_maps_that_are_kept(runs, regime: str, path: str):
    run = runs[regime]
    assert all(made == {path} for made in paths(run))
    assert (maps(run) == maps(run)[0]).all()
    first = run.decisions[FIRST]
    assert all(np.array_equal(first.maps, runs["full_adaptive"].decisions[FIRST].maps) for regime in KEPT_MAPS)
    if regime == "fixed_random_grouping":
        assert (maps(run)[0] == maps(run)[0][0]).all(), "the same in every layer"
        assert (maps(run)[0] != first.maps).any(), "whatever the heads do"
        assert np.bincount(maps(run)[0][0]).tolist() == [2, 2, 2, 2]
    else:
        assert np.array_equal(maps(run)[0], first.maps)
    for layer in layers(run):
        upper = [level.groups for level in layer.levels[1:]]
        if regime == "deep_practical_reuse":
            assert len(layer.levels) == 1 or layer.levels[1].clustering
        else:
            assert upper == [[[0], [1], [2], [3]]] * 3


@pytest.mark.ranks
def test_known_maps_get_pooled_features(runs):
    """Moments of all values of a group, which is not the mean of its heads' features; not smoothed."""
    pooled, plain = (runs[name].decisions[UPDATES[0]] for name in ("deep_practical_reuse", "no_feature_ema"))
    for ours, heads in zip(pooled.layers, plain.layers, strict=True):
        means = np.stack([heads.features[group].mean(0) for group in ours.levels[0].groups])
        assert np.allclose(ours.features[:, [0, 2, 4, 6, 7, 8]], means[:, [0, 2, 4, 6, 7, 8]], rtol=1e-9, atol=0)
        together = np.array([len(group) > 1 for group in ours.levels[0].groups])
        assert (ours.features[together][:, [1, 3, 5]] > means[together][:, [1, 3, 5]]).all() and together.any()


@pytest.mark.ranks
def test_control_off_builds_groups_and_executes_full_attention(runs):
    run, baseline = runs["control_off"], runs["full_attention"]
    assert all((windows == LENGTH).all() for windows in run.windows)
    assert run.losses == baseline.losses
    assert all(made == {"grouping_only_full_attention"} for made in paths(run))
    assert (np.array([decision.choice for decision in updates(run)]) < 3).any(), "shown, not executed"
    assert (maps(run) != maps(run)[0]).any()


@pytest.mark.ranks
@pytest.mark.parametrize("regime", REDRAWN)
def test_windows_are_redrawn_every_step(runs, regime: str):
    run = runs[regime]
    candidates = np.array(run.settings.windows)
    redrawn = sum((a != b).any() for a, b in pairwise(run.windows[WARMUP:]))
    assert redrawn > 0.9 * (STEPS - WARMUP)
    chosen = [candidates[raw] for raw in run.raw[WARMUP:]]
    kept = [np.array_equal(np.sort(w), np.sort(c)) for w, c in zip(run.windows[WARMUP:], chosen, strict=True)]
    if regime == "shallow_random_uniform":
        assert not any(kept)
        assert set(np.array(run.windows[:WARMUP]).flat) == set(WINDOWS), "from step 0 on"
        shares = [(np.array(run.windows) == window).mean() for window in WINDOWS]
        assert np.allclose(shares, 0.25, atol=0.06)
    else:
        assert all(kept)
        moved = [(w != c).any() for w, c in zip(run.windows[WARMUP:], chosen, strict=True)]
        assert sum(moved) > 0.9 * len(moved)
        assert all((windows == LENGTH).all() for windows in run.windows[:WARMUP])


@pytest.mark.ranks
def test_no_512_has_no_smallest_window(runs):
    seen = set(np.array(runs["shallow_no_512"].windows[WARMUP:]).flat)
    assert seen <= {12, 24, 48} and len(seen) > 1
    assert 6 in np.array(runs["shallow_freeze"].windows)


@pytest.mark.ranks
def test_simple_policy_sorts_by_entropy_and_fills_quotas(runs):
    run = runs["simple_policy"]
    assert all(made == {"simple_update"} for made in paths(run))
    for decision in updates(run):
        for layer, choice in zip(decision.layers, decision.choice, strict=True):
            entropy = layer.features[:, 6]
            for block in np.split(np.arange(HEADS), BLOCKS):
                assert choice[block][np.argsort(entropy[block])].tolist() == [0, 1, 2, 3]


@pytest.mark.ranks
def test_work_that_remains(runs, tmp_path: Path):
    """The table of the regimes: attention context ratio and exact pair ratio, mean of the steps after the warm-up."""
    rows = {}
    for regime in REGIMES:
        decided = runs[regime].windows[WARMUP:STEPS]
        rows[regime] = [float(np.mean([figure(windows, LENGTH) for windows in decided]))
                        for figure in (acr, exact_pair_ratio)]
    table = "| regime | ACR | exact pair ratio |\n|---|---|---|\n" + "".join(
        f"| {regime} | {context:.3f} | {pair_ratio:.3f} |\n" for regime, (context, pair_ratio) in rows.items())
    (tmp_path / "regimes.md").write_text(table)
    print(f"\n{table}")
    assert rows["full_attention"] == rows["control_off"] == [1, 1]
    assert rows["fixed_1024"] == [0.25, pytest.approx((12 * 48 - 66) / (48 * 49 / 2))]
    for regime in DECIDING:
        assert regime == "control_off" or 0.125 <= rows[regime][0] < rows[regime][1] < 1, regime
    assert rows["random_heads_matched"] == pytest.approx(rows["frozen_policy"])
    assert rows["uniform_matched"][1] == pytest.approx(rows["frozen_policy"][1], abs=0.01)
    assert rows["uniform_matched"][0] < rows["frozen_policy"][0], "equal work is not an equal context ratio"
