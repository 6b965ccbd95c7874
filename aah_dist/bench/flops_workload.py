"""What runs under the FLOP counters of bench/flops.py: one attention call for each case, and the rest of a layer.

A layer is norm, projections, attention, output projection, norm and an MLP of four times the hidden size (H x D),
without bias, at B = 1.  Its attention depends on the windows and the rest does not, so the rest is counted once.
Shapes: x [B, T, H*D]; q, k, v and attention's output [B, H, T, D].
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aah_dist.attention import window_attention
from aah_dist.bench.callgrind import Marks
from aah_dist.config.plans import read_plan
from aah_dist.parallel.device import annotate, synchronize

PLANS = ("full_adaptive", "shallow_freeze", "deep_practical_reuse", "grouping_off")
"""Files in bench/plans, of which the first layer is taken."""
PLAN_LAYERS, PLAN_HEADS = 16, 12
BASE, CHECK, REST = "causal", "check", "rest"
CHECK_SIZE = {"cpu": 256, "cuda": 2048}
"""Rows and columns of the product of known size that checks the counter."""

Mark = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Case:
    """One row of the table: windows in tokens, and how they are executed."""

    name: str
    text: str
    windows: tuple[int, ...]
    path: str = "windows"  # or "causal", "mask"


def cases(heads: int, length: int) -> list[Case]:
    full, eighth = (length,) * heads, (max(1, length // 8),) * heads
    rows = [Case(BASE, "causal attention of the library", full, "causal"),
            Case("full_attention", "full_attention", full)]
    for name in PLANS if heads == PLAN_HEADS else ():
        plan = read_plan(str(Path(__file__).parent / "plans" / f"{name}.yaml"), None, PLAN_LAYERS, heads, length)
        rows.append(Case(f"plan_{name}", f"plan {name}, layer 0", tuple(plan[0].tolist())))
    rows.append(Case("eighth", "all T/8", eighth))
    rows.append(Case("eighth_mask", "all T/8 by a dense mask", eighth, "mask"))
    return rows


def range_names(rows: list[Case]) -> list[str]:
    names = [*(row.name for row in rows), REST]
    return [CHECK, *(f"{name}.{way}" for name in names for way in ("forward", "backward"))]


class Rest(nn.Module):
    """A layer without its attention: `before` gives q, k and v, `after` takes attention's output."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.heads, n = heads, heads * size
        self.norm1, self.norm2 = nn.RMSNorm(n), nn.RMSNorm(n)
        self.qkv, self.out = nn.Linear(n, 3 * n, bias=False), nn.Linear(n, n, bias=False)
        self.fc1, self.fc2 = nn.Linear(n, 4 * n, bias=False), nn.Linear(4 * n, n, bias=False)

    def before(self, x: Tensor) -> list[Tensor]:
        return [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)]

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        q, k, v = self.before(x)
        return torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)] + [self.after(x, attended)], -1)


class Workload:
    """Inputs and the functions of every range; each returns a tensor whose backward pass is the range's other half."""

    def __init__(self, heads: int, length: int, size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device, self.rows = device, cases(heads, length)
        options = {"device": device, "dtype": dtype}
        self.qkv = [torch.randn(1, length, heads, size, **options).transpose(1, 2).requires_grad_() for _ in range(3)]
        self.x = torch.randn(1, length, heads * size, **options).requires_grad_()
        self.attended = torch.randn(1, heads, length, size, **options).requires_grad_()
        self.rest = Rest(heads, size).to(**options)
        square = CHECK_SIZE[device.type]
        self.factors = [torch.randn(square, square, **options) for _ in range(2)]

    def attention(self, row: Case) -> Callable[[], Tensor]:
        q, k, v = self.qkv
        if row.path == "causal":
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if row.path == "mask":
            position = torch.arange(q.shape[2], device=self.device)
            back = position[:, None] - position
            # Four dimensions: with three, the library's CPU kernel is not taken, but one that is slower still.
            mask = (back >= 0) & (back < torch.tensor(row.windows, device=self.device)[None, :, None, None])
            return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return lambda: window_attention(q, k, v, row.windows)

    def functions(self, parts: list[str]) -> dict[str, Callable[[], Tensor]]:
        """By range name, without the way: what `parts`, of "attention" and "rest", consist of."""
        found = {row.name: self.attention(row) for row in self.rows} if "attention" in parts else {}
        return found | ({REST: lambda: self.rest(self.x, self.attended)} if "rest" in parts else {})

    def count(self, parts: list[str], mark: Mark, warm: bool) -> None:
        with mark(CHECK):
            torch.mm(*self.factors)
        start = torch.ones(2, device=self.device, requires_grad=True)
        (start * start).backward(torch.ones_like(start))  # starts autograd, outside the ranges
        for name, function in self.functions(parts).items():
            if warm:  # kernels that are compiled or tuned at their first call
                function().sum().backward()
            with mark(f"{name}.forward"):
                out = function()
            gradient = torch.ones_like(out)
            with mark(f"{name}.backward"):
                out.backward(gradient)

    def time(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of forward and backward by name, one for each of the interleaved rounds: CPU time, on a GPU the
        clock."""
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        functions = self.functions(["attention", "rest"])
        found: dict[str, list[float]] = {name: [] for name in functions}
        for number in range(rounds + 1):
            for name, function in functions.items():
                synchronize(self.device)
                began = clock()
                out = function()
                out.backward(torch.ones_like(out))
                synchronize(self.device)
                if number:  # the first round warms up
                    found[name].append(clock() - began)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--parts", nargs="+", default=["attention", "rest"])
    parser.add_argument("--marks", help="the library of bench/callgrind.py")
    parser.add_argument("--rounds", type=int, help="time so many rounds instead of running once")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.device == "cpu":
        torch.set_num_threads(1)
    work = Workload(args.heads, args.length, args.size, device)
    if args.rounds:
        print(json.dumps(work.time(args.rounds)))
    elif args.marks:
        if torch.backends.mkl.is_available():  # prints which kernels are used
            with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
                torch.mm(*work.factors)
        work.count(args.parts, Marks(args.marks).range, warm=False)
    else:
        work.count(args.parts, lambda name: annotate(name, device), warm=True)


if __name__ == "__main__":
    main()
