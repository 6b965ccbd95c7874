"""The attention backends on a GPU: exactness in bf16, and time against causal flash.  Run by gpu_check.sh.

On a machine without one, TRITON_INTERPRET=1 checks the Triton kernels' mathematics, and what is left open is printed.
"""

import argparse
import os
import statistics
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F

from aah_dist.attention import window_attention
from aah_dist.attention.backends import BACKENDS, Inputs
from aah_dist.bench.attention import COUNTS, HEADS, windows_of
from aah_dist.bench.environment import describe
from aah_dist.parallel import device as devices

TESTED = ("triton", "flash", "flex")
SIZE = 128
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
"""Largest error over the largest value, of output and gradients."""
ODD_WINDOWS = (1, 2, 63, 64, 65, 127, 128, 129, 200, 299, 300, 1000)
LENGTHS, ROUNDS = (4096, 8192, 16384, 32768), 5
UNMEASURED = """not measured without a GPU:
  rounding of bf16 products and races between threads in the triton kernels
  flash altogether, and flex's backward pass
  time of triton, flash and flex against causal flash, T 4096 to 32768
  that a change of windows costs no compilation and no wait
  FLOPs by Nsight Compute; a training step"""


def exactness(device: torch.device, dtype: torch.dtype, names: list[str], length: int, heads: int) -> bool:
    """Prints the error of each backend against fp64 under a dense mask; returns whether all are within tolerance."""
    generator = torch.Generator().manual_seed(0)
    windows = tuple(min(w, length) for w in (ODD_WINDOWS * heads)[:heads])
    q, k, v, grad = (torch.randn(1, n, length, SIZE, generator=generator).to(device, dtype)
                     for n in (heads, heads // 2, heads // 2, heads))
    expected = run("dense", (q, k, v), grad, windows, torch.float64)
    good = True
    for name in names:
        found = run(name, (q, k, v), grad, windows, dtype)
        errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
        good &= max(errors) < TOLERANCE[dtype]
        print(f"{name:<8} {str(dtype).removeprefix('torch.'):<9} T {length}, {heads} heads on {heads // 2} kv heads: "
              + ", ".join(f"{part} {error:.1e}" for part, error in zip(("out", "dq", "dk", "dv"), errors, strict=True))
              + ("" if max(errors) < TOLERANCE[dtype] else "  WRONG"), flush=True)
    return good


def run(name: str, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor, windows: tuple[int, ...],
        dtype: torch.dtype) -> list[torch.Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = window_attention(*leaves, windows, backend=name)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def times(device: torch.device, names: list[str]) -> None:
    """Forward + backward of each mix over causal flash (SDPA) in the same round; medians."""
    print(f"\nforward + backward over causal flash, bf16, B 1, {HEADS} heads of {SIZE}, medians of {ROUNDS} rounds")
    for length in LENGTHS:
        inputs = [torch.randn(1, HEADS, length, SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
                  for _ in range(3)]
        grad = torch.randn_like(inputs[0])
        for mix in COUNTS:
            calls = {"causal": partial(F.scaled_dot_product_attention, *inputs, is_causal=True)}
            calls |= {name: partial(window_attention, *inputs, windows_of(mix, length), backend=name) for name in names}
            rounds = [{name: clock(device, call, inputs, grad) for name, call in calls.items()}
                      for _ in range(ROUNDS + 1)][1:]
            ratios = {name: statistics.median(r[name] / r["causal"] for r in rounds) for name in names}
            print(f"T {length:<6} {mix:<9} causal {1e3 * statistics.median(r['causal'] for r in rounds):8.2f} ms   "
                  + "  ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()), flush=True)


def clock(device: torch.device, call: object, inputs: list[torch.Tensor], grad: torch.Tensor) -> float:
    devices.synchronize(device)
    began = time.perf_counter()
    torch.autograd.grad(call(), inputs, grad)
    devices.synchronize(device)
    return time.perf_counter() - began


def changing_windows(device: torch.device) -> None:
    """Time of calls whose windows are new each time, over calls with the same windows: 1 if a change costs nothing."""
    inputs = [torch.randn(1, HEADS, 8192, SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
              for _ in range(3)]
    grad = torch.randn_like(inputs[0])
    mixes = [tuple(512 * (1 + (h + shift) % 8) for h in range(HEADS)) for shift in range(20)]

    def timed(windows: tuple[int, ...]) -> float:
        return clock(device, partial(window_attention, *inputs, windows, backend="triton"), inputs, grad)

    for windows in mixes[:2]:
        timed(windows)
    same, new = [timed(mixes[0]) for _ in mixes[2:]], [timed(windows) for windows in mixes[2:]]
    ratio = statistics.median(new) / statistics.median(same)
    print(f"\ntriton, T 8192: new windows in every call over unchanged ones {ratio:.3f}")


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(describe("torch"))
    if not devices.has_gpu():
        if os.environ.get("TRITON_INTERPRET") != "1":
            print("no GPU here, and TRITON_INTERPRET is not 1: nothing can be checked", file=sys.stderr)
            return 1
        good = exactness(torch.device("cpu"), torch.float32, ["triton"], length=150, heads=4)
        print(UNMEASURED)
        return 0 if good else 1
    device = devices.select_device("cuda", 0)
    wanted = Inputs(device, torch.bfloat16, 4096, SIZE, 0.0, True)
    obstacles = {name: BACKENDS[name].obstacle(wanted) for name in TESTED}
    able = [name for name in TESTED if obstacles[name] is None]
    for name in TESTED:
        if obstacles[name] is not None:
            print(f"{name} is not checked: {obstacles[name]}")
    good = all([exactness(device, torch.bfloat16, able, length, 12) for length in (300, 1024, 2048)]
               + [exactness(device, torch.float32, ["triton"], 300, 12)])
    times(device, able)
    if "triton" in able:
        changing_windows(device)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
