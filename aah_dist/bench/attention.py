"""What windows save on CPU, against causal attention: python -m aah_dist.bench.attention

window_attention, forward and forward + backward, against F.scaled_dot_product_attention(is_causal=True) on the same
fp32 inputs, 12 heads.  A mix is written as the number of heads with windows of T/8, T/4, T/2 and T.  The default
measures T 4096, D 128; --all T 1024 to 8192, D 64 and 128.

Columns: floor = causal query-key pairs inside the windows over all causal pairs; cells = what a forward pass computes,
by the native backend's counter or the banded backend's plan, over the pairs inside the windows; then ratios to causal
attention, of CPU time with one thread, of wall clock with two, and of memory.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from aah_dist.attention import native_library, window_attention
from aah_dist.attention.backends import BACKENDS, Inputs, choose
from aah_dist.attention.banded import slabs_of
from aah_dist.bench.environment import describe, positive
from aah_dist.bench.training import peak, reset_peak
from aah_dist.config.pairs import pairs

HEADS = 12
COUNTS = {"all full": (0, 0, 0, 12), "6/2/2/2": (6, 2, 2, 2), "8/2/1/1": (8, 2, 1, 1), "all T/8": (12, 0, 0, 0),
          "shuffled": (6, 2, 2, 2)}
CAUSAL = "causal"
LENGTHS, SIZES = (1024, 2048, 4096, 8192), (64, 128)
TO_REACH = {"all full": 1.03, "6/2/2/2": 0.56, "8/2/1/1": 0.46, "all T/8": 0.32}
"""Forward + backward at T 4096, D 128, one thread."""


def main() -> None:
    args = parse()
    if args.memory:
        print(json.dumps(memory(args.memory, args.backend, args.lengths[0], args.sizes[0])))
        return
    print(describe("torch"))
    print(f"method    backend {args.backend}, fp32, {HEADS} heads, B 1; one untimed call of each, then {args.rounds} "
          "rounds in turn in one\n"
          "          process; medians of each round's ratio to causal; memory: growth of the resident size to its peak "
          "over a\n"
          "          second forward + backward, output and gradients included, in a new process for each, one thread, "
          "blocks of\n"
          "          1 MiB unmapped when freed")
    for length in args.lengths:
        for size in args.sizes:
            report(args.backend, length, size, args.mixes, args.rounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=positive, nargs="+", metavar="T", help="at least 8 (default: 4096)")
    parser.add_argument("--sizes", type=positive, nargs="+", metavar="D", help="default: 128")
    parser.add_argument("--mixes", nargs="+", default=list(COUNTS), choices=list(COUNTS), help="default: all")
    parser.add_argument("--rounds", type=positive, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--backend", choices=("native", "banded"), help="default: what auto chooses")
    parser.add_argument("--all", action="store_true", help=f"T {LENGTHS} and D {SIZES}")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.all and (args.lengths or args.sizes):
        parser.error("--all has its own lengths and sizes; leave out --all, or --lengths and --sizes")
    args.lengths = LENGTHS if args.all else args.lengths or [4096]
    args.sizes = SIZES if args.all else args.sizes or [128]
    if min(args.lengths) < 8:
        parser.error(f"--lengths {min(args.lengths)} has no window of T/8; give at least 8")
    inputs = Inputs(torch.device("cpu"), torch.float32, max(args.lengths), max(args.sizes), 0.0, training=True)
    args.backend = args.backend or choose(inputs)[0]
    obstacle = BACKENDS[args.backend].obstacle(inputs)
    if obstacle:
        parser.error(f"--backend {args.backend}: {obstacle}")
    return args


def report(backend: str, length: int, size: int, mixes: list[str], rounds: int) -> None:
    names = [CAUSAL, *mixes]
    one, two = (times(backend, length, size, names, rounds, threads) for threads in (1, 2))
    peaks = {name: memory_in_new_process(name, backend, length, size) for name in names}
    causal = [statistics.median(step[CAUSAL][part] for step in steps) for steps in (one, two) for part in (0, 1)]
    print(f"\nT {length}, D {size}; causal: one thread {causal[0]:.3f} s forward, {causal[1]:.3f} s forward + "
          f"backward; two threads {causal[2]:.3f} s, {causal[3]:.3f} s; {peaks[CAUSAL]:.0f} MiB")
    print(f"{'':<10}{'':>7}{'':>7}  {'one thread, CPU time':^28}  {'two threads, wall clock':^23}")
    print(f"{'mix':<10}{'floor':>7}{'cells':>7}{'fwd':>8}{'fwd+bwd':>10}{'to reach':>10}{'fwd':>10}{'fwd+bwd':>10}"
          f"{'memory':>10}")
    for name in mixes:
        ratios = [statistics.median(step[name][part] / step[CAUSAL][part] for step in steps)
                  for steps in (one, two) for part in (0, 1)]
        exact = sum(pairs(w, length) for w in windows_of(name, length))
        goal = f"{TO_REACH[name]:.2f}" if (length, size) == (4096, 128) and name in TO_REACH else ""
        computed = cells(name, backend, length, size)
        print(f"{name:<10}{exact / (HEADS * pairs(length, length)):>7.3f}{computed / exact:>7.3f}"
              f"{ratios[0]:>8.3f}{ratios[1]:>10.3f}{goal:>10}{ratios[2]:>10.3f}{ratios[3]:>10.3f}"
              f"{peaks[name] / peaks[CAUSAL]:>10.3f}", flush=True)


def windows_of(mix: str, length: int) -> tuple[int, ...]:
    windows = [w for w, n in zip((length // 8, length // 4, length // 2, length), COUNTS[mix], strict=True)
               for _ in range(n)]
    if mix == "shuffled":
        random.Random(0).shuffle(windows)
    return tuple(windows)


def cells(mix: str, backend: str, length: int, size: int) -> int:
    """Query-key cells that a forward pass computes."""
    inputs, _ = make(length, size)
    if backend == "banded":
        return sum(slab.cells for slab in slabs_of(inputs[0], HEADS, windows_of(mix, length)))
    counter = native_library.load().cells
    before = counter()
    with torch.no_grad():
        attention(mix, backend, inputs)
    return counter() - before


def make(length: int, size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    *inputs, grad = (torch.randn(1, HEADS, length, size, generator=generator) for _ in range(4))
    return [x.requires_grad_() for x in inputs], grad


def attention(name: str, backend: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    if name == CAUSAL:
        return F.scaled_dot_product_attention(*inputs, is_causal=True)
    return window_attention(*inputs, windows_of(name, inputs[0].shape[2]), backend=backend)


def times(backend: str, length: int, size: int, names: list[str], rounds: int,
          threads: int) -> list[dict[str, tuple[float, float]]]:
    """Seconds of forward and of forward + backward for each round and name: CPU time of one thread, else wall clock."""
    clock: Callable[[], float] = time.process_time if threads == 1 else time.perf_counter
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    inputs, grad = make(length, size)
    found = []
    for _ in range(1 + rounds):
        found.append({})
        for name in names:
            start = clock()
            out = attention(name, backend, inputs)
            middle = clock()
            torch.autograd.grad(out, inputs, grad)
            found[-1][name] = middle - start, clock() - start
    torch.set_num_threads(before)
    return found[1:]


def memory(name: str, backend: str, length: int, size: int) -> float:
    """MiB by which one forward + backward raises the peak of this process."""
    torch.set_num_threads(1)
    inputs, grad = make(length, size)
    grown = 0.0
    for _ in range(2):
        gc.collect()
        before = reset_peak()
        out = attention(name, backend, inputs)
        grads = torch.autograd.grad(out, inputs, grad)
        grown = (peak() - before) / 1024
        del out, grads
    return grown


def memory_in_new_process(name: str, backend: str, length: int, size: int) -> float:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
                   "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "aah_dist.bench.attention", "--lengths", str(length), "--sizes", str(size),
               "--backend", backend, "--memory", name]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{name} failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
