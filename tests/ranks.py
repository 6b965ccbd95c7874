"""Start a script on several CPU ranks, as a launcher would, and collect what they print."""

import os
import subprocess
import sys
from pathlib import Path

from aah_dist.parallel.launch import free_port

REPOSITORY = Path(__file__).resolve().parents[1]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a CPU rank: one thread, no W&B, no variables of an outer launcher."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WANDB_API_KEY", "WANDB_MODE")
    kept = {key: value for key, value in os.environ.items() if key not in outer}
    return {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY), **extra}


def rank_environments(ranks: int, **extra: str) -> list[dict[str, str]]:
    port = str(free_port())
    return [environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **extra) for rank in range(ranks)]


def start_ranks(ranks: int, argv: list[str], cwd: Path, **extra: str) -> list[subprocess.Popen]:
    """One process a rank, stdout and stderr joined in cwd/rankN.log (a pipe that is not read would stop its writer)."""
    return [subprocess.Popen([sys.executable, *argv], cwd=cwd, env=env, stderr=subprocess.STDOUT,
                             stdout=open(cwd / f"rank{rank}.log", "w"))
            for rank, env in enumerate(rank_environments(ranks, **extra))]


def run_ranks(ranks: int, argv: list[str], cwd: Path, timeout: float = 600, **extra: str) -> list[tuple[int, str]]:
    """(exit code, output) of each rank."""
    processes = start_ranks(ranks, argv, cwd, **extra)
    return wait_for(processes, cwd, timeout)


def wait_for(processes: list[subprocess.Popen], cwd: Path, timeout: float = 600) -> list[tuple[int, str]]:
    """(exit code, output) of each rank; all are killed when one takes longer than `timeout` seconds."""
    try:
        for process in processes:
            process.wait(timeout=timeout)
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, (cwd / f"rank{rank}.log").read_text()) for rank, process in enumerate(processes)]


def pretrain(ranks: int, options: list[str], cwd: Path, **extra: str) -> list[tuple[int, str]]:
    return run_ranks(ranks, [str(REPOSITORY / "aah_dist" / "pretrain.py"), *options], cwd, **extra)
