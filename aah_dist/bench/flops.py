"""Measured FLOPs of windowed attention, from counters of executed instructions: python -m aah_dist.bench.flops

Rows: the library's causal attention (1 by definition), full_attention through window_attention, the first layer of the
plans in bench/plans, all heads at T/8, and those windows again as a dense mask, which skips nothing.  The figures hold
for one attention call, forward and backward; the total adds the rest of one transformer layer, which is described in
bench/flops_workload.py.
No figure comes from a formula: on CPU instructions are counted by valgrind and decoded by objdump (fp32), on an NVIDIA
GPU the counters are Nsight Compute's, tensor cores included (bf16).  A product of known size checks the counter.

A few minutes on two CPU cores, at small sizes too: starting torch under valgrind is most of it.  valgrind imitates
multiply-add instructions slowly and has no AVX-512, so MKL is told to use its SSE4.2 kernels while it is counted: a
multiply-add is then a multiplication and an addition, 2 FLOPs as before.  `--mkl native` lets it choose (AVX2 with
multiply-adds), which takes many times as long; at T 512, D 64, one head, both gave .238 for T/8.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aah_dist.config.errors import ConfigError
from aah_dist.training.entry import run_main

WORKLOAD = "aah_dist.bench.flops_workload"
CHECK_WITHIN = 0.05
DEFAULTS = {"cpu": (1024, 64), "cuda": (4096, 128)}  # T and D
PARTS = ("attention", "rest")


def main() -> int:
    args = parse()
    from aah_dist.bench import callgrind, nsight
    from aah_dist.parallel.device import has_gpu

    if args.device == "auto":
        args.device = "cuda" if has_gpu() else "cpu"
    length, size = DEFAULTS[args.device]
    args.length, args.size = args.length or length, args.size or size
    if args.device == "cpu":
        callgrind.require()
        return report(args, *count_on_cpu(args))
    reason = nsight.missing() if has_gpu() else "this machine or torch build has no CUDA device."
    if reason:
        print(f"Nothing was measured: {reason}  Where it can be, this command runs\n")
        print(shlex.join(nsight_command(args, "ncu.csv")))
        return 1
    return report(args, *count_on_gpu(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="default: a GPU if there is one")
    parser.add_argument("--heads", type=int, default=12, help="default: 12; with another number the plans are left out")
    parser.add_argument("--length", type=int, help="T (default: 1024 on CPU, 4096 on a GPU)")
    parser.add_argument("--size", type=int, help="D (default: 64 on CPU, 128 on a GPU)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--mkl", choices=("sse4_2", "native"), default="sse4_2", help="MKL's kernels under the counter")
    args = parser.parse_args()
    for name in ("heads", "length", "size", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1.")
    return args


def workload(args: argparse.Namespace, *more: str) -> list[str]:
    return [sys.executable, "-m", WORKLOAD, "--device", args.device, "--heads", str(args.heads), "--length",
            str(args.length), "--size", str(args.size), *more]


def nsight_command(args: argparse.Namespace, log: str) -> list[str]:
    from aah_dist.bench import nsight
    from aah_dist.bench.flops_workload import cases, range_names

    return nsight.command(range_names(cases(args.heads, args.length)), workload(args), log)


def count_on_cpu(args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """FLOPs by range, and lines that say how they were counted.  Attention and the rest are counted side by side."""
    from aah_dist.bench import callgrind

    environment = {"DS_ACCELERATOR": "cpu"} | ({} if args.mkl == "native" else {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"})
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        marks = callgrind.compile_marks(Path(folder))

        def one(part: str) -> tuple[str, dict]:
            dumps = Path(folder) / part
            dumps.mkdir()
            command = workload(args, "--marks", str(marks), "--parts", part)
            return callgrind.run(command, dumps, environment), callgrind.counts(dumps)

        print("counting under valgrind; this takes minutes ...", file=sys.stderr, flush=True)
        parts = list(pool.map(one, PARTS))
    found = {name: count for _, counts in parts for name, count in counts.items()}
    kernels = next((line.split(" for ", 1)[-1].split(", Lnx")[0] for line in parts[0][0].splitlines()
                    if line.startswith("MKL_VERBOSE")), "another library's")
    executed = sum(count.instructions for count in found.values())
    decoded = sum(count.decoded for count in found.values()) / executed
    worst = min(found, key=lambda name: found[name].share)
    return {name: float(count.flops) for name, count in found.items()}, [
        f"FLOPs     {callgrind.describe()}, objdump: {executed / 1e9:.1f} G executed instructions, decoded "
        f"{decoded:.2%}, least in {worst} {found[worst].share:.2%}",
        f"kernels   under valgrind, MKL: {kernels}; torch's own: what valgrind's processor offers (AVX2, no AVX-512)"]


def count_on_gpu(args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    from aah_dist.bench import nsight
    from aah_dist.bench.flops_workload import cases, range_names

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        done = subprocess.run(nsight_command(args, str(log)), capture_output=True, text=True, check=False)
        text = log.read_text() if log.exists() else ""
        if done.returncode:
            said = " ".join((text + done.stdout + done.stderr).split())
            raise ConfigError(f"ncu ended with code {done.returncode}: {said[-600:]}")
    found = nsight.counts(text, range_names(cases(args.heads, args.length)))
    share = sum(count.tensor for count in found.values()) / sum(count.flops for count in found.values())
    kernels = sum(count.kernels for count in found.values())
    return {name: count.flops for name, count in found.items()}, [
        f"FLOPs     Nsight Compute, {kernels} kernels, {share:.1%} of the FLOPs on tensor cores; metrics in "
        "bench/nsight.py"]


def check(flops: dict[str, float], device: str) -> str:
    """Raises ConfigError where the counter is wrong about a product of known size."""
    from aah_dist.bench.flops_workload import CHECK, CHECK_SIZE

    size = CHECK_SIZE[device]
    ratio = flops[CHECK] / (2 * size**3)
    if abs(ratio - 1) > CHECK_WITHIN:
        raise ConfigError(f"the counter saw {ratio:.3f} of the FLOPs of a {size}^3 product; within {CHECK_WITHIN:.0%} "
                          "is needed, so no figures are given.")
    return f"check     a {size}^3 product: {ratio:.4f} of its 2 N^3 FLOPs counted"


def time_natively(args: argparse.Namespace) -> dict[str, list[float]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(workload(args, "--rounds", str(args.rounds)), capture_output=True, text=True, check=False,
                          env=environment)
    if done.returncode:
        raise ConfigError(f"the timed run ended with code {done.returncode}: {' '.join(done.stderr.split())[-600:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(args: argparse.Namespace, flops: dict[str, float], method: list[str]) -> int:
    from aah_dist.bench.environment import describe

    checked = check(flops, args.device)
    seconds = time_natively(args)
    clock = "CPU time of one thread" if args.device == "cpu" else "clock, device synchronised"
    print(describe("torch"))
    hidden = args.heads * args.size
    print(f"shapes    B 1, H {args.heads}, T {args.length}, D {args.size}; layer of hidden {hidden}, MLP {4 * hidden}; "
          f"{'fp32' if args.device == 'cpu' else 'bf16'}, forward and backward")
    print("\n".join([*method, checked]))
    print(f"time      outside the counter, {clock}, {args.rounds} interleaved rounds, medians of ratios")
    print("ACR, exact pair ratio: from the windows (config/pairs.py); all ratios are to the library's causal attention")
    print(table(args, flops, seconds))
    return 0


def table(args: argparse.Namespace, flops: dict[str, float], seconds: dict[str, list[float]]) -> str:
    """Markdown; flops by range, seconds by case and round."""
    from aah_dist.bench.flops_workload import BASE, REST, cases
    from aah_dist.config.pairs import acr, exact_pair_ratio

    def both(name: str) -> float:
        return flops[f"{name}.forward"] + flops[f"{name}.backward"]

    def time_ratio(name: str, rest: list[float]) -> float:
        return statistics.median((own + more) / (base + more)
                                 for own, base, more in zip(seconds[name], seconds[BASE], rest, strict=True))

    lines = ["", "| windows | ACR | exact pair ratio | Measured Attention FLOPs Ratio | of the forward alone | "
             "Measured Total FLOPs Ratio | attention time ratio | layer time ratio |", "|---|" + "---:|" * 7]
    rest, nothing = both(REST), [0.0] * len(seconds[BASE])
    for row in cases(args.heads, args.length):
        figures = [acr(row.windows, args.length), exact_pair_ratio(row.windows, args.length),
                   both(row.name) / both(BASE), flops[f"{row.name}.forward"] / flops[f"{BASE}.forward"],
                   (both(row.name) + rest) / (both(BASE) + rest), time_ratio(row.name, nothing),
                   time_ratio(row.name, seconds[REST])]
        lines.append(f"| {row.text} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")
    lines += ["", f"Causal attention executed {both(BASE) / 1e9:.2f} GFLOP, the rest of the layer {rest / 1e9:.2f}.",
              "The library's causal kernel skips the upper triangle in blocks, so a measured ratio can lie below "
              "the exact pair ratio."]
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
