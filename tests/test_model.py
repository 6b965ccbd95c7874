"""The Megatron model against the same model in plain PyTorch, weight by weight, on one rank."""

import dataclasses

import numpy as np
import pytest
import torch

from aah_dist.bench.plain import PlainGPT
from aah_dist.config.schema import ModelConfig
from aah_dist.config.size import count_parameters
from aah_dist.model.context import ATTENTION, EMBEDDING, StepContext, dropout_keys
from aah_dist.parallel import device as devices
from aah_dist.parallel import launch, topology

VOCABULARY = 37
CPU = torch.device("cpu")
SMALL = ModelConfig(num_layers=2, hidden_size=24, num_heads=4, seq_length=11, vocab_multiple=16)
PAPER = dataclasses.replace(SMALL, init="paper")
STANDARD = dataclasses.replace(SMALL, position="rope", norm="rmsnorm", activation="swiglu", mlp_bias=False,
                               num_kv_heads=2, tied_embeddings=False, qk_norm=True, ffn_hidden_size=40)
ONE_HEAD = dataclasses.replace(SMALL, num_heads=1, seq_length=1)
MQA = dataclasses.replace(STANDARD, num_kv_heads=1, tied_embeddings=True)
MODELS = {"small": SMALL, "paper": PAPER, "standard": STANDARD, "one-head": ONE_HEAD, "mqa": MQA,
          "qk-layernorm": dataclasses.replace(SMALL, qk_norm=True)}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    from megatron.core import parallel_state

    launch._export(0, 1, 0, 1, "127.0.0.1", launch.free_port())
    launch.form_process_group("gloo", 1.0)
    topology.form_groups(1, 1.0)
    devices.make_portable(CPU, 0)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def build(model: ModelConfig, windows: np.ndarray, *, seed: int = 5, recompute: bool = False,
          dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY):
    from aah_dist.model.gpt import build_gpt

    context = StepContext(seed=seed, windows=windows)
    return build_gpt(model, vocabulary, context, tp_rank=0, tp_size=1, sequence_parallel=False, recompute=recompute,
                     dtype=dtype, seed=seed, device=CPU), context


def full(model: ModelConfig) -> np.ndarray:
    return np.full((model.num_layers, model.num_heads), model.seq_length)


def mixed(model: ModelConfig) -> np.ndarray:
    cycle = [1, 3, model.seq_length, 7]
    layers, heads = range(model.num_layers), range(model.num_heads)
    return np.array([[cycle[(layer + head) % 4] for head in heads] for layer in layers])


def batch(model: ModelConfig, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    block = torch.randint(0, vocabulary, (3, model.seq_length + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(model.seq_length).expand(3, -1)
    return block[:, :-1].contiguous(), positions, block[:, 1:].contiguous()


def plain_names(model: ModelConfig, gpt: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Megatron's tensors under the plain model's names: qkv is stored group by group, each its queries, k, v."""
    state = dict(gpt.named_parameters())
    named = {"tokens.weight": state["embedding.word_embeddings.weight"][:VOCABULARY],
             "norm.weight": state["decoder.final_layernorm.weight"]}
    if model.position == "learned":
        named["positions.weight"] = state["embedding.position_embeddings.weight"]
    if not model.tied_embeddings:
        named["output.weight"] = state["output_layer.weight"][:VOCABULARY]
    if model.norm == "layernorm":
        named["norm.bias"] = state["decoder.final_layernorm.bias"]
    queries, d = model.num_heads // model.kv_heads, model.head_dim
    for layer in range(model.num_layers):
        theirs, ours = f"decoder.layers.{layer}.", f"blocks.{layer}."
        groups = state[theirs + "self_attention.linear_qkv.weight"].unflatten(0, (model.kv_heads, queries + 2, d))
        named[ours + "attention.q.weight"] = groups[:, :queries].flatten(0, 2)
        named[ours + "attention.k.weight"] = groups[:, queries].flatten(0, 1)
        named[ours + "attention.v.weight"] = groups[:, queries + 1].flatten(0, 1)
        named[ours + "attention.proj.weight"] = state[theirs + "self_attention.linear_proj.weight"]
        pairs = {"norm1": "input_layernorm", "norm2": "pre_mlp_layernorm",
                 "fc1": "mlp.linear_fc1", "fc2": "mlp.linear_fc2",
                 "attention.q_norm": "self_attention.q_layernorm", "attention.k_norm": "self_attention.k_layernorm"}
        for name, original in pairs.items():
            for kind in ("weight", "bias"):
                if f"{theirs}{original}.{kind}" in state:
                    named[f"{ours}{name}.{kind}"] = state[f"{theirs}{original}.{kind}"]
    return named


@pytest.mark.parametrize("windowed", [False, True], ids=["full", "windowed"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_the_plain_model(name: str, windowed: bool):
    model = MODELS[name]
    windows = mixed(model) if windowed else full(model)
    gpt, _ = build(model, windows)
    plain = PlainGPT(model, VOCABULARY)
    plain.load_state_dict({k: v.detach() for k, v in plain_names(model, gpt).items()}, strict=True)
    tokens, positions, labels = batch(model)

    ours = gpt(tokens, positions, None, labels=labels)
    theirs = plain(tokens, labels, torch.from_numpy(windows) if windowed else None)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)

    ours.mean().backward()
    theirs.mean().backward()
    gradients = dict(gpt.named_parameters())
    for parameter in gradients.values():
        parameter.data = parameter.grad
    for key, gradient in plain_names(model, gpt).items():
        expected = plain.get_parameter(key).grad
        floor = 1e-6 + 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(gradient.detach(), expected, rtol=1e-4, atol=floor)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_as_built(name: str):
    gpt, _ = build(MODELS[name], full(MODELS[name]))
    padding = -VOCABULARY % 16 * MODELS[name].hidden_size * (1 if MODELS[name].tied_embeddings else 2)
    assert sum(p.numel() for p in gpt.parameters()) - padding == count_parameters(MODELS[name], VOCABULARY)


def test_only_the_mlp_has_linear_biases():
    gpt, _ = build(PAPER, full(PAPER))
    biased = {name for name, _ in gpt.named_parameters() if name.endswith("bias") and "layernorm" not in name}
    assert biased == {f"decoder.layers.{layer}.mlp.linear_fc{i}.bias" for layer in range(2) for i in (1, 2)}


def test_the_vocabulary_multiple_changes_neither_loss_nor_weights():
    tokens, positions, labels = batch(SMALL)
    losses = []
    for multiple in (1, 16, 128):
        gpt, _ = build(dataclasses.replace(SMALL, vocab_multiple=multiple), full(SMALL))
        assert gpt.embedding.word_embeddings.weight.shape[0] == -(-VOCABULARY // multiple) * multiple
        losses.append(gpt(tokens, positions, None, labels=labels))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-6, atol=1e-6)


def test_paper_initialisation():
    model = dataclasses.replace(PAPER, hidden_size=128, seq_length=64)
    gpt, _ = build(model, full(model), vocabulary=1000)
    weights = dict(gpt.named_parameters())
    assert abs(float(weights["embedding.word_embeddings.weight"].std()) - 1) < 0.02
    assert abs(float(weights["embedding.position_embeddings.weight"].std()) - 1) < 0.05
    for name, fan_in in (("self_attention.linear_qkv.weight", 128), ("mlp.linear_fc1.bias", 128),
                         ("mlp.linear_fc2.weight", 512), ("mlp.linear_fc2.bias", 512)):
        bound = fan_in ** -0.5
        largest = float(weights[f"decoder.layers.1.{name}"].abs().max())
        assert 0.95 * bound < largest <= bound, name


def test_standard_initialisation_scales_residual_outputs():
    model = dataclasses.replace(SMALL, hidden_size=128, num_layers=8)
    gpt, _ = build(model, full(model))
    weights = dict(gpt.named_parameters())
    assert abs(float(weights["decoder.layers.0.mlp.linear_fc1.weight"].std()) - 0.02) < 5e-4
    for name in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
        assert abs(float(weights[f"decoder.layers.0.{name}"].std()) - 0.02 / 4) < 2e-4


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
def test_dropout_is_a_function_of_step_and_sample(recompute: bool):
    model = dataclasses.replace(SMALL, dropout=0.3)
    gpt, context = build(model, mixed(model), recompute=recompute)
    tokens, positions, labels = batch(model)

    def loss(step: int, samples: list[int], rows: list[int]) -> torch.Tensor:
        context.step, context.samples = step, samples
        return gpt(tokens[rows], positions[rows], None, labels=labels[rows])

    whole = loss(4, [8, 9, 10], [0, 1, 2])
    torch.testing.assert_close(loss(4, [8, 9, 10], [0, 1, 2]), whole, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([loss(4, [10], [2]), loss(4, [8, 9], [0, 1])]), whole[[2, 0, 1]],
                               rtol=1e-5, atol=1e-5)
    assert float((loss(5, [8, 9, 10], [0, 1, 2]) - whole).detach().abs().max()) > 1e-3
    gpt.eval()
    assert float((loss(4, [8, 9, 10], [0, 1, 2]) - whole).detach().abs().max()) > 1e-3


def test_recomputation_gives_the_same_gradients():
    model = dataclasses.replace(SMALL, dropout=0.2)
    tokens, positions, labels = batch(model)
    gradients = []
    for recompute in (False, True):
        gpt, context = build(model, mixed(model), recompute=recompute)
        context.step, context.samples = 3, [1, 2, 3]
        gpt(tokens, positions, None, labels=labels).sum().backward()
        gradients.append({name: p.grad for name, p in gpt.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6)


def test_bf16_products_are_formed_in_fp32_where_the_cpu_has_none(monkeypatch):
    from aah_dist.model import linear

    monkeypatch.setattr(linear, "has_bf16_products", lambda device: False)
    gpt, _ = build(SMALL, full(SMALL), dtype=torch.bfloat16)
    x = torch.randn(5, 2, 24, dtype=torch.bfloat16, requires_grad=True)
    layer = gpt.decoder.layers[0].mlp.linear_fc1
    y, bias = layer(x)
    w = layer.weight
    exact = x.double() @ w.double().t()
    assert bias is not None and y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2 ** -8, atol=1e-6)
    g = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    torch.testing.assert_close(dx.double(), g.double() @ w.double(), rtol=2 ** -8, atol=1e-5)
    exact = g.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    torch.testing.assert_close(dw.double(), exact, rtol=2 ** -8, atol=1e-4)


def test_statistics_sink_sees_every_layer_once():
    class Sink:
        def __init__(self):
            self.seen = []

        def write(self, layer, q, k, v, out, windows, scale):
            self.seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(out.shape)))

    gpt, context = build(STANDARD, full(STANDARD))
    tokens, positions, labels = batch(STANDARD)
    context.statistics = Sink()
    gpt(tokens, positions, None, labels=labels)
    assert context.statistics.seen == [(layer, (3, 4, 11, 6), (3, 2, 11, 6), (3, 4, 11, 6)) for layer in range(2)]


def test_dropout_keys_differ_in_every_part():
    heads = np.arange(2)

    def keys(seed=1, step=2, samples=(3, 4), layer=5, site=ATTENTION):
        context = StepContext(seed=seed, windows=np.ones((1, 1)), step=step, samples=list(samples))
        return dropout_keys(context, layer, site, heads)

    base = keys()
    assert base.shape == (2, 2) and base.dtype == np.int64 and (base >= 0).all() and len(set(base.flat)) == 4
    for other in (keys(seed=2), keys(step=3), keys(layer=6), keys(site=EMBEDDING), keys(samples=(5, 6))):
        assert not set(base.flat) & set(other.flat)
    assert (keys(samples=(4, 3)) == base[::-1]).all()
