"""The attention backends: what each can take, which of them can run here, and which one `auto` means.

A backend's module is imported when the backend is first looked at, so that no run needs another backend's library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from aah_dist.config.schema import ConfigError
from aah_dist.parallel import device as devices

DENSE_MAX_LENGTH = 2048
"""Longest sequence the dense backend takes: its T x T scores are for checking other backends, not for training."""

HALF = (torch.bfloat16, torch.float16)
SINGLE = (torch.float32, *HALF)
ALL = (torch.float64, *SINGLE)


@dataclass(frozen=True)
class Inputs:
    """What a backend is chosen by."""

    device: torch.device
    dtype: torch.dtype
    length: int
    head_size: int
    dropout_p: float
    training: bool
    """Whether gradients will be asked for."""


@dataclass(frozen=True)
class Backend:
    """One way to execute windows: attention/MODULE.py with its function NAME_attention and, if needed, missing()."""

    name: str
    summary: str
    module: str
    dtypes: tuple[torch.dtype, ...] = ALL
    device_types: tuple[str, ...] | None = None  # None: any
    trains_on: tuple[str, ...] | None = None  # None: wherever it runs
    dropout: bool = True
    max_length: int | None = None
    head_sizes: range | None = None

    @property
    def run(self) -> Callable[..., Tensor]:
        """(q, k, v, windows, scale, dropout_p, seeds) -> out; see window_attention."""
        return getattr(self._load(), f"{self.name}_attention")

    def _load(self) -> ModuleType:
        return import_module(f"aah_dist.attention.{self.module}")

    def missing(self) -> str | None:
        """Why it cannot run in this environment at all, without a full stop, or None."""
        ask = getattr(self._load(), "missing", None)
        sentence = ask() if ask else None
        return sentence and sentence.rstrip(".")

    def interpreted(self, device: torch.device) -> bool:
        """Whether it would run in Triton's interpreter."""
        return self.name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"

    def runs_on(self, device: torch.device) -> bool:
        return self.device_types is None or device.type in self.device_types or self.interpreted(device)

    def obstacle(self, inputs: Inputs) -> str | None:
        """Why this backend cannot take such inputs, without a full stop, or None when it can."""
        device, this = inputs.device, f"the {self.name} backend"
        if not self.runs_on(device):
            return f"{this} runs on {' and '.join(self.device_types)}, not on {device.type}"
        if device.type == "cuda" and not devices.has_gpu():
            return f"{this} finds no CUDA device in this torch build or machine"
        missing = self.missing()
        if missing:
            return missing
        if inputs.dtype not in self.dtypes:
            return f"{this} takes {', '.join(map(short, self.dtypes))}, not {short(inputs.dtype)}"
        if inputs.dtype == torch.bfloat16 and self.interpreted(device):
            return f"{this} takes no bfloat16 in Triton's interpreter, which multiplies its bits instead of its values"
        if self.head_sizes is not None and inputs.head_size not in self.head_sizes:
            return f"{this} takes head sizes {describe(self.head_sizes)}, not {inputs.head_size}"
        if self.max_length is not None and inputs.length > self.max_length:
            return (f"{this} takes at most {self.max_length} tokens because it holds T x T scores, and the sequence "
                    f"length is {inputs.length}")
        if inputs.dropout_p > 0 and not self.dropout:
            return (f"{this} takes no attention dropout ({inputs.dropout_p}): its masks would differ in recomputation, "
                    "at another TP and after a resume")
        if inputs.training and self.trains_on is not None and device.type not in self.trains_on:
            return f"{this} has no backward pass on {device.type}"
        return None


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(sizes: range) -> str:
    return f"{sizes[0]} to {sizes[-1]}" + (f" in steps of {sizes.step}" if sizes.step > 1 else "")


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("dense", "reference: T x T scores under a mask, fp32 softmax, any device", "reference",
                max_length=DENSE_MAX_LENGTH),
        Backend("native", "compiled CPU kernels, blocks inside each head's band; built in seconds, at first use",
                "native", device_types=("cpu",)),
        Backend("banded", "chunks inside each head's band, plain torch operators, fp32 inside; any device", "banded"),
        Backend("flash", "flash-attn 2 or torch's varlen attention, one call per distinct window", "flash", dtypes=HALF,
                device_types=("cuda",), dropout=False, head_sizes=range(8, 257, 8)),
        Backend("flex", "compiled FlexAttention under a mask of blocks; on CPU without a backward pass", "flex",
                dtypes=SINGLE, device_types=("cpu", "cuda"), trains_on=("cuda",), dropout=False,
                head_sizes=range(16, 257)),
        Backend("triton", "our kernels, all heads in one launch; on CPU only under TRITON_INTERPRET=1",
                "triton_attention", dtypes=SINGLE, device_types=("cuda",), head_sizes=range(1, 129)),
    )
}

# What auto tries, in this order, and why it is there.
ORDER_CPU = {
    "native": "compiled for this CPU, it skips the work outside each window",
    "banded": "plain torch operators, it skips the work outside each window",
}
ORDER = {
    "triton": "all heads in one launch, and other windows need neither a compilation nor a wait",
    "flash": "one library call per distinct window",
    "flex": "compiled, it skips blocks outside each window",
    "banded": "plain torch operators, without T x T memory",
}


def choose(inputs: Inputs) -> tuple[str, str]:
    """The backend that `auto` means for such inputs, and why: the first in its order that takes them.

    Raises ConfigError when none does.
    """
    passed_over = []
    for name, merit in (ORDER_CPU if inputs.device.type == "cpu" else ORDER).items():
        obstacle = BACKENDS[name].obstacle(inputs)
        if obstacle is None:
            return name, "; ".join([merit, *passed_over])
        passed_over.append(f"not {name}: {obstacle}")
    raise ConfigError(f"no attention backend takes such inputs on {inputs.device}: {obstacle}.")


@cache
def _announce(name: str, reason: str) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    else:
        rank = int(os.environ.get("RANK", "0"))
    # A machine of a job may lack what the first one has.
    elsewhere = rank > 0 and os.environ.get("LOCAL_RANK") == "0" and "; not " in reason
    if rank == 0 or elsewhere:
        of_rank = f" of rank {rank}" if elsewhere else ""
        print(f"attention backend{of_rank}: {name} (auto: {reason})", file=sys.stderr, flush=True)


@lru_cache(maxsize=256)
def resolve(name: str, inputs: Inputs, field: str = "backend") -> Backend:
    """The backend of that name, or the one `auto` picks (printed once, with the reason, by the first rank, and by the
    first of any other machine where one is passed over).

    field: how an error calls the setting.  The answer is kept: what is installed does not change in a process.
    Raises ConfigError when the name is unknown or the backend cannot take such inputs; it names one that can.
    """
    if name == "auto":
        name, reason = choose(inputs)
        _announce(name, reason)
        return BACKENDS[name]
    if name not in BACKENDS:
        raise ConfigError(f"{field} {name!r} is unknown; choose auto or one of {', '.join(BACKENDS)}.")
    obstacle = BACKENDS[name].obstacle(inputs)
    if obstacle is None:
        return BACKENDS[name]
    try:
        instead = f"use {field} {choose(inputs)[0]}"
    except ConfigError:
        instead = "no other backend takes such inputs here"
    raise ConfigError(f"{field} is {name}, but {obstacle}{', or' if ';' in obstacle else ';'} {instead}.")


def check_backend(name: str, device: torch.device, dtype: torch.dtype, length: int, head_size: int, dropout_p: float,
                  training: bool = True, field: str = "aah.backend") -> str:
    """The backend that a run with that name in `field` will use, found out before it starts; native may be built.

    dtype: of the attention inputs.  dropout_p: model.attention_dropout_p.
    Raises ConfigError, naming the field, when it cannot run here.
    """
    inputs = Inputs(device, dtype, length, head_size, dropout_p, training)
    # What auto means is said when the first layer asks, not here: the run may still be refused.
    return choose(inputs)[0] if name == "auto" else resolve(name, inputs, field).name
