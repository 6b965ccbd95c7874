"""Initial weights that depend on the seed and the parameter's name, not on the layout.

Every rank draws each full parameter from a generator of its own and keeps its shard, so the same seed gives the same
model at every TP size.  Padding rows of the vocabulary come from a second generator: they change no other weight.
"""

import hashlib
import math

import torch
from torch import nn

from aah_dist.config.schema import ModelConfig
from aah_dist.model.shards import cut, full_shape, is_split


def initialize(model: nn.Module, config: ModelConfig, vocab_size: int, seed: int, tp_rank: int, tp_size: int) -> None:
    """Draw all weights in fp32 and round them to the parameters' dtype.

    paper: PyTorch's defaults, embeddings N(0, 1), linear weights and biases U(-a, a) with a = 1/sqrt(fan in).
    standard: normal 0.02, output projections of attention and MLP scaled by 1/sqrt(2 layers), biases 0.
    Norm weights are 1 and norm biases 0 in both.
    """
    shapes = {name: full_shape(parameter, tp_size) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = _draw(name, shapes, config, vocab_size, seed)
            if is_split(parameter):
                full = cut(full, parameter.partition_dim, parameter.partition_stride, tp_rank, tp_size)
            parameter.copy_(full)


def _draw(name: str, shapes: dict[str, list[int]], config: ModelConfig, vocab_size: int, seed: int) -> torch.Tensor:
    shape = shapes[name]
    if "layernorm" in name:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        known = _sample(name, [vocab_size, shape[1]], shapes, config, seed)
        padding = _sample(name, [shape[0] - vocab_size, shape[1]], shapes, config, seed, purpose="padding")
        return torch.cat([known, padding])
    return _sample(name, shape, shapes, config, seed)


def _sample(name: str, shape: list[int], shapes: dict[str, list[int]], config: ModelConfig, seed: int,
            purpose: str = "") -> torch.Tensor:
    source = _generator(seed, name + purpose)
    embedding = name.startswith("embedding.")
    if config.init == "paper":
        if embedding:
            return torch.empty(shape).normal_(generator=source)
        fan_in = shapes[name.removesuffix("bias") + "weight" if name.endswith("bias") else name][1]
        bound = 1 / math.sqrt(fan_in)
        return torch.empty(shape).uniform_(-bound, bound, generator=source)
    if name.endswith("bias"):
        return torch.zeros(shape)
    residual_output = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    std = 0.02 / math.sqrt(2 * config.num_layers) if residual_output else 0.02
    return torch.empty(shape).normal_(0.0, std, generator=source)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
