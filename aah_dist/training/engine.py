"""The DeepSpeed engine around a Megatron model: ZeRO holds the optimizer state."""

import os

import torch
import torch.distributed as dist
from torch import nn

from aah_dist.config.schema import ConfigError, TrainConfig
from aah_dist.model.shards import is_split
from aah_dist.parallel.gradients import FiniteWatch, install_tp_gradient_sum
from aah_dist.parallel.topology import DeepSpeedMPU


def refuse_code_in_checkpoints() -> None:
    """Make every torch.load of this process, DeepSpeed's own too, refuse anything but tensors and plain values."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


def parameter_groups(model: nn.Module, train: TrainConfig) -> list[dict]:
    """AdamW groups of the recipe: all parameters decay (the paper), or only matrices."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if train.decay == "all":
        return [{"params": trainable, "weight_decay": train.weight_decay}]
    matrices = [p for p in trainable if p.dim() > 1]
    vectors = [p for p in trainable if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_engine(model: nn.Module, ds_config: dict, train: TrainConfig, mpu: DeepSpeedMPU,
                 device: torch.device) -> tuple["object", FiniteWatch]:
    """The engine, and the watch that saw every gradient before anything summed it."""
    import deepspeed

    watch = FiniteWatch(model, device)
    install_tp_gradient_sum(model, mpu.get_tensor_model_parallel_group())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model, train), config=ds_config,
                                      mpu=mpu, dist_init_required=False)
    return engine, watch


def check_engine_config(ds_config: dict) -> None:
    """Let DeepSpeed's own schemas read the sections whose types only they know.

    Raises: ConfigError naming the key, the value and what DeepSpeed says of it.
    """
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    for section, schema in (("zero_optimization", DeepSpeedZeroConfig), ("bf16", DeepSpeedBF16Config)):
        try:
            schema(**ds_config.get(section, {}))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in (section, *first["loc"]))
            raise ConfigError(f"ds_config {key} is {first['input']!r}: {first['msg']}.") from None


def set_learning_rate(engine: object, value: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = value


def gradient_norm(engine: object, mpu: DeepSpeedMPU) -> float:
    """Norm of the whole model's gradient, each parameter counted once.

    After step() at ZeRO 1 to 3; before it at stage 0, where DeepSpeed reports none and keeps the gradients.
    """
    if engine.zero_optimization_stage() > 0:
        return float(engine.get_global_grad_norm())
    group = mpu.get_tensor_model_parallel_group()
    split = torch.zeros((), device=engine.device, dtype=torch.float64)
    replicated = torch.zeros_like(split)
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            square = parameter.grad.double().square().sum()
            if is_split(parameter):
                split += square
            else:
                replicated += square
    dist.all_reduce(split, group=group)
    return float((split + replicated).sqrt())
