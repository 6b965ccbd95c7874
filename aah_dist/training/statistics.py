"""Statistics of a step, from the layers of this rank to one array that every rank holds."""

import time

import numpy as np
import torch
import torch.distributed as dist

from aah_dist.attention.statistics import measure, sample_rows
from aah_dist.config.statistics import COLUMNS


class StatisticsBuffer:
    """A slot for each micro batch and layer of a step; the StepContext's sink while a step is measured.

    Ranks differ in their heads (TP) or in their samples (DP), so that a sum over all ranks counts everything once.
    """

    def __init__(self, layers: int, heads: int, local_heads: slice | np.ndarray, micro_batches: int,
                 device: torch.device, *, seed: int, entropy_rows: int, length: int) -> None:
        """heads: of the model; local_heads: this rank's.  entropy_rows: query rows sampled for the entropy, 0 for all.
        length: tokens of a sample."""
        self.layers, self.heads, self.local_heads = layers, heads, np.arange(heads)[local_heads]
        self.seed, self.entropy_rows, self.length = seed, entropy_rows, length
        self.slots = torch.zeros(micro_batches, layers, len(self.local_heads), len(COLUMNS), dtype=torch.float64,
                                 device=device)
        self.written = np.zeros((micro_batches, layers), dtype=bool)
        self.step, self.micro = 0, 0
        self.reductions, self.bytes_reduced = 0, 0
        self._seconds = 0.0

    def begin(self, step: int) -> None:
        """Start measuring step `step` (0-based), which decides the rows that are sampled; all slots are open again."""
        self.step, self.micro = step, 0
        self.written[:] = False

    def select(self, micro: int) -> None:
        """The micro batch (0-based within the step) whose forward comes next."""
        self.micro = micro

    def write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
              windows: np.ndarray, scale: float) -> None:
        """As StatisticsSink.write.  A slot that is filled stays: recomputation would write the same into it."""
        if self.written[self.micro, layer]:
            return
        sample = sample_rows(self.length, self.entropy_rows, self.seed, self.step, layer)
        began = time.monotonic()
        self.slots[self.micro, layer] = measure(q, k, v, out, windows, scale, sample)
        self.written[self.micro, layer] = True
        self._seconds += time.monotonic() - began

    def take_seconds(self) -> float:
        """Host seconds spent measuring since the last call (on a GPU: launching)."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def reduce(self) -> np.ndarray:
        """The sums of the step, float64 [layers, heads, len(COLUMNS)], alike on every rank: one all-reduce.

        Adds to `reductions` and `bytes_reduced`.  Raises: RuntimeError if a layer left no statistics in a micro batch.
        """
        if not self.written.all():
            micro, layer = np.argwhere(~self.written)[0]
            raise RuntimeError(f"layer {layer} wrote no statistics in micro batch {micro} of step {self.step}; every "
                               "layer must run a training forward between begin() and reduce().")
        sums = self.slots.new_zeros(self.layers, self.heads, len(COLUMNS))
        sums[:, torch.from_numpy(self.local_heads).to(sums.device)] = self.slots.sum(0)
        dist.all_reduce(sums)
        self.reductions += 1
        self.bytes_reduced += sums.nbytes
        return sums.cpu().numpy()
