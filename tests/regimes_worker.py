"""Train one small model under each regime on this job's ranks and store what the controller did.

argv: a JSON file with {"tp": N, "data": folder, "out": folder, "cases": {regime: overrides}}.  Rank R writes
out/REGIME-R.pickle with

    windows     of every step, and of the one after the last: [layers, heads]
    losses      of every step
    config, settings  as resolved; settings None without a controller, as is all below
    raw         the choice in force at each step, None before the first
    decisions   by the step they are for, on rank 0
"""

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from layouts_worker import configuration, join_job, make_trainer

BASE = {
    "model.num_layers": 3, "model.hidden_size": 64, "model.num_heads": 8, "model.seq_length": 48,
    "model.position": "learned", "model.norm": "layernorm", "model.dropout": 0.0,
    "aah.windows": [0.125, 0.25, 0.5, 1.0], "aah.warmup_steps": 5, "aah.interval": 5, "aah.entropy_rows": 16,
    "aah.backend": "dense",
    "train.steps": 30, "train.global_batch_size": 4, "train.micro_batch_size": 4, "train.warmup_steps": 0,
    "train.lr": 1e-3, "train.min_lr": 1e-4, "train.seed": 3,
}
# This step of the warm-up is followed by a log line, which shows what would be decided.
SHOWN = 2


def run_case(regime: str, overrides: dict, job: dict, mpu, device: torch.device) -> SimpleNamespace:
    config = configuration(job, regime, {**BASE, **overrides})
    trainer = make_trainer(config, 2, Path(job["out"]), mpu, device)
    policy, controller = trainer.policy, trainer.policy.controller
    run = SimpleNamespace(windows=[trainer.context.windows], losses=[], config=config,
                          settings=controller and controller.settings, raw=[None], decisions={})
    for step in range(config.train.steps):
        policy.decision = None
        policy.begin(step, step == SHOWN)
        run.losses.append(trainer.train_step(step).loss)
        policy.end(step)
        run.windows.append(trainer.context.windows)
        if controller is not None:
            run.raw.append(controller.choice)
        if policy.decision is not None:
            run.decisions[step + 1] = policy.decision
    return run


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    mpu, device = join_job(job)
    for regime, overrides in job["cases"].items():
        run = run_case(regime, overrides, job, mpu, device)
        (Path(job["out"]) / f"{regime}-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(run))
        dist.barrier()


if __name__ == "__main__":
    main()
