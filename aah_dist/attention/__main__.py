"""`python -m aah_dist.attention`: the attention backends, and whether each can run on this machine."""

from __future__ import annotations

import torch

from aah_dist.attention.backends import BACKENDS, choose
from aah_dist.parallel.device import has_gpu


def main() -> None:
    for backend in BACKENDS.values():
        print(f"{backend.name}: {backend.summary}")
        if backend.max_length is not None:
            print(f"  at most {backend.max_length} tokens")
        for device in ("cpu", "cuda"):
            refusal = backend.refusal(torch.device(device), torch.float32)
            print(f"  {device}: {'can run' if refusal is None else 'cannot run: ' + refusal}")
    device = torch.device("cuda" if has_gpu() else "cpu")
    name, reason = choose(device)
    print(f"auto on {device.type}: {name} ({reason})")


if __name__ == "__main__":
    main()
