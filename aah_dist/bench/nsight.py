"""Executed floating-point operations of NVTX ranges on NVIDIA GPUs, by Nsight Compute (`ncu`), sm_80 and sm_90.

Two kinds of counter are summed, each with its FLOPs per unit:
- CORES: thread instructions that ran on the CUDA cores, predicated-off threads excluded.  Half-precision instructions
  (fp16 and bf16) work on pairs, as Nsight Compute's own roofline counts them.
- TENSOR: mathematical operations on the tensor cores, by source and destination type; a multiply-add is 2.
Matrix products run on the tensor cores, so figures without the second kind are not the FLOPs of attention.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aah_dist.config.errors import ConfigError

CORES = {
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": (1, "fp32 additions"),
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum": (1, "fp32 multiplications"),
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": (2, "fp32 multiply-adds"),
    "smsp__sass_thread_inst_executed_op_hadd_pred_on.sum": (2, "fp16 and bf16 additions, on pairs"),
    "smsp__sass_thread_inst_executed_op_hmul_pred_on.sum": (2, "fp16 and bf16 multiplications, on pairs"),
    "smsp__sass_thread_inst_executed_op_hfma_pred_on.sum": (4, "fp16 and bf16 multiply-adds, on pairs"),
    "smsp__sass_thread_inst_executed_op_dadd_pred_on.sum": (1, "fp64 additions"),
    "smsp__sass_thread_inst_executed_op_dmul_pred_on.sum": (1, "fp64 multiplications"),
    "smsp__sass_thread_inst_executed_op_dfma_pred_on.sum": (2, "fp64 multiply-adds"),
}
"""Metric -> (FLOPs per count, what it counts)."""

TENSOR = {
    "sm__ops_path_tensor_src_bf16_dst_fp32": "bf16 products summed in fp32",
    "sm__ops_path_tensor_src_fp16_dst_fp32": "fp16 products summed in fp32",
    "sm__ops_path_tensor_src_fp16_dst_fp16": "fp16 products summed in fp16",
    "sm__ops_path_tensor_src_tf32_dst_fp32": "tf32 products summed in fp32",
    "sm__ops_path_tensor_src_fp64": "fp64 products",
}
"""Metric without its suffix -> what it counts.  Some versions of Nsight Compute have only the two parts
_sparsity_off and _sparsity_on of a metric; they are asked for as well and summed where the whole is absent."""

# Asked for by pattern: a name that this GPU or version does not have is then no error of ncu's but an absent column.
TENSOR_PATTERN = "regex:^sm__ops_path_tensor_src_(bf16|fp16|tf32|fp64)(_dst_fp(32|16))?(_sparsity_(off|on))?"
BF16 = "sm__ops_path_tensor_src_bf16_dst_fp32"

_RANGE_COLUMN = "Start/Stop_Range"
_RANGE = re.compile(r"<default domain>:([^:]+):")


@dataclass(frozen=True)
class Count:
    """What the kernels of one range executed."""

    kernels: int
    cores: float
    tensor: float

    @property
    def flops(self) -> float:
        return self.cores + self.tensor


def missing() -> str | None:
    """Why Nsight Compute cannot be run here, or None."""
    if shutil.which("ncu") is None:
        return "ncu was not found; install Nsight Compute, which is part of the CUDA toolkit."
    return None


def command(ranges: Iterable[str], program: Sequence[str], log: str) -> list[str]:
    """The ncu command line that counts `program`'s kernels inside these NVTX start/end ranges and writes `log`."""
    include = [word for name in ranges for word in ("--nvtx-include", name)]
    return ["ncu", "--target-processes", "all", "--nvtx", *include, "--replay-mode", "kernel",
            "--clock-control", "none", "--cache-control", "none", "--metrics", ",".join([*CORES, TENSOR_PATTERN]),
            "--csv", "--page", "raw", "--print-units", "base", "--log-file", log, *program]


def counts(text: str, ranges: Iterable[str], tensor_dtype: str = BF16) -> dict[str, Count]:
    """FLOPs by range, from the raw page in CSV form: names, units, then a row for each kernel.

    tensor_dtype: the tensor metric that must be there and above 0 in every range, because the work is of that type.
    Raises ConfigError when the page has another form, lacks a metric, or has no such tensor operations in a range.
    """
    names, units, rows = _table(text)
    columns = [n for n in names if _RANGE_COLUMN in n]
    if not columns:
        raise ConfigError("Nsight Compute's output names no NVTX ranges; run it with --nvtx and --nvtx-include.")
    wanted = set(ranges)
    found: dict[str, list[dict[str, str]]] = {name: [] for name in ranges}
    for row in rows:
        inside = wanted & {name for column in columns for name in _RANGE.findall(row[column])}
        if len(inside) != 1:
            raise ConfigError(f"kernel {row.get('Kernel Name', '?')} is in {len(inside)} of the counted NVTX ranges; "
                              "each must be in one.")
        found[inside.pop()].append(row)
    cores, tensor = _cores(names), _tensor(names)
    if tensor_dtype not in tensor:
        raise ConfigError(f"Nsight Compute's output has no {tensor_dtype}.sum; without the tensor-core pipe the "
                          "figures are not FLOPs, so none are given.")
    for name in (*cores, *(name for group in tensor.values() for name in group)):
        if units[name] not in ("", "inst", "op", "ops"):
            raise ConfigError(f"Nsight Compute gives {name} in {units[name]!r}; run it with --print-units base, which "
                              "gives counts.")
    return {name: _count(name, kernels, cores, tensor, tensor_dtype) for name, kernels in found.items()}


def _table(text: str) -> tuple[list[str], dict[str, str], list[dict[str, str]]]:
    lines = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(lines) < 3 or lines[0][0] != "ID" or "Metric Name" in lines[0]:
        raise ConfigError("this is no raw page of Nsight Compute with kernels in it; run ncu with --csv --page raw, "
                          "and see its log for errors such as ERR_NVGPUCTRPERM (no permission to read counters).")
    names, units = lines[0], lines[1]
    if any(len(line) != len(names) for line in lines):
        raise ConfigError("Nsight Compute's output has rows of unequal length; it is cut short.")
    return names, dict(zip(names, units, strict=True)), [dict(zip(names, line, strict=True)) for line in lines[2:]]


def _cores(names: list[str]) -> dict[str, int]:
    absent = [name for name in CORES if name not in names]
    if absent:
        raise ConfigError(f"Nsight Compute's output lacks {', '.join(absent)}; it must be run with the metrics of "
                          "bench/nsight.py.")
    return {name: weight for name, (weight, _) in CORES.items()}


def _tensor(names: list[str]) -> dict[str, list[str]]:
    """For each tensor metric that is there, the columns that make it up: the whole, or its parts."""
    found = {}
    for metric in TENSOR:
        parts = [f"{metric}_sparsity_{part}.sum" for part in ("off", "on")]
        columns = [f"{metric}.sum"] if f"{metric}.sum" in names else [part for part in parts if part in names]
        if columns:
            found[metric] = columns
    return found


def _count(name: str, kernels: list[dict[str, str]], cores: dict[str, int], tensor: dict[str, list[str]],
           tensor_dtype: str) -> Count:
    if not kernels:
        raise ConfigError(f"Nsight Compute saw no kernel in range {name}; its figure would be 0, so none are given.")
    by_type = {metric: sum(_number(kernel, column) for kernel in kernels for column in columns)
               for metric, columns in tensor.items()}
    if by_type[tensor_dtype] == 0:
        raise ConfigError(f"range {name}: {tensor_dtype}.sum is 0 over {len(kernels)} kernels, though it forms matrix "
                          "products of that type; this counter does not see them on this GPU, so no figures are given.")
    on_cores = sum(weight * _number(kernel, metric) for kernel in kernels for metric, weight in cores.items())
    return Count(len(kernels), on_cores, sum(by_type.values()))


def _number(row: dict[str, str], column: str) -> float:
    try:
        return float(row[column].replace(",", ""))
    except ValueError:
        raise ConfigError(f"kernel {row.get('Kernel Name', '?')} has {row[column]!r} for {column}; a number is "
                          "needed.") from None
