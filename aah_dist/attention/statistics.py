"""What the controller is told about each head, as sums, without T x T memory.

The source is AAH-v3's head features and history (its section 1.1), with three differences: sums instead of means, so
that they add over samples, ranks and the heads of a group; the entropy over a stratified sample of query rows; and
probabilities before attention dropout.  The published code measures entropy and last-key mass on the probabilities
after dropout, with its zeros and its 1/(1 - p), so that there both depend on the mask drawn and on the rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aah_dist.config.statistics import COLUMNS

# Elements in one go: on CPU what stays in a core's cache, elsewhere what keeps the launches few.
CPU_BLOCK, DEVICE_BLOCK = 1 << 19, 1 << 22
ROW = 128  # elements summed in fp32 at a time: tokens of smaller heads are taken together, short reductions are slow


@dataclass(frozen=True)
class RowSample:
    """Query rows that stand for all T of them: a sum over all rows is estimated by sum(weights * value[rows])."""

    rows: np.ndarray
    """int64 [n], ascending."""
    weights: np.ndarray
    """float64 [n], summing to T."""


def sample_rows(length: int, count: int, seed: int, step: int, layer: int) -> RowSample:
    """One row drawn uniformly from each of `count` contiguous strata whose sizes differ by at most one.

    A row weighs as much as its stratum has rows, which makes the estimate of a sum unbiased.  Only the arguments decide
    the draw, so it is the same in every layout.  count of 0, or of at least `length`: every row once, which is exact.
    """
    if count == 0 or count >= length:
        return RowSample(np.arange(length), np.ones(length))
    bounds = np.arange(count + 1) * length // count
    rows = np.random.default_rng([seed, step, layer]).integers(bounds[:-1], bounds[1:])
    return RowSample(rows, np.diff(bounds).astype(np.float64))


@torch.no_grad()
def measure(q: Tensor, k: Tensor, v: Tensor, out: Tensor, windows: Sequence[int] | np.ndarray, scale: float,
            sample: RowSample) -> Tensor:
    """The columns of config/statistics.py: float64 [H, len(COLUMNS)] on q's device, of one layer and one batch.

    q, out: [B, H, T, D]; k, v: [B, H_kv, T, D], any strides; out is what was executed, q and k are as the scores use
    them.  windows: H integers; query i of head h reads keys j with i - windows[h] < j <= i.  scale: factor on the
    scores.  sample: the rows whose entropy is measured.

    A query head's k and v sums are those of the key/value head it reads.  Work is in fp32 within a row (fp64 for fp64
    inputs) and in fp64 over rows.  Nothing is read back to the host.
    """
    batch, heads, length, size = q.shape
    share = heads // k.shape[1]
    blocks = _Blocks(q)
    with torch.autocast(q.device.type, enabled=False):
        entropy, last_mass, k_sums = _keys_pass(q, k, windows, scale, sample, blocks)
        q_sums, v_sums = (torch.cat([blocks.sums(part) for part in blocks.of(x)]) for x in (q, v))
        norm = torch.cat([_row_norms(part).sum(-1, dtype=torch.float64) for part in blocks.of(out)])
    columns = {
        "rows": torch.full_like(norm, length), "values": torch.full_like(norm, length * size),
        "entropy": entropy, "norm": norm, "last_mass": last_mass,
    }
    for name, sums in (("q", q_sums), ("k", k_sums), ("v", v_sums)):
        of_head = sums if name == "q" else sums.repeat_interleave(share, 0)
        for kind, column in zip(("sum", "square", "abs"), of_head.unbind(-1), strict=True):
            columns[f"{name}_{kind}"] = column
    return torch.stack([columns[name] for name in COLUMNS], -1).view(batch, heads, -1).sum(0)


class _Blocks:
    """Cuts [B, H, T, D] into [n, T, D] in the working dtype, with one buffer for all: each is read from memory once."""

    def __init__(self, like: Tensor) -> None:
        batch, heads, length, size = like.shape
        self.elements = CPU_BLOCK if like.is_cpu else DEVICE_BLOCK
        self.num = max(1, min(batch * heads, self.elements // (length * size)))
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.buffer = torch.empty(self.num, length, size, dtype=dtype, device=like.device)

    def of(self, x: Tensor) -> Iterator[Tensor]:
        """Each is valid until the next or until sums() of it; x itself is not changed."""
        for part in x.flatten(0, 1).split(self.num):
            as_is = part.dtype == self.buffer.dtype and part.is_contiguous()
            yield part if as_is else self.buffer[: len(part)].copy_(part)

    def sums(self, part: Tensor) -> Tensor:
        """[n, T, D], contiguous -> float64 [n, 3]: sum, sum of squares, sum of absolute values."""
        if part.shape[-1] < ROW and part[0].numel() % ROW == 0:
            part = part.view(len(part), -1, ROW)
        rows = [part.sum(-1), _row_norms(part).square_()]
        rows.append(torch.abs(part, out=self.buffer[: len(part)].view_as(part)).sum(-1))
        return torch.stack(rows, 1).sum(-1, dtype=torch.float64)


def _row_norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def _keys_pass(q: Tensor, k: Tensor, windows: Sequence[int] | np.ndarray, scale: float, sample: RowSample,
               blocks: _Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy [B*H], last-key mass [B*H] and k's sums [B*H_kv, 3], float64, from one pass over k."""
    batch, heads, length, _ = q.shape
    share, dtype = heads // k.shape[1], blocks.buffer.dtype
    # The last row is measured as well, for the last-key mass; in the entropy it counts only where it was drawn.
    rows, weights = np.append(sample.rows, length - 1), np.append(sample.weights, 0.0)
    rows_there, weights_there = (torch.from_numpy(x).to(q.device) for x in (rows, weights))
    of_kv_head = q.flatten(0, 1).unflatten(0, (-1, share))
    limits = np.tile(np.asarray(windows, dtype=np.int64), batch).reshape(-1, share)
    limits_there = torch.from_numpy(limits).to(q.device)[:, :, None, None]
    entropies, last_masses, sums, first = [], [], [], 0
    for keys in blocks.of(k):
        part = slice(first, first := first + len(keys))
        bounds = int(limits[part].min()), int(limits[part].max())
        queries = of_kv_head[part].index_select(2, rows_there).to(dtype).mul_(scale)
        per_row, last = _row_entropies(queries, keys, rows, rows_there, bounds, limits_there[part],
                                       blocks.elements)
        entropies.append((per_row.double() * weights_there).sum(-1).flatten())
        last_masses.append(last.double().flatten())
        sums.append(blocks.sums(keys))
    return torch.cat(entropies), torch.cat(last_masses), torch.cat(sums)


def _row_entropies(queries: Tensor, keys: Tensor, rows: np.ndarray, rows_there: Tensor, bounds: tuple[int, int],
                   limits: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """-sum_j A ln(A + 1e-9) of each row [n, share, rows], and A[T-1, T-1] of the last row [n, share].

    queries [n, share, rows, D], scaled; keys [n, T, D]; limits: windows [n, share, 1, 1], from bounds[0] to bounds[1].
    """
    num, share, _, _ = queries.shape
    narrowest, widest = bounds
    # A third of the rows at most, so that few keys after a row's own are multiplied for nothing.
    at_once = max(1, min(-(-len(rows) // 3), elements // (num * share * keys.shape[1])))
    entropies = []
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        first, last = int(rows[start]), int(rows[part][-1])
        low, row = max(0, first - widest + 1), rows_there[part, None]
        scores = queries[:, :, part].flatten(1, 2) @ keys[:, low : last + 1].transpose(1, 2)
        scores = scores.view(num, share, -1, last + 1 - low)
        if last > first:
            after = torch.arange(first + 1, last + 1, device=keys.device)
            scores[..., first + 1 - low :].masked_fill_(after > row, float("-inf"))
        if last - narrowest >= low:
            before = torch.arange(low, last - narrowest + 1, device=keys.device)
            scores[..., : len(before)].masked_fill_(before <= row - limits, float("-inf"))
        probabilities = scores.softmax(-1)
        entropies.append(-(probabilities + 1e-9).log_().mul_(probabilities).sum(-1))
    return torch.cat(entropies, -1), probabilities[:, :, -1, -1]
