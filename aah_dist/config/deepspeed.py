"""The DeepSpeed JSON: read, checked against the run configuration, and completed from it.

The JSON holds engine matters (ZeRO, precision, offload, communication).  Batch sizes, optimizer and clipping are the
run configuration's and are injected; a value that both give must be the same.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple, Union

from aah_dist.config.ds_keys import NESTED_KEYS, REFUSED_KEYS, TOP_LEVEL_KEYS
from aah_dist.config.nearest import nearest
from aah_dist.config.schema import ConfigError, RunConfig

REPOSITORY = Path(__file__).resolve().parents[2]
NEVER_PRINT = 2**31 - 1
DsConfig = Dict[str, Any]


def find_ds_config(name: Union[str, Path]) -> Path:
    """The file `name`, looked for from the working directory, then from the repository."""
    for path in (Path(name), REPOSITORY / name):
        if path.is_file():
            return path
    known = [f"ds_configs/{path.name}" for path in (REPOSITORY / "ds_configs").glob("*.json")]
    raise ConfigError(f"ds_config {name} does not exist; {nearest(str(name), known)}.")


def read_ds_config(name: Union[str, Path]) -> DsConfig:
    """The JSON object in a file.  Raises ConfigError for a missing file, invalid JSON or a key given twice."""
    path = find_ds_config(name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except ConfigError as error:
        raise ConfigError(f"ds_config {path} {error}") from None
    except ValueError as error:
        raise ConfigError(f"ds_config {path} is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"ds_config {path} holds {type(values).__name__}; it must hold an object ({{...}}).")
    return values


def _without_duplicates(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"gives {name} twice; keep one.")
    return dict(pairs)


def precision(ds: Mapping[str, Any]) -> str:
    """bf16 or fp32: the type of weights and activations."""
    return "bf16" if _section(ds, "bf16").get("enabled", False) else "fp32"


def zero_stage(ds: Mapping[str, Any]) -> int:
    """ZeRO stage, 0 to 3."""
    return _section(ds, "zero_optimization").get("stage", 0)


def offloads_optimizer(ds: Mapping[str, Any]) -> bool:
    """Whether the optimizer state lives in host memory."""
    device = (_section(ds, "zero_optimization").get("offload_optimizer") or {}).get("device", "none")
    return device != "none"


def build_ds_config(ds: Mapping[str, Any], config: RunConfig, layout: Any) -> DsConfig:
    """The configuration handed to deepspeed.initialize: `ds` completed from `config` and its Layout.

    Raises ConfigError for unknown keys, settings that cannot work here, and values that contradict `config`.
    `ds` is not changed.
    """
    built = copy.deepcopy(dict(ds))
    _check_keys(built)
    _check_precision(built)
    train = config.train
    _inject(built, "train_batch_size", train.global_batch_size, "train.global_batch_size")
    _inject(built, "train_micro_batch_size_per_gpu", train.micro_batch_size, "train.micro_batch_size")
    _inject(built, "gradient_accumulation_steps", layout.accumulation, "the run configuration's accumulation")
    _inject(built, "gradient_clipping", train.clip, "train.clip")
    _inject_optimizer(built, config)
    if precision(built) == "bf16":
        # Without these DeepSpeed accumulates micro batches in bf16, and rounds an fp32 accumulator to bf16 to send it.
        built.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        built.setdefault("communication_data_type", "fp32")
    # The project's own log lines replace DeepSpeed's; its breakdown synchronises the device at every step.
    built.setdefault("steps_per_print", NEVER_PRINT)
    built.setdefault("wall_clock_breakdown", False)
    return built


def _inject(target: DsConfig, key: str, value: Any, field: str, prefix: str = "") -> None:
    given = target.get(key, "auto")
    if given != "auto" and given != value:
        raise ConfigError(f"ds_config {prefix}{key} is {given} but {field} is {value}; "
                          f"leave {prefix}{key} out of the JSON, or make them equal.")
    target[key] = value


def _inject_optimizer(built: DsConfig, config: RunConfig) -> None:
    optimizer = _section(built, "optimizer")
    name = optimizer.get("type", "AdamW")
    if str(name).lower() != "adamw":
        raise ConfigError(f"ds_config optimizer.type is {name}; it must be AdamW, or left out.")
    params = dict(_section(optimizer, "params", "optimizer."))
    train = config.train
    _inject(params, "lr", train.lr, "train.lr", "optimizer.params.")
    _inject(params, "betas", [train.beta1, train.beta2], "[train.beta1, train.beta2]", "optimizer.params.")
    _inject(params, "eps", train.eps, "train.eps", "optimizer.params.")
    _inject(params, "weight_decay", train.weight_decay, "train.weight_decay", "optimizer.params.")
    if not offloads_optimizer(built):
        # DeepSpeed's own FusedAdam would be compiled at the first start; torch's gives the same losses. Offloaded
        # state needs DeepSpeedCPUAdam.
        params.setdefault("torch_adam", True)
    built["optimizer"] = {**optimizer, "type": "AdamW", "params": params}


def _check_keys(ds: DsConfig) -> None:
    for key in ds:
        if key in REFUSED_KEYS:
            raise ConfigError(f"ds_config {key} cannot be used: {REFUSED_KEYS[key]}.")
        if key not in TOP_LEVEL_KEYS:
            raise ConfigError(f"ds_config {key} is not a DeepSpeed setting; {nearest(key, TOP_LEVEL_KEYS)}.")
    for section, known in NESTED_KEYS.items():
        for key in _section(ds, section):
            if key not in known:
                raise ConfigError(f"ds_config {section}.{key} is not a DeepSpeed setting; {nearest(key, known)}.")
    stage = zero_stage(ds)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"ds_config zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3.")
    # The loss is scaled for averaging: sum over valid tokens x DP / global count.
    if str(ds.get("gradient_allreduce_op", "mean")).lower() != "mean":
        raise ConfigError(f"ds_config gradient_allreduce_op is {ds['gradient_allreduce_op']}; it must be mean.")


def _check_precision(ds: DsConfig) -> None:
    for key in ("bf16", "fp16"):
        enabled = _section(ds, key).get("enabled", False)
        if not isinstance(enabled, bool):
            raise ConfigError(f"ds_config {key}.enabled is {enabled!r}; it must be true or false.")
    offload = _section(_section(ds, "zero_optimization"), "offload_optimizer", "zero_optimization.")
    if offload.get("device") == "nvme" and not offload.get("nvme_path"):
        raise ConfigError("ds_config zero_optimization.offload_optimizer.device is nvme, which needs an nvme_path; or "
                          "offload to cpu.")
    if _section(ds, "fp16").get("enabled", False):
        raise ConfigError("ds_config fp16.enabled is true, which is not supported; enable bf16 instead.")
    bf16 = _section(ds, "bf16")
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if bf16.get(key, False):
            raise ConfigError(f"ds_config bf16.{key} is true; leave it out, master weights and moments are fp32.")
    # DeepSpeed's bf16 optimizer for stage 0 neither reduces the gradient norm over TP nor accumulates in fp32.
    if precision(ds) == "bf16" and zero_stage(ds) == 0:
        raise ConfigError("ds_config enables bf16 with zero_optimization.stage 0, where the gradient norm is not "
                          "reduced over tensor-parallel ranks and gradients cannot accumulate in fp32; use stage 1, 2 "
                          "or 3.")


def _section(ds: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    value = ds.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"ds_config {prefix}{key} is {value!r}; it must be an object ({{...}}).")
    return value
