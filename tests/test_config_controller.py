"""Head blocks, notes, what a resume may change of the controller, and the windows in words."""

import dataclasses

import pytest
from refusals import error_of

from aah_dist.config.load import load_config
from aah_dist.config.validate import Layout, check_resume, notes, resolve_head_blocks, resolve_layout


@pytest.mark.parametrize("given, tp, heads, kv_heads, unit, blocks", [
    ("auto", 1, 12, None, "head", 1), ("auto", 2, 12, None, "head", 2), ("auto", 4, 12, 4, "kv_group", 4),
    (1, 4, 12, None, "head", 1), (4, 2, 12, None, "head", 4), (12, 4, 12, None, "head", 12), (6, 2, 12, 2, "head", 6),
    (2, 1, 12, 4, "kv_group", 2), (3, 1, 12, 3, "kv_group", 3),
])
def test_head_blocks(given, tp, heads, kv_heads, unit, blocks):
    config = load_config("demo", overrides={
        "model.hidden_size": 192, "model.num_heads": heads, "model.num_kv_heads": kv_heads, "aah.control_unit": unit,
        "aah.head_blocks": given})
    assert resolve_head_blocks(config, Layout(tp, 1, 1, tp)) == blocks
    assert config.aah.head_blocks == given, "the configuration itself is left alone"


@pytest.mark.parametrize("given, tp, kv_heads, unit, parts", [
    (5, 1, None, "head", ["aah.head_blocks 5", "model.num_heads 12; give 1 or 2 or 3 or 4 or 6 or 12."]),
    (3, 2, None, "head", ["aah.head_blocks 3", "multiple of TP 2", "give 1 or 2 or 4 or 6 or 12"]),
    (2, 4, None, "head", ["aah.head_blocks 2", "TP 4", "give 1 or 4 or 12"]),
    (24, 2, None, "head", ["aah.head_blocks 24"]),
    (6, 2, 4, "kv_group", ["aah.head_blocks 6", "model.num_kv_heads 4", "give 1 or 2 or 4"]),
    ("auto", 5, None, "head", ["aah.head_blocks auto", "model.num_heads 12", "TP 5", "give 1"]),
    ("auto", 3, 4, "kv_group", ["aah.head_blocks auto", "model.num_kv_heads 4", "TP 3", "give 1"]),
])
def test_head_blocks_that_cannot_be(given, tp, kv_heads, unit, parts):
    config = load_config("demo", overrides={
        "model.hidden_size": 192, "model.num_heads": 12, "model.num_kv_heads": kv_heads, "aah.control_unit": unit,
        "aah.head_blocks": given})
    text = error_of(resolve_head_blocks, config, Layout(tp, 1, 1, tp))
    for part in parts:
        assert part in text


def test_tensor_parallel_ranks_share_no_kv_group():
    config = load_config("demo", overrides={"model.num_kv_heads": 2, "aah.control_unit": "kv_group",
                                            "aah.head_blocks": 1, "parallel.tensor_parallel_size": 4})
    assert "model.num_kv_heads 2" in error_of(resolve_layout, config, 4)


def test_a_run_keeps_its_head_blocks():
    new, old = load_config("demo"), load_config("demo", overrides={"aah.head_blocks": 2})
    before = (new.to_dict(), old.to_dict())
    check_resume(old, new)
    check_resume(old, old)
    for tp in (1, 2, 4):
        assert resolve_head_blocks(new, Layout(tp, 1, 1, tp), old) == 2
    assert resolve_head_blocks(new, Layout(4, 1, 1, 4), new) == 4
    assert (new.to_dict(), old.to_dict()) == before
    other = load_config("demo", overrides={"aah.head_blocks": 4})
    assert "aah.head_blocks was 2 in this run and is 4 now" in error_of(check_resume, old, other)
    assert "aah.head_blocks was auto in this run and is 4 now" in error_of(check_resume, new, other)


@pytest.mark.parametrize("changes", [
    {"interval": 6}, {"warmup_steps": 21}, {"entropy_rows": 0}, {"control_unit": "kv_group"}, {"feature_ema": 0.5},
    {"control_precision": "fp32"}, {"ablation": "shuffle"}, {"topology": "reuse"}, {"windows": [1, 2]},
])
def test_a_resume_may_not_change_the_controller(changes):
    (name, _), = changes.items()
    new = load_config("demo", overrides={f"aah.{name}": value for name, value in changes.items()})
    assert f"aah.{name} was" in error_of(check_resume, load_config("demo"), new)


def test_a_resume_may_not_change_the_plan():
    old, moved, other = (load_config("demo", "frozen_policy", {"aah.plan": plan, "aah.plan_step": step})
                         for plan, step in (("a.jsonl", 1), ("b.jsonl", 1), ("a.jsonl", 2)))
    assert "aah.plan was a.jsonl" in error_of(check_resume, old, moved)
    assert "aah.plan_step was 1" in error_of(check_resume, old, other)


def controller_notes(regime, tp=1, **overrides):
    config = load_config("demo", regime, {key.replace("__", "."): value for key, value in overrides.items()})
    return notes(config, resolve_layout(dataclasses.replace(config, parallel=dataclasses.replace(
        config.parallel, tensor_parallel_size=tp)), tp))


@pytest.mark.parametrize("regime", ["full_adaptive", "simple_policy"])
def test_notes_on_a_controller(regime):
    assert controller_notes(regime) == []
    found, = controller_notes(regime, train__steps=30, aah__warmup_steps=30)
    assert "aah.warmup_steps 30 is not below train.steps 30" in found
    assert controller_notes(regime, train__steps=31, aah__warmup_steps=30) == []
    found, = controller_notes(regime, aah__windows=[64, 0.5])
    assert "aah.windows [64, 0.5] leaves out model.seq_length 512" in found
    found, = controller_notes(regime, tp=2, aah__head_blocks=1)
    assert "aah.head_blocks 1 at TP 2" in found
    assert controller_notes(regime, tp=2, aah__head_blocks=4) == []


@pytest.mark.parametrize("regime", ["control_off", "full_attention", "fixed_1024"])
def test_no_such_notes_where_nothing_is_decided(regime):
    assert controller_notes(regime, tp=2, train__steps=30, aah__warmup_steps=30, aah__windows=[64],
                            aah__head_blocks=1) == []


@pytest.mark.parametrize("regime, overrides, text", [
    ("full_adaptive", {}, "full attention for 20 steps, then one of 64, 128, 256, 512 keys a head, decided every 5 "
                          "steps; 2 head blocks"),
    ("full_adaptive", {"aah.head_blocks": 1, "aah.warmup_steps": 0, "aah.interval": 1},
     "full attention for 1 step, then one of 64, 128, 256, 512 keys a head, decided every step; 1 head block"),
    ("full_adaptive", {"aah.control_unit": "kv_group", "model.seq_length": 64},
     "full attention for 20 steps, then one of 8, 16, 32, 64 keys a KV group, decided every 5 steps; 2 head blocks"),
    ("grouping_off", {}, "full attention for 20 steps, then one of 64, 128, 256, 512 keys a head, decided every 5 "
                         "steps; no groups"),
    ("control_off", {}, "full attention for the whole run; decisions are recorded, none is executed"),
    ("shallow_shuffle_post_select", {}, "full attention for 20 steps, then one of 64, 128, 256, 512 keys a head, "
                                        "decided every 5 steps, shuffled every step; 2 head blocks"),
    ("shallow_random_uniform", {}, "one of 64, 128, 256, 512 keys a head, drawn at random every step from step 0 on; "
                                   "decisions are recorded, none is executed"),
    ("simple_policy", {}, "full attention for 20 steps, then 64, 128, 256, 512 keys in equal shares, heads sorted by "
                          "entropy, decided every 5 steps"),
    ("simple_policy", {"aah.quotas": [0.5, 0.25, 0.25, 0.0]},
     "full attention for 20 steps, then 64, 128, 256, 512 keys in shares of 0.5, 0.25, 0.25, 0.0, heads sorted by "
     "entropy, decided every 5 steps"),
    ("full_attention", {}, "32 x 512 (heads x keys, over all layers)"),
    ("fixed_1024", {}, "32 x 128 (heads x keys, over all layers)"),
    ("layer_pattern", {}, "24 x 128, 8 x 512 (heads x keys, over all layers)"),
])
def test_the_windows_in_words(regime, overrides, text):
    pytest.importorskip("deepspeed")
    from aah_dist.training.describe import windows_in_words

    config = load_config("demo", regime, {"model.num_layers": 4, "model.num_heads": 8, "model.seq_length": 512,
                                          "aah.head_blocks": 2, **overrides})
    assert windows_in_words(config) == text


def test_describing_names_the_policy():
    pytest.importorskip("deepspeed")
    from aah_dist.training.describe import plan

    config = load_config("demo", overrides={"aah.head_blocks": 1})
    assert any(line.startswith("windows   adaptive: full attention for 20 steps")
               for line in plan(config, resolve_layout(config, 1), {}, 1024))
