"""Speed between log lines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from aah_dist.parallel import device as devices


class Interval:
    """Tokens, model FLOPs and time since the last log line, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self._tokens, self._flops, self._excluded, self._began = 0, 0.0, 0.0, time.monotonic()

    def count(self, tokens: int, flops_per_token: float) -> None:
        self._tokens += tokens
        self._flops += tokens * flops_per_token

    def rates(self, device: torch.device) -> tuple[float, float]:
        """Tokens and model FLOPs a second; a new interval begins."""
        devices.synchronize(device)
        seconds = max(time.monotonic() - self._began - self._excluded, 1e-9)
        rates = self._tokens / seconds, self._flops / seconds
        self.__init__()
        return rates

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._excluded += time.monotonic() - began
