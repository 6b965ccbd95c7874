"""`python -m aah_dist.attention`: the attention backends, whether each can run on this machine, and what auto means."""

from __future__ import annotations

import argparse

import torch

from aah_dist.attention import flash
from aah_dist.attention.backends import BACKENDS, ORDER, Backend, Inputs, choose, describe, short
from aah_dist.parallel.device import has_gpu

LENGTH, HEAD_SIZE = 1024, 128  # that every backend takes


def main() -> None:
    for backend in BACKENDS.values():
        print(f"{backend.name}: {backend.summary}")
        print(f"  takes {capabilities(backend)}")
        for device in map(torch.device, ("cpu", "cuda")):
            print(f"  {device.type}: {here(backend, device)}")
    print(f"auto, training, head size {HEAD_SIZE}:")
    for device in map(torch.device, ("cpu", "cuda")):
        if device.type == "cuda" and not has_gpu():
            print(f"  cuda: no CUDA device here; with one, the first of {', '.join(ORDER)} that takes the inputs")
            continue
        for dtype in (torch.bfloat16, torch.float32):
            for dropout_p in (0.0, 0.1):
                name, reason = choose(Inputs(device, dtype, LENGTH, HEAD_SIZE, dropout_p, training=True))
                print(f"  {device.type}, {short(dtype)}, attention dropout {dropout_p:g}: {name} ({reason})")


def capabilities(backend: Backend) -> str:
    parts = [", ".join(map(short, backend.dtypes))]
    if backend.head_sizes is not None:
        parts.append(f"head sizes {describe(backend.head_sizes)}")
    if backend.max_length is not None:
        parts.append(f"at most {backend.max_length} tokens")
    parts.append("attention dropout" if backend.dropout else "no attention dropout")
    return "; ".join(parts)


def here(backend: Backend, device: torch.device) -> str:
    """Whether it can run on that device of this machine, at its best."""
    inputs = [Inputs(device, backend.dtypes[0], LENGTH, HEAD_SIZE, 0.0, training) for training in (True, False)]
    obstacles = [backend.obstacle(x) for x in inputs]
    if obstacles[0] is None:
        return f"can run, through {flash.library()[0]}" if backend.name == "flash" else "can run"
    return "can run forward only" if obstacles[1] is None else f"cannot run: {obstacles[1]}"


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m aah_dist.attention", description=__doc__).parse_args()
    main()
