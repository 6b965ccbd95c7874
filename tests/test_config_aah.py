"""The aah section: every field's refusal in one sentence."""

from pathlib import Path

import pytest
from refusals import error_of

from aah_dist.config import load
from aah_dist.config.load import KEPT
from aah_dist.config.schema import AahConfig


@pytest.mark.parametrize("changes, text", [
    ({"interval": 0}, "aah.interval is 0; it must be at least 1."),
    ({"warmup_steps": -1}, "aah.warmup_steps is -1; it must be at least 0."),
    ({"max_depth": 0}, "aah.max_depth is 0; it must be at least 1."),
    ({"min_group_size": 0}, "aah.min_group_size is 0; it must be at least 1."),
    ({"entropy_rows": -1}, "aah.entropy_rows is -1; it must be at least 0."),
    ({"ramp_steps": -1}, "aah.ramp_steps is -1; it must be at least 0."),
    ({"scorer_hidden": 0}, "aah.scorer_hidden is 0; it must be at least 1."),
    ({"joint_hidden": 0}, "aah.joint_hidden is 0; it must be at least 1."),
    ({"norm_difference_scale": -1.0}, "aah.norm_difference_scale is -1.0; it must be at least 0."),
    ({"upper_metric": "l2", "upper_l2_threshold": -1.0}, "aah.upper_l2_threshold is -1.0; it must be at least 0."),
    ({"churn_bonus": -0.1}, "aah.churn_bonus is -0.1; it must be at least 0."),
    ({"feature_ema": 1.1}, "aah.feature_ema is 1.1; it must lie in [0, 1]."),
    ({"feature_ema": -0.1}, "aah.feature_ema is -0.1; it must lie in [0, 1]."),
    ({"resolution_ema": 2.0}, "aah.resolution_ema is 2.0; it must lie in [0, 1]."),
    ({"collapse_fraction": -1.0}, "aah.collapse_fraction is -1.0; it must lie in [0, 1]."),
    ({"head_blocks": 0}, "aah.head_blocks is 0; give auto or a number of at least 1."),
    ({"windows": []}, "aah.windows is empty; give at least one window, for example [64, 128, 256, 512]."),
    ({"policy": "simple", "quotas": [0.5, 0.5]}, "aah.quotas [0.5, 0.5] has 2 shares; give one for each of the 4 "
                                                 "aah.windows [0.125, 0.25, 0.5, 1.0]."),
    ({"policy": "simple", "quotas": [0.5, 0.5, 0.5, 0.5]}, "aah.quotas [0.5, 0.5, 0.5, 0.5] must be shares of at least "
                                                           "0 that sum to 1; the smallest is 0.5, the sum 2."),
    ({"policy": "simple", "quotas": [1.5, -0.5, 0.0, 0.0]}, "aah.quotas [1.5, -0.5, 0.0, 0.0] must be shares of at "
                                                            "least 0 that sum to 1; the smallest is -0.5, the sum 1."),
    ({"policy": "fixed_window"}, "aah.policy fixed_window needs aah.fixed_window, for example --aah.fixed_window 128."),
    ({"policy": "layer_pattern"}, "aah.policy layer_pattern needs aah.layer_pattern, for example --aah.layer_pattern "
                                  "'[0.25, 0.25, 0.25, 1.0]'."),
    ({"policy": "layer_pattern", "layer_pattern": []}, "aah.layer_pattern is empty; give at least one window, for "
                                                       "example [0.25, 1.0]."),
    *[({"policy": policy}, f"aah.policy {policy} needs aah.plan, a file of windows, for example --aah.plan "
                           "runs/demo/policy.jsonl.") for policy in ("frozen", "uniform_matched",
                                                                     "random_heads_matched")],
    ({"policy": "frozen", "plan": "p", "plan_step": -1}, "aah.plan_step is -1; it must be at least 0."),
])
def test_a_value_that_cannot_be(changes, text):
    changes = {"policy": "adaptive", **changes}
    assert error_of(AahConfig, **changes) == text


@pytest.mark.parametrize("window", [float("nan"), float("inf"), float("-inf"), 0, -1, 1.5, 0.0])
def test_a_window_that_cannot_be(window):
    assert "aah.windows [" in error_of(AahConfig, windows=[window])


def test_edges_that_are_fine():
    AahConfig(policy="adaptive", feature_ema=1.0, resolution_ema=0.0, warmup_steps=0, interval=1, entropy_rows=0,
              max_depth=1, head_blocks=1)
    AahConfig(policy="simple", windows=[1, 2, 4], quotas=[1 / 3, 1 / 3, 1 / 3])
    AahConfig(policy="simple", quotas=[1, 0, 0, 0])


@pytest.mark.parametrize("changes, parts", [
    ({"fixed_window": 3}, ["aah.fixed_window 3", "aah.policy full_attention", "--aah.policy fixed_window or leave"]),
    ({"policy": "adaptive", "layer_pattern": [3]}, ["aah.layer_pattern [3]", "--aah.policy layer_pattern or leave"]),
    ({"plan": "x"}, ["aah.plan x", "--aah.policy frozen, uniform_matched or random_heads_matched, or leave it out"]),
    ({"plan_step": 3}, ["aah.plan_step 3", "aah.policy full_attention"]),
    ({"policy": "adaptive", "quotas": [0.25] * 4}, ["aah.quotas", "--aah.policy simple or leave it out"]),
    ({"topology": "reuse"}, ["aah.topology reuse", "aah.policy full_attention", "--aah.policy adaptive or leave"]),
    ({"policy": "simple", "scorer": "independent"}, ["aah.scorer independent", "aah.policy simple"]),
    ({"grouping": False}, ["aah.grouping false", "aah.policy full_attention"]),
    ({"ablation": "shuffle"}, ["aah.ablation shuffle", "--aah.policy adaptive or simple, or leave it out"]),
    ({"policy": "adaptive", "grouping": False, "max_depth": 2}, ["aah.max_depth 2", "--aah.grouping true or leave"]),
    ({"policy": "adaptive", "window_control": False, "ablation": "shuffle"}, ["aah.ablation", "window_control true"]),
    ({"policy": "adaptive", "scorer": "independent", "joint_hidden": 8}, ["aah.joint_hidden 8", "--aah.scorer joint"]),
    ({"policy": "adaptive", "upper_l2_threshold": 1.0}, ["aah.upper_l2_threshold 1.0", "--aah.upper_metric l2"]),
    ({"policy": "adaptive", "upper_metric": "l2", "upper_threshold": 0.5}, ["aah.upper_threshold 0.5"]),
    ({"policy": "adaptive", "upper_metric": "cosine", "norm_difference_scale": 1.0}, ["aah.norm_difference_scale 1.0"]),
])
def test_a_field_without_effect_is_refused(changes, parts):
    text = error_of(AahConfig, **changes)
    assert "has no effect under" in text
    for part in parts:
        assert part in text


def test_what_a_preset_may_keep_is_accepted_under_every_policy():
    kept = {"windows": [3, 9], "warmup_steps": 1, "interval": 2, "backend": "dense", "head_blocks": 2,
            "entropy_rows": 3}
    assert set(kept) == KEPT
    for extra in ({}, {"policy": "fixed_window", "fixed_window": 1}, {"policy": "frozen", "plan": "x"},
                  {"policy": "layer_pattern", "layer_pattern": [1]}, {"policy": "adaptive"}, {"policy": "simple"}):
        AahConfig(**kept, **extra)


def test_importing_the_configuration_stays_light():
    for name in ("aah", "errors", "pairs", "plans", "windows", "validate", "load"):
        source = Path(load.__file__).with_name(f"{name}.py").read_text()
        assert "import torch" not in source and "megatron" not in source
