"""How a full parameter is cut into TP shards, and joined again.

Megatron splits column-parallel weights along dim 0, row-parallel ones along dim 1.  A SwiGLU first layer holds gate and
up projection one after the other (stride 2): each half is split by itself.
"""

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from torch import nn


def mark_shards(model: nn.Module, gated: bool) -> None:
    """Set Megatron's attributes (tensor_model_parallel, partition_dim, partition_stride) on every split parameter.

    Megatron sets them while it initialises weights, which this project does itself.  DeepSpeed counts a parameter in
    the gradient norm once a TP group unless it carries tensor_model_parallel, so replicated ones must not.
    """
    for name, module in model.named_modules():
        stride = 2 if gated and name.endswith("linear_fc1") else 1
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
            _mark(module.weight, 0, stride)
            _mark(getattr(module, "bias", None), 0, stride)
        elif isinstance(module, RowParallelLinear):
            _mark(module.weight, 1, stride)


def _mark(parameter: nn.Parameter | None, dim: int, stride: int) -> None:
    if parameter is None:
        return
    if not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, dim, stride)
    parameter.partition_stride = stride


def is_split(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "tensor_model_parallel", False)


def full_shape(parameter: nn.Parameter, tp_size: int) -> list[int]:
    shape = list(parameter.shape)
    if is_split(parameter):
        shape[parameter.partition_dim] *= tp_size
    return shape


def cut(full: torch.Tensor, dim: int, stride: int, rank: int, size: int) -> torch.Tensor:
    """Shard `rank` of `size` of a full tensor."""
    return torch.cat([part.chunk(size, dim)[rank] for part in full.chunk(stride, dim)], dim)


def join(shards: list[torch.Tensor], dim: int, stride: int) -> torch.Tensor:
    """The full tensor of all shards in rank order; the inverse of `cut`."""
    pieces = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([piece[part] for part in range(stride) for piece in pieces], dim)
