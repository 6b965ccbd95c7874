"""Megatron's tensor-parallel linear layers, with fp32 products from bf16 operands where the CPU has no bf16 ones.

A CPU without bf16 matrix instructions takes 14 to 46 times as long for a bf16 product as for an fp32 one.  Forming
the product in fp32 from bf16 operands, as tensor cores do, costs what fp32 costs; only the result is rounded to bf16.
"""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from aah_dist.parallel.device import has_bf16_products


class _Fp32Product(torch.autograd.Function):
    """y = x w^T with bf16 x [..., n], w [m, n]; all three products of forward and backward formed in fp32."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x.float() @ w.float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, w = ctx.saved_tensors
        grad = grad.float()
        dx = (grad @ w.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = (grad.flatten(0, -2).t() @ x.float().flatten(0, -2)).to(w.dtype)
        return dx, dw


def _in_fp32(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and not has_bf16_products(weight.device)


class ColumnLinear(ColumnParallelLinear):
    """Output features split over TP."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None,
                      allreduce_dgrad: bool, sequence_parallel: bool, **rest: object) -> torch.Tensor:
        if not _in_fp32(weight):
            return super()._forward_impl(input=input, weight=weight, bias=bias, allreduce_dgrad=allreduce_dgrad,
                                         sequence_parallel=sequence_parallel, **rest)
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input)
        out = _Fp32Product.apply(input, weight)
        return out if bias is None else out + bias


class RowLinear(RowParallelLinear):
    """Input features split over TP; the sum over TP follows in Megatron's forward."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **rest: object) -> torch.Tensor:
        if not _in_fp32(weight):
            return super()._forward_impl(input=input, weight=weight, **rest)
        return _Fp32Product.apply(input, weight)


class BiaslessColumnLinear(ColumnLinear):
    """The qkv projection: Megatron's one switch for biases would give it one together with the MLP."""

    def __init__(self, *args: object, bias: bool = False, **kwargs: object) -> None:
        super().__init__(*args, bias=False, **kwargs)


class BiaslessRowLinear(RowLinear):
    """The output projection of attention, without a bias whatever the MLP has."""

    def __init__(self, *args: object, bias: bool = False, **kwargs: object) -> None:
        super().__init__(*args, bias=False, **kwargs)
