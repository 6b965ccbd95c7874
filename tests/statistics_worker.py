"""Statistics of one step of a small model on this job's ranks, split over TP or over DP.

argv: TP size, folder.  Rank R writes FOLDER/rankR.npz: `sums`, and `bytes`, one entry for each all-reduce of reduce().
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from aah_dist.config.schema import ModelConfig
from aah_dist.model.context import StepContext
from aah_dist.parallel import device as devices
from aah_dist.parallel import launch, topology
from aah_dist.training.statistics import StatisticsBuffer

CPU = torch.device("cpu")
SAMPLES, VOCABULARY, STEP, ENTROPY_ROWS = 4, 37, 6, 5
# Key and value heads are fewer than query heads, and dropout is on.
MODEL = ModelConfig(num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=2, seq_length=12, vocab_multiple=16,
                    dropout=0.2, position="rope", norm="rmsnorm")
WINDOWS = np.array([[1, 3, 12, 7], [12, 12, 12, 12], [7, 1, 3, 12]])


def start(tp: int) -> None:
    """Form the process groups that build_gpt needs."""
    launch.form_process_group("gloo", 1.0)
    topology.form_groups(tp, 1.0)
    devices.make_portable(CPU, 0)


def model(tp: int = 1, tp_rank: int = 0, recompute: bool = False) -> tuple[torch.nn.Module, StepContext]:
    from aah_dist.model.gpt import build_gpt

    context = StepContext(seed=5, windows=WINDOWS, step=STEP)
    return build_gpt(MODEL, VOCABULARY, context, tp_rank=tp_rank, tp_size=tp, sequence_parallel=tp > 1,
                     recompute=recompute, dtype=torch.float32, seed=5, device=CPU), context


def buffer(micro_batches: int = 1, tp: int = 1, tp_rank: int = 0, kind: type = StatisticsBuffer) -> StatisticsBuffer:
    local = MODEL.num_heads // tp
    heads = slice(tp_rank * local, (tp_rank + 1) * local)
    return kind(MODEL.num_layers, MODEL.num_heads, heads, micro_batches, CPU, seed=5, entropy_rows=ENTROPY_ROWS,
                length=MODEL.seq_length)


def run_step(gpt: torch.nn.Module, context: StepContext, sink: StatisticsBuffer | None, micro_batches: list[list[int]],
             backward: bool = True) -> None:
    """Forward and backward over micro batches of sample numbers, as a trainer would."""
    block = torch.randint(0, VOCABULARY, (SAMPLES, MODEL.seq_length + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(MODEL.seq_length).expand(SAMPLES, -1)
    context.statistics = sink
    if sink is not None:
        sink.begin(STEP)
    for micro, samples in enumerate(micro_batches):
        if sink is not None:
            sink.select(micro)
        context.samples = samples
        tokens, labels = block[samples, :-1].contiguous(), block[samples, 1:].contiguous()
        loss = gpt(tokens, positions[samples], None, labels=labels).sum()
        if backward:
            loss.backward()


def reduce_counted(sink: StatisticsBuffer) -> tuple[np.ndarray, list[int]]:
    """The sums, and the bytes of each all-reduce."""
    real, counted = dist.all_reduce, []

    def counting(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        counted.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        return sink.reduce(), counted


def main() -> None:
    tp, folder = int(sys.argv[1]), Path(sys.argv[2])
    launch.discover()
    start(tp)
    rank = dist.get_rank()
    (tp_rank, dp_rank), dp = (rank % tp, rank // tp), dist.get_world_size() // tp
    gpt, context = model(tp, tp_rank)
    mine = np.arange(SAMPLES).reshape(2, dp, -1)[:, dp_rank].tolist()
    sink = buffer(len(mine), tp, tp_rank)
    run_step(gpt, context, sink, mine)
    sums, counted = reduce_counted(sink)
    np.savez(folder / f"rank{rank}.npz", sums=sums, bytes=counted)
    dist.barrier()


if __name__ == "__main__":
    main()
