"""Every regime over every preset: what it changes, and what a preset may keep."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import yaml
from refusals import error_of

from aah_dist.config import load
from aah_dist.config.cli import parse_args
from aah_dist.config.load import load_config
from aah_dist.config.schema import AahConfig
from aah_dist.config.validate import notes, resolve_head_blocks, resolve_layout
from aah_dist.config.windows import policy_from_config

REGIMES = sorted(path.stem for path in load.FOLDER.glob("regimes/*.yaml"))
PRESETS = sorted(path.stem for path in load.FOLDER.glob("presets/*.yaml"))
SHALLOW = {"policy": "adaptive", "max_depth": 1, "topology": "freeze_learned"}
# What each regime changes of the defaults.
DIFFERENCES = {
    "full_attention": {},
    "fixed_window": {"policy": "fixed_window", "fixed_window": [0.125, 0.25, 0.5, 1.0]},
    "fixed_1024": {"policy": "fixed_window", "fixed_window": 0.25},
    "fixed_2048": {"policy": "fixed_window", "fixed_window": 0.5},
    "layer_pattern": {"policy": "layer_pattern", "layer_pattern": [0.25, 0.25, 0.25, 1.0]},
    "frozen_policy": {"policy": "frozen"},
    "uniform_matched": {"policy": "uniform_matched"},
    "random_heads_matched": {"policy": "random_heads_matched"},
    "simple_policy": {"policy": "simple"},
    "full_adaptive": {"policy": "adaptive"},
    "grouping_off": {"policy": "adaptive", "grouping": False},
    "control_off": {"policy": "adaptive", "window_control": False},
    "deep_practical_reuse": {"policy": "adaptive", "topology": "reuse"},
    "fixed_random_grouping": {"policy": "adaptive", "topology": "fixed_random"},
    "freeze_after_warmup_passthrough": {"policy": "adaptive", "topology": "freeze_after_warmup"},
    "independent_scoring": {"policy": "adaptive", "scorer": "independent"},
    "no_parent_constraint": {"policy": "adaptive", "parent_constraint": False},
    "no_feature_ema": {"policy": "adaptive", "feature_ema": 0.0},
    "full_adaptive_shuffle_post_select": {"policy": "adaptive", "ablation": "shuffle"},
    "shallow_freeze": SHALLOW,
    "shallow_control_interval_10": {**SHALLOW, "interval": 10},
    "shallow_shuffle_post_select": {**SHALLOW, "ablation": "shuffle"},
    "shallow_random_uniform": {**SHALLOW, "ablation": "random_uniform"},
    "shallow_resolution_ema_030": {**SHALLOW, "resolution_ema": 0.3},
    "shallow_no_512": {**SHALLOW, "windows": [0.25, 0.5, 1.0]},
}
PLANNED = ("frozen_policy", "uniform_matched", "random_heads_matched")


@pytest.fixture
def plan_of(tmp_path):
    def write(config) -> str:
        rows = [[config.model.seq_length] * config.model.num_heads] * config.model.num_layers
        (tmp_path / "policy.jsonl").write_text(json.dumps({"step": 0, "windows": rows}) + "\n")
        return str(tmp_path / "policy.jsonl")
    return write


@functools.cache
def by_itself(preset):
    return load_config(preset)


def loaded(preset, regime, plan_of):
    overrides = {"train.global_batch_size": 32}
    if regime in PLANNED:
        overrides["aah.plan"] = plan_of(by_itself(preset))
    return load_config(preset, regime, overrides)


def test_the_regimes_are_the_ones_known_here():
    assert set(REGIMES) == set(DIFFERENCES)


@pytest.mark.parametrize("regime", REGIMES)
def test_a_regime_is_its_differences_from_the_defaults(tmp_path, regime):
    content = yaml.safe_load((load.FOLDER / "regimes" / f"{regime}.yaml").read_text())
    assert {"policy": "full_attention", **DIFFERENCES[regime]} == content["aah"]
    assert set(content) == {"description", "aah"}
    (tmp_path / "empty.yaml").write_text("description: nothing")
    plan = {"plan": "x"} if regime in PLANNED else {}
    config = load_config(str(tmp_path / "empty.yaml"), regime, {f"aah.{name}": value for name, value in plan.items()})
    assert config.aah == dataclasses.replace(AahConfig(), **DIFFERENCES[regime], **plan)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_works_with_every_preset(preset, regime, plan_of):
    config = loaded(preset, regime, plan_of)
    layout = resolve_layout(config, 2)
    config.aah.head_blocks = resolve_head_blocks(config, layout)
    policy = policy_from_config(config)
    full = config.aah.policy in ("full_attention", "adaptive", "simple") or regime in PLANNED
    assert policy.shape == (config.model.num_layers, config.model.num_heads)
    assert (policy == config.model.seq_length).all() == full
    for note in notes(config, layout):
        assert "head_blocks 1 at TP 2" in note or "layer_pattern" in note
    kept = by_itself(preset).aah
    assert config.aah.windows == ([0.25, 0.5, 1.0] if regime == "shallow_no_512" else kept.windows)
    assert config.aah.warmup_steps == kept.warmup_steps


@pytest.mark.parametrize("regime, share", [("fixed_1024", 4), ("fixed_2048", 2)])
def test_fixed_windows_are_named_for_4096_tokens(regime, share):
    assert (policy_from_config(load_config("1b_4096", regime)) == 4096 // share).all()
    assert (policy_from_config(load_config("demo", regime, {"model.seq_length": 300})) == 300 // share).all()


def test_layer_patterns_repeat_over_the_layers():
    config = load_config("demo", "layer_pattern", {"model.num_layers": 6, "model.seq_length": 100})
    policy = policy_from_config(config)
    assert policy.dtype == np.int64 and (policy == policy[:, :1]).all()
    assert policy[:, 0].tolist() == [25, 25, 25, 100, 25, 25]
    shorter = load_config("demo", "layer_pattern", {"model.num_layers": 2, "model.seq_length": 100,
                                                    "aah.layer_pattern": [7, 0.5, 1.0]})
    assert policy_from_config(shorter)[:, 0].tolist() == [7, 50]
    assert any("3 windows, the model 2 layers: [1.0] is not used" in note
               for note in notes(shorter, resolve_layout(shorter, 1)))
    above = load_config("demo", "layer_pattern", {"aah.layer_pattern": [7, 9999]})
    assert "aah.layer_pattern 9999 is above" in error_of(policy_from_config, above)


def test_the_presets_name_the_papers_method():
    for preset in PRESETS:
        assert by_itself(preset).regime == "full_adaptive" and by_itself(preset).aah.policy == "adaptive"
    demo, paper = by_itself("demo").aah, by_itself("1b_4096").aah
    assert (demo.warmup_steps, demo.interval) == (20, 5)
    assert (paper.warmup_steps, paper.interval, paper.head_blocks) == (100, 5, 1)
    assert paper.windows == [512, 1024, 2048, 4096]


def test_what_a_preset_sets_for_its_own_policy_does_not_reach_another_regime(tmp_path):
    kept = {"windows": [3, 500], "warmup_steps": 9, "interval": 3, "backend": "dense", "head_blocks": 4,
            "entropy_rows": 7}
    own = {"plan": "p.yaml", "plan_step": 2, "fixed_window": 7, "layer_pattern": [1], "quotas": [0.5, 0.5],
           "ablation": "shuffle", "topology": "reuse", "max_depth": 2, "grouping": False, "window_control": False,
           "policy": "simple", "scorer": "independent", "feature_ema": 0.0, "control_precision": "fp32"}
    preset = tmp_path / "p.yaml"
    preset.write_text(yaml.safe_dump({"regime": "full_attention", "aah": {**kept, **own}}))
    for regime in set(REGIMES) - set(PLANNED):
        expected = {**dataclasses.asdict(AahConfig()), **kept, **DIFFERENCES[regime]}
        assert dataclasses.asdict(load_config(str(preset), regime).aah) == expected
    assert parse_args(["--preset", str(preset), "--regime", regime])[0] == load_config(str(preset), regime)


def test_a_presets_own_section_lies_above_its_own_regime(tmp_path):
    (tmp_path / "p.yaml").write_text("regime: shallow_freeze\naah: {topology: reuse, interval: 2}\n")
    aah = load_config(str(tmp_path / "p.yaml")).aah
    assert (aah.policy, aah.max_depth, aah.topology, aah.interval) == ("adaptive", 1, "reuse", 2)


@pytest.mark.parametrize("name, near", [
    ("shallowfreeze", "shallow_freeze"), ("full-adaptive", "full_adaptive"), ("fixed1024", "fixed_1024"),
    ("shallow_no512", "shallow_no_512"), ("deep_reuse", "deep_practical_reuse"), ("simple", "simple_policy"),
])
def test_a_mistyped_regime_is_answered_with_the_nearest(name, near):
    assert error_of(parse_args, ["--regime", name]) == f"regime {name} is unknown; the nearest is {near}."


def test_an_unlike_regime_is_answered_with_all():
    text = error_of(parse_args, ["--regime", "zzz"])
    assert all(regime in text for regime in REGIMES)
