"""The attention backends: what each needs, which of them can run, and which one `auto` takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from aah_dist.attention.banded import banded_attention
from aah_dist.attention.reference import dense_attention
from aah_dist.config.schema import ConfigError
from aah_dist.parallel.device import has_gpu

DENSE_MAX_LENGTH = 2048
"""Longest sequence the dense backend takes: its T x T scores are for checking other backends, not for training."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Backend:
    """One way to execute windows."""

    name: str
    summary: str
    run: Callable[..., Tensor]
    max_length: int | None = None

    def refusal(self, device: torch.device, dtype: torch.dtype, length: int | None = None) -> str | None:
        """Why this backend cannot take such inputs, as one sentence, or None when it can."""
        if dtype not in DTYPES:
            return (f"attention inputs are {dtype}; the {self.name} backend takes "
                    f"{', '.join(str(d).removeprefix('torch.') for d in DTYPES)}.")
        if device.type == "cuda" and not has_gpu():
            return f"device {device} was asked for; this torch build or machine has no CUDA device."
        if self.max_length is not None and length is not None and length > self.max_length:
            return (f"sequence length {length} is above {self.max_length}, the most that the {self.name} backend takes "
                    "because it holds T x T scores; use backend banded.")
        return None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("dense", "reference: T x T scores under a mask, fp32 softmax, any device", dense_attention,
                DENSE_MAX_LENGTH),
        Backend("banded", "chunks inside each head's band, fp32 inside; tuned for CPU, plain torch operators elsewhere",
                banded_attention),
    )
}


def choose(device: torch.device) -> tuple[str, str]:
    """The backend that `auto` means on this device, and why."""
    if device.type == "cpu":
        return "banded", "on CPU it skips the work outside each window"
    return "banded", f"the one backend without T x T memory that runs on {device.type}"


@cache
def _announce(name: str, reason: str) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        first = torch.distributed.get_rank() == 0
    else:
        first = os.environ.get("RANK", "0") == "0"
    if first:
        print(f"attention backend: {name} (auto: {reason})", file=sys.stderr, flush=True)


def resolve(name: str, device: torch.device, dtype: torch.dtype, length: int | None = None) -> Backend:
    """The backend of that name, or the one `auto` picks (printed once, with the reason, by the first rank).

    Raises ConfigError when the name is unknown or the backend cannot take such inputs.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"attention backend {name!r} is unknown; choose auto or one of {', '.join(BACKENDS)}.")
    if name == "auto":
        name, reason = choose(device)
        _announce(name, reason)
    backend = BACKENDS[name]
    refusal = backend.refusal(device, dtype, length)
    if refusal:
        raise ConfigError(refusal)
    return backend
