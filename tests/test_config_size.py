"""Parameters and memory computed from a configuration."""

import pytest

from aah_dist.config.load import load_config
from aah_dist.config.schema import ModelConfig
from aah_dist.config.size import count_parameters, memory_per_rank, padded_vocab_size
from aah_dist.config.validate import Layout, resolve_layout

pytestmark = pytest.mark.usefixtures("frozen_demo")


def test_the_papers_model():
    config = load_config("1b_4096")
    assert count_parameters(config.model, config.model.vocab_size) == 536_695_296


def test_a_model_counted_by_hand():
    model = ModelConfig(num_layers=2, hidden_size=24, num_heads=6, num_kv_heads=2, ffn_hidden_size=40, seq_length=10,
                        position="rope", norm="rmsnorm", activation="swiglu", mlp_bias=False, tied_embeddings=False,
                        qk_norm=True)
    attention = 24 * 24 + 2 * 24 * 8 + 24 * 24
    mlp = 24 * 80 + 40 * 24
    norms = 24 + 24 + 4 + 4
    assert count_parameters(model, 33) == 2 * 33 * 24 + 2 * (attention + mlp + norms) + 24


def test_biases_positions_and_norms_are_counted():
    small = dict(num_layers=3, hidden_size=12, num_heads=3, ffn_hidden_size=20, seq_length=7)
    whole = count_parameters(ModelConfig(**small), 5)
    assert whole - count_parameters(ModelConfig(**small, mlp_bias=False), 5) == 3 * (20 + 12)
    assert whole - count_parameters(ModelConfig(**small, position="rope"), 5) == 7 * 12
    assert whole - count_parameters(ModelConfig(**small, norm="rmsnorm"), 5) == 7 * 12
    assert count_parameters(ModelConfig(**small, max_positions=9), 5) - whole == 2 * 12
    assert count_parameters(ModelConfig(**small, tied_embeddings=False), 5) - whole == 5 * 12
    assert count_parameters(ModelConfig(**small, qk_norm=True), 5) - whole == 3 * 2 * 4


@pytest.mark.parametrize("vocab, rows", [(1, 128), (128, 128), (129, 256), (50257, 50304)])
def test_padding(vocab, rows):
    assert padded_vocab_size(ModelConfig(), vocab) == rows


def memory(stage, precision="bf16", dp=4, tp=1, offload=False, **overrides):
    config = load_config("1b_4096", overrides={"train.global_batch_size": 4, **overrides})
    return memory_per_rank(config, Layout(tp, dp, 1, tp * dp), stage, precision, offload, 50257)


def test_memory_by_zero_stage():
    model = load_config("1b_4096").model
    parameters = count_parameters(model, padded_vocab_size(model, 50257))
    share = parameters // 4
    assert [memory(0, "fp32")[k] for k in ("weights", "gradients", "optimizer")] == [
        4 * parameters, 4 * parameters, 8 * parameters]
    assert [memory(1)[k] for k in ("weights", "gradients", "optimizer")] == [2 * parameters, 6 * parameters, 12 * share]
    assert [memory(2)[k] for k in ("weights", "gradients", "optimizer")] == [2 * parameters, 4 * share, 12 * share]
    assert [memory(3)[k] for k in ("weights", "gradients", "optimizer")] == [2 * share, 4 * share, 12 * share]
    offloaded = memory(2, offload=True)
    assert (offloaded["gradients"], offloaded["optimizer"], offloaded["host"]) == (0, 0, 16 * share)


def test_total_is_the_device_sum():
    for table in (memory(2), memory(3, tp=2), memory(2, offload=True)):
        assert table["total"] == sum(table[k] for k in ("weights", "gradients", "optimizer", "activations"))
        assert all(isinstance(value, int) for value in table.values())


def test_tensor_parallel_divides_all_but_the_replicated():
    config = load_config("1b_4096")
    replicated = 4096 * 1536 + 16 * (4 * 1536 + 1536) + 2 * 1536
    rows = padded_vocab_size(config.model, 50257)
    sharded = count_parameters(config.model, rows) - replicated
    assert memory(2, tp=2)["weights"] == 2 * (sharded // 2 + replicated)


def test_activations_by_formula():
    tokens, h, ffn, vocab = 4096, 1536, 6144, 50304
    layer = 2 * (4 * h + 4 * h + 2 * ffn) + 2 * h
    assert memory(2)["activations"] == tokens * (16 * layer + vocab * 6)
    assert memory(2, **{"train.recompute": True})["activations"] == tokens * (16 * 2 * h + layer + vocab * 6)
    sp = memory(2, tp=2, **{"parallel.sequence_parallel": True})["activations"]
    assert sp * 2 == memory(2)["activations"]


def test_the_standard_preset_resolves():
    config = load_config("1b_4096_standard")
    assert config.model.kv_heads == 4 and config.model.position == "rope" and config.train.clip == 1.0
    assert resolve_layout(config, 8).dp == 4


def test_the_dry_run_prints_the_papers_number():
    from aah_dist.config.deepspeed import build_ds_config, read_ds_config
    from aah_dist.config.validate import resolve_layout
    from aah_dist.training.describe import plan

    config = load_config("1b_4096")
    layout = resolve_layout(config, 1)
    ds_config = build_ds_config(read_ds_config("ds_configs/zero2.json"), config, layout)
    lines = plan(config, layout, ds_config, config.model.vocab_size)
    assert "536,695,296 parameters, vocabulary 50,257" in lines[0]
    assert "one of 512, 1024, 2048, 4096 keys a head, decided every 5 steps; 1 head block" in lines[1]
