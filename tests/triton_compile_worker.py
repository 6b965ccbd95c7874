"""Compile the triton backend's kernels for GPUs that need not be there; prints what ptxas reports of each, as JSON."""

import contextlib
import io
import json
import re

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aah_dist.attention import triton_kernels
from aah_dist.attention.triton_attention import launch_of, padded

FP32, INT32 = ("log_sums", "deltas"), ("plan", "keys")
COUNTS = ("B", "H", "group", "T", "limit")
DIVISIBLE = [["tt.divisibility", 16]]


def report(capability: int, name: str, size: int, dropout: bool, ones: tuple[str, ...]) -> dict:
    """Registers, spilled bytes and shared memory of one kernel for bf16.

    ones: the counts that are 1, which Triton compiles in.  Other integers, and addresses, are taken as multiples of
    16 where they are in practice.
    """
    kernel, launch = getattr(triton_kernels, name), launch_of(name, torch.bfloat16, size)
    constants = {"SIZE": size, "BLOCK_D": padded(size), "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
                 "DROPOUT": dropout, **dict.fromkeys(ones, 1)}
    types, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument] = "constexpr"
        elif argument.endswith("_strides"):
            types[argument] = ("i32",) * 3
            attributes.update({(index, dim): DIVISIBLE for dim in range(3)})
        elif argument in COUNTS:
            types[argument] = "i32"
            if argument in ("T", "limit"):
                attributes[index,] = DIVISIBLE
        elif argument.endswith("scale"):
            types[argument] = "fp32"
        else:
            types[argument] = "*fp32" if argument in FP32 else "*i32" if argument in INT32 else "*bf16"
            attributes[index,] = DIVISIBLE
    source = ASTSource(kernel, types, {(kernel.arg_names.index(key),): value for key, value in constants.items()},
                       attributes)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                                  options={"num_warps": launch.num_warps, "num_stages": launch.num_stages})
    found = {key: int(re.search(pattern, log.getvalue())[1]) for key, pattern in
             (("registers", r"Used (\d+) registers"), ("spilled", r"(\d+) bytes spill stores"))}
    return {"sm": capability, "kernel": name, "D": size, "dropout": dropout, "ones": " ".join(ones),
            "tile": f"{launch.block_m}x{launch.block_n}", "warps": launch.num_warps, "stages": launch.num_stages,
            **found, "shared": compiled.metadata.shared}


def main() -> None:
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True
    rows = []
    for name in ("forward", "backward_q", "backward_kv"):
        for capability in (80, 90):
            for size in (64, 128):
                rows.append(report(capability, name, size, dropout=False, ones=("group",)))
                rows.append(report(capability, name, size, dropout=True, ones=()))
        rows.append(report(90, name, 64, dropout=True, ones=("B", "H", "group", "T")))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
