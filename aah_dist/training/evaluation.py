"""Loss on the validation split; changes no state of the run."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from aah_dist.data.dataset import TokenRows


def batch_tensors(rows: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of T+1 tokens -> tokens, positions, labels, each int64 [B, T]."""
    block = torch.from_numpy(np.stack(rows)).to(device, non_blocking=True)
    tokens, labels = block[:, :-1].contiguous(), block[:, 1:].contiguous()
    return tokens, torch.arange(tokens.shape[1], device=device).expand_as(tokens), labels


def perplexity(loss: float) -> float:
    """exp of a loss in nats; inf above what a double holds (the paper's initial weights start at such losses)."""
    return math.exp(loss) if loss < 709 else math.inf


def validation_loss(forward: Callable[..., torch.Tensor], model: nn.Module, rows: TokenRows, samples: int, *,
                    micro_batch_size: int, dp_rank: int, dp_size: int, dp_group: dist.ProcessGroup,
                    device: torch.device) -> tuple[float, int]:
    """Mean loss per token in nats over the first `samples` rows, and the number of tokens.

    Row r is read by data-parallel rank r mod dp_size.  Every rank runs the same number of forwards (ZeRO-3 gathers
    parameters in each); the last one may hold repeats, which do not count.
    """
    total = min(samples, len(rows))
    mine = list(range(dp_rank, total, dp_size))
    forwards = math.ceil(math.ceil(total / dp_size) / micro_batch_size)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for number in range(forwards):
            wanted = mine[number * micro_batch_size:(number + 1) * micro_batch_size]
            filled = [rows[r] for r in wanted] or [rows[0]]
            tokens, positions, labels = batch_tensors(filled, device)
            losses = forward(tokens, positions, None, labels=labels)[:len(wanted)]
            sums[0] += losses.double().sum()
            sums[1] += losses.numel()
    model.train(was_training)
    dist.all_reduce(sums, group=dp_group)
    return float(sums[0] / sums[1]), int(sums[1])
