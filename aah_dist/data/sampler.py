"""The order in which rows are trained on: an endless, seeded stream that knows nothing of ranks."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


class SampleOrder:
    """Sample k of the stream is row `row(k)`; each epoch of `num_rows` samples is a permutation of all rows.

    The permutation of epoch e depends on (seed, e) only. It sorts the raw output of PCG64, which numpy promises never
    to change (unlike Generator.permutation), so a run can be resumed under another version of numpy.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1 or seed < 0:
            raise ValueError(f"num_rows {num_rows} must be at least 1 and seed {seed} at least 0")
        self.num_rows = num_rows
        self.seed = seed
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.num_rows)
        return np.argsort(bits, kind="stable")

    def row(self, k: int) -> int:
        """Row of the k-th sample, k >= 0."""
        epoch, position = divmod(k, self.num_rows)
        return int(self._epoch(epoch)[position])


def micro_batch_ids(step: int, micro: int, dp_rank: int, dp_size: int, micro_batch_size: int,
                    global_batch_size: int) -> list[int]:
    """Sample numbers k of micro batch `micro` of data-parallel rank `dp_rank` in step `step`.

    Step s takes k in [s*G, (s+1)*G) whatever the layout. Raises ValueError for a micro batch outside the step.
    """
    offset = (micro * dp_size + dp_rank) * micro_batch_size
    if not 0 <= offset <= global_batch_size - micro_batch_size or not 0 <= dp_rank < dp_size:
        raise ValueError(f"micro batch {micro} of rank {dp_rank} of {dp_size} lies outside the global batch "
                         f"of {global_batch_size}")
    first = step * global_batch_size + offset
    return list(range(first, first + micro_batch_size))
