"""What has to happen to gradients between autograd and ZeRO.

Megatron sums the gradients of some replicated parameters over the TP group in finalize_model_grads, which DeepSpeed
never calls.  Without it the norms' gradients are 76 % off under sequence parallelism, and those of the per-head
query and key norms 110 % off without it, while the loss hardly moves.  Hooks on the parameters do it here; they are
installed before deepspeed.initialize so that ZeRO sees summed gradients.
"""

import torch
import torch.distributed as dist
from torch import nn


def is_partial_over_tp(parameter: nn.Parameter) -> bool:
    """Replicated over TP, but each rank's gradient covers only its sequence shard or its own heads."""
    return getattr(parameter, "sequence_parallel", False) or getattr(parameter, "fed_by_local_heads", False)


def install_tp_gradient_sum(model: nn.Module, group: dist.ProcessGroup) -> int:
    """Sum partial gradients over the TP group as they appear; returns how many parameters are concerned."""
    if dist.get_world_size(group) == 1:
        return 0

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        # In fp32: the sum of two bf16 halves would otherwise be rounded once more than at TP 1.
        total = gradient.float().contiguous()
        if total is gradient:
            total = total.clone()
        dist.all_reduce(total, group=group)
        return total.to(gradient.dtype)

    concerned = [p for p in model.parameters() if p.requires_grad and is_partial_over_tp(p)]
    for parameter in concerned:
        parameter.register_hook(summed)
    return len(concerned)


class FiniteWatch:
    """Remembers, on the device, whether every gradient since `reset` was finite on this rank.

    One reduction a parameter and backward pass, read once a step: a NaN or Inf is seen, with the rank it came from,
    before the optimizer has run, at every ZeRO stage.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._look)

    def _look(self, gradient: torch.Tensor) -> None:
        # The fp32 sum is finite exactly when all entries are, unless it overflows itself, which is no healthy step.
        self._finite &= gradient.sum(dtype=torch.float32).isfinite()

    def reset(self) -> None:
        self._finite.fill_(True)

    @property
    def finite(self) -> torch.Tensor:
        """Bool tensor of no dimensions, on the device."""
        return self._finite
