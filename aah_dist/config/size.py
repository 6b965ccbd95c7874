"""Parameters and memory of a configuration, computed without building the model."""

from __future__ import annotations

from typing import Dict, Tuple

from aah_dist.config.schema import ModelConfig, RunConfig

ACTIVATION_FORMULA = (
    "activations = b T x [layers x e x (4 h / s + (2 q + 2 kv + m ffn) / tp) + vocabulary / tp x (e + 4)], with "
    "dropout 2 h / s more per layer; e bytes an element, q and kv the widths of queries and keys, m 2 (gelu) or 3 "
    "(swiglu), s TP under sequence parallelism else 1; with recompute e x h / s a layer plus one whole layer; "
    "attention probabilities, communication buffers and the allocator's overhead are not counted")


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the whole model with `vocab_size` embedding rows; padding rows are not counted."""
    sharded, replicated = _parameters(model, vocab_size)
    return sharded + replicated


def padded_vocab_size(model: ModelConfig, vocab_size: int) -> int:
    """Embedding rows: vocab_size rounded up to model.vocab_multiple."""
    return -(-vocab_size // model.vocab_multiple) * model.vocab_multiple


def memory_per_rank(config: RunConfig, layout, zero_stage: int, precision: str, offload: bool,
                    vocab_size: int) -> Dict[str, int]:
    """Estimated bytes of one rank: weights, gradients, optimizer (fp32 master weights and moments), activations, total
    on the device, and host (offloaded optimizer state).  ACTIVATION_FORMULA states the last estimate.
    """
    sharded, replicated = _parameters(config.model, padded_vocab_size(config.model, vocab_size))
    parameters = sharded // layout.tp + replicated
    share = -(-parameters // layout.dp)
    element = 2 if precision == "bf16" else 4
    weights = element * (share if zero_stage == 3 else parameters)
    if zero_stage >= 2:
        gradients = 4 * share
    else:
        # bf16 at stage 1 holds each micro batch's bf16 gradients beside the fp32 accumulator.
        gradients = (4 + 2 * (precision == "bf16")) * parameters
    # ZeRO keeps an fp32 master copy of its share of an fp32 model as well.
    optimizer = 12 * share if zero_stage else 8 * parameters
    host = 0
    if offload:
        host = optimizer + gradients if zero_stage >= 2 else optimizer
        gradients = 0 if zero_stage >= 2 else gradients
        optimizer = 0
    activations = _activations(config, layout.tp, element, vocab_size)
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "activations": activations,
            "total": weights + gradients + optimizer + activations, "host": host}


def _parameters(model: ModelConfig, vocab_rows: int) -> Tuple[int, int]:
    """(divided over TP ranks, replicated on each)."""
    h, ffn = model.hidden_size, model.ffn_size
    ffn_in = 2 * ffn if model.activation == "swiglu" else ffn
    norm = 2 if model.norm == "layernorm" else 1
    sharded_layer = h * (2 * h + 2 * model.kv_heads * model.head_dim) + h * ffn_in + ffn * h + ffn_in * model.mlp_bias
    replicated_layer = 2 * norm * h + h * model.mlp_bias + 2 * model.head_dim * model.qk_norm
    embeddings = vocab_rows * h * (1 if model.tied_embeddings else 2)
    positions = model.positions * h if model.position == "learned" else 0
    return (embeddings + model.num_layers * sharded_layer,
            positions + model.num_layers * replicated_layer + norm * h)


def _activations(config: RunConfig, tp: int, element: int, vocab_size: int) -> int:
    model = config.model
    tokens = config.train.micro_batch_size * model.seq_length
    split = tp if config.parallel.sequence_parallel else 1
    h = model.hidden_size
    # Whole on each TP rank: inputs of both norms, of the QKV and of the MLP product. Divided: queries, keys, values,
    # attention output, and what the MLP's inner layer keeps.
    inner = (3 if model.activation == "swiglu" else 2) * model.ffn_size
    layer = element * (4 * h / split + (2 * h + 2 * model.kv_heads * model.head_dim + inner) / tp)
    if model.dropout:
        layer += 2 * h / split
    layers = model.num_layers * layer
    if config.train.recompute:
        layers = model.num_layers * element * h / split + layer
    logits = padded_vocab_size(model, vocab_size) / tp * (element + 4)
    return int(tokens * (layers + logits))
