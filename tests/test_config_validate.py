"""The layout over ranks, windows into a policy, and what a resume may change: every refusal with field and value."""

import dataclasses

import numpy as np
import pytest
from refusals import error_of

from aah_dist.config.load import load_config
from aah_dist.config.validate import (
    Layout,
    check_resume,
    notes,
    resolve_decay_steps,
    resolve_layout,
)
from aah_dist.config.windows import candidate_windows, policy_from_config

pytestmark = pytest.mark.usefixtures("frozen_demo")


def configured(**overrides):
    return load_config("demo", overrides={key.replace("__", "."): value for key, value in overrides.items()})


@pytest.mark.parametrize("world, tp, dp, accumulation", [(1, 1, 1, 4), (2, 2, 1, 4), (4, 2, 2, 2), (8, 2, 4, 1)])
def test_auto_layout(world, tp, dp, accumulation):
    assert resolve_layout(configured(), world) == Layout(tp, dp, accumulation, world)


@pytest.mark.parametrize("overrides, world", [
    ({}, 3),
    ({"model__num_heads": 3}, 2),
    ({"model__num_kv_heads": 3}, 2),
    ({"model__ffn_hidden_size": 129}, 2),
])
def test_auto_is_1_where_2_does_not_divide(overrides, world):
    assert resolve_layout(configured(train__global_batch_size=4 * world, **overrides), world).tp == 1


@pytest.mark.parametrize("overrides, world, parts", [
    ({"parallel__tensor_parallel_size": 5}, 5, ["model.num_heads 12", "tensor_parallel_size 5", "1, 2, 3, 4, 6, 12"]),
    ({"parallel__tensor_parallel_size": 2, "model__num_kv_heads": 3}, 2, ["model.num_kv_heads 3", "size 2"]),
    ({"parallel__tensor_parallel_size": 2, "model__ffn_hidden_size": 131}, 2, ["model.ffn_hidden_size 131", "size 2"]),
    ({"parallel__tensor_parallel_size": 2, "model__vocab_multiple": 1}, 2, ["model.vocab_multiple 1", "give 2"]),
    ({"parallel__tensor_parallel_size": 3}, 3, ["model.vocab_multiple 128", "size 3", "give 384"]),
    ({"parallel__tensor_parallel_size": 2}, 3, ["tensor_parallel_size 2", "3 ranks", "1, 3"]),
    ({"parallel__tensor_parallel_size": 4}, 2, ["tensor_parallel_size 4", "2 ranks"]),
    ({"train__global_batch_size": 18}, 4, ["train.global_batch_size 18", "size 4 x 2", "16 and 24"]),
    ({"train__global_batch_size": 3}, 1, ["train.global_batch_size 3", "nearest valid: 4"]),
    ({"parallel__sequence_parallel": True, "model__seq_length": 511}, 2, ["model.seq_length 511", "sequence_parallel",
                                                                          "510"]),
])
def test_layouts_that_do_not_divide(overrides, world, parts):
    text = error_of(resolve_layout, configured(**overrides), world)
    for part in parts:
        assert part in text


def test_every_accepted_layout_multiplies_out():
    for batch in range(1, 40):
        config = configured(train__global_batch_size=batch, train__micro_batch_size=1)
        for world in range(1, 17):
            dp = world // (2 if world % 2 == 0 else 1)
            if batch % dp:
                error_of(resolve_layout, config, world)
            else:
                layout = resolve_layout(config, world)
                assert layout.tp * layout.dp == world and layout.accumulation * layout.dp == batch


def test_notes():
    config = configured(parallel__sequence_parallel=True, train__steps=5)
    found = notes(config, resolve_layout(config, 1))
    assert len(found) == 2 and "sequence_parallel" in found[0] and "warmup_steps 20" in found[1]
    assert notes(configured(), resolve_layout(configured(), 2)) == []


def test_policy_of_full_attention():
    policy = policy_from_config(load_config("demo", "full_attention"))
    assert policy.dtype == np.int64 and policy.shape == (4, 12) and (policy == 512).all()


def test_policy_of_the_demo_is_a_mix_repeated_over_the_heads():
    policy = policy_from_config(configured())
    assert (policy == np.tile([64, 128, 256, 512], 3)).all()
    assert candidate_windows(configured()) == [64, 128, 256, 512]


@pytest.mark.parametrize("fixed, row", [
    (1, [1] * 12),
    (1.0, [512] * 12),
    (128.0, [128] * 12),
    ([7], [7] * 12),
    ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]),
    ([0.001, 512], [1, 512] * 6),
])
def test_one_window_or_a_list_over_the_heads(fixed, row):
    assert policy_from_config(configured(aah__fixed_window=fixed)).tolist() == [row] * 4


def test_one_list_per_layer():
    policy = policy_from_config(configured(aah__fixed_window=[[1], [2, 3], [0.5], list(range(1, 13))]))
    assert policy.tolist() == [[1] * 12, [2, 3] * 6, [256] * 12, list(range(1, 13))]


@pytest.mark.parametrize("length, windows", [(8, [1, 2, 4, 8]), (100, [13, 25, 50, 100]),
                                             (1001, [125, 250, 501, 1001])])
def test_fractions_follow_the_length(length, windows):
    config = configured(model__seq_length=length)
    assert candidate_windows(config) == windows and policy_from_config(config)[0, :4].tolist() == windows


@pytest.mark.parametrize("overrides, parts", [
    ({"aah__windows": [64, 1024]}, ["aah.windows 1024", "model.seq_length 512"]),
    ({"aah__windows": [128, 64]}, ["aah.windows [128, 64]", "above the one before"]),
    ({"aah__windows": [64, 64]}, ["aah.windows [64, 64]"]),
    ({"aah__windows": [0.5, 256]}, ["aah.windows [0.5, 256]", "[256, 256]"]),
    ({"aah__windows": [0.0001, 1.0]}, ["aah.windows 0.0001 is 0 tokens", "512", "at least 1"]),
    ({"aah__fixed_window": 0}, ["aah.fixed_window 0 ", "at least 1"]),
    ({"aah__fixed_window": -3}, ["aah.fixed_window -3 ", "at least 1"]),
    ({"aah__fixed_window": 513}, ["aah.fixed_window 513", "model.seq_length 512"]),
    ({"aah__fixed_window": 2.5}, ["aah.fixed_window 2.5", "fraction"]),
    ({"aah__fixed_window": [1] * 13}, ["aah.fixed_window lists 13", "1 to 12"]),
    ({"aah__fixed_window": []}, ["aah.fixed_window lists 0", "1 to 12"]),
    ({"aah__fixed_window": [[1], [2], [3]]}, ["aah.fixed_window has 3 lists", "4 (model.num_layers)"]),
    ({"aah__fixed_window": [[1], [2], [3], []]}, ["aah.fixed_window lists 0"]),
    ({"aah__fixed_window": [[1], [2], [3], [0]]}, ["aah.fixed_window 0 "]),
])
def test_windows_that_cannot_be(overrides, parts):
    text = error_of(policy_from_config, configured(**overrides))
    for part in parts:
        assert part in text


def test_windows_below_1_are_refused_by_the_schema():
    assert "aah.windows [0, 5]" in error_of(lambda: configured(aah__windows=[0, 5]))


def test_windows_are_checked_under_full_attention_too():
    config = load_config("demo", "full_attention", {"aah.windows": [512, 64]})
    assert "aah.windows" in error_of(policy_from_config, config)


@pytest.mark.parametrize("overrides", [
    {"train__steps": 999}, {"train__decay_steps": 5}, {"train__eval_interval": 3}, {"train__eval_samples": 3},
    {"aah__backend": "dense"}, {"data__path": "elsewhere"}, {"checkpoint__keep": 9}, {"checkpoint__resume": "none"},
    {"log__interval": 1}, {"parallel__timeout_minutes": 1.0}, {"parallel__device": "cpu"}, {"output_dir": "moved"},
])
def test_a_resume_may_change(overrides):
    check_resume(configured(), configured(**overrides))


@pytest.mark.parametrize("overrides, parts", [
    ({"model__num_layers": 5}, ["model.num_layers was 4", "is 5"]),
    ({"model__dropout": 0.5}, ["model.dropout was 0.0", "is 0.5"]),
    ({"train__seed": 3}, ["train.seed was 0", "is 3"]),
    ({"train__global_batch_size": 32}, ["train.global_batch_size was 16", "is 32"]),
    ({"train__lr": 1.0}, ["train.lr was 0.002", "is 1.0"]),
    ({"train__min_lr": 0.001}, ["train.min_lr was 0.0002", "is 0.001"]),
    ({"train__warmup_steps": 1}, ["train.warmup_steps was 20", "is 1"]),
    ({"train__beta2": 0.5}, ["train.beta2 was 0.95", "is 0.5"]),
    ({"train__weight_decay": 0.0}, ["train.weight_decay was 0.1", "is 0.0"]),
    ({"train__decay": "all"}, ["train.decay was matrices", "is all"]),
    ({"train__clip": 0.0}, ["train.clip was 1.0", "is 0.0"]),
    ({"aah__fixed_window": 5}, ["aah.fixed_window was [0.125, 0.25, 0.5, 1.0]", "is 5"]),
    ({"aah__windows": [5]}, ["aah.windows was", "is [5]"]),
    ({"train__micro_batch_size": 2}, ["train.micro_batch_size was 4", "is 2", "layout"]),
    ({"train__recompute": True}, ["train.recompute was False", "is True", "layout"]),
    ({"parallel__sequence_parallel": True}, ["parallel.sequence_parallel was False", "is True", "layout"]),
])
def test_a_resume_may_not_change(overrides, parts):
    text = error_of(check_resume, configured(), configured(**overrides))
    for part in parts:
        assert part in text


def test_a_resume_may_not_change_the_regime():
    assert "aah.policy was fixed_window" in error_of(check_resume, configured(), load_config("demo", "full_attention"))


def test_decay_steps_survive_any_number_of_extensions():
    first = configured(train__steps=100)
    end, sentence = resolve_decay_steps(first)
    assert end == 100 and "step 100" in sentence
    for steps in (200, 300):
        stored = dataclasses.replace(first, train=dataclasses.replace(first.train, decay_steps=end))
        first = configured(train__steps=steps)
        end, sentence = resolve_decay_steps(first, stored)
        assert end == 100 and "Steps 100 to" in sentence


def test_decay_steps_that_are_set_win():
    old, new = configured(train__steps=100), configured(train__steps=200, train__decay_steps=150)
    end, sentence = resolve_decay_steps(new, old)
    assert end == 150 and "stretched from step 100 to step 150" in sentence
    assert resolve_decay_steps(new)[0] == 150

