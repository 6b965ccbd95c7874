"""Stop, resume, extend and evaluate small runs under the controller on this job's ranks; one launch for all of them.

argv: a JSON file with {"tp": N, "data": folder, "out": folder, "regimes": {regime: step it is stopped after}}.  Runs
are written to out/REGIME/{whole, stopped} and out/{evaluated, extended}; rank 0 writes out/codes.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from layouts_worker import configuration, join_job, make_trainer
from regimes_worker import BASE

from aah_dist.training.checkpoint import newest_complete
from aah_dist.training.trainer import StepResult, Trainer

STEPS, SHORTER = 22, 13
RUN = {
    **BASE, "model.dropout": 0.1, "train.steps": STEPS, "train.decay_steps": STEPS,
    "train.eval_interval": 0, "train.eval_samples": 3, "checkpoint.interval": 0, "log.interval": 1,
    "log.progress_bar": "off",
}


class Stopped(Trainer):
    """Receives SIGTERM on one rank during the last step it does."""

    after = 0

    def train_step(self, step: int, request: object = None) -> StepResult:
        if step == self.after - 1 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_step(step, request)


class Lab:
    """Runs one regime after the other."""

    def __init__(self, job: dict) -> None:
        self.job, self.out = job, Path(job["out"])
        self.mpu, self.device = join_job(job)

    def fit(self, regime: str, folder: str, changes: dict | None = None, kind: type[Trainer] = Trainer) -> int:
        """Train in out/FOLDER, from its newest checkpoint if there is one; the exit code."""
        path = self.out / folder
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        config = configuration(self.job, regime, {**RUN, **(changes or {})})
        found = newest_complete(path / "checkpoints")[0]
        trainer = make_trainer(config, 2, path, self.mpu, self.device, found, kind)
        # DeepSpeed draws nothing, and neither may the run: another state of the generator changes nothing.
        torch.manual_seed(len(folder) + (found is not None))
        return trainer.fit()


def main() -> None:
    lab = Lab(json.loads(Path(sys.argv[1]).read_text()))
    codes = {}
    for regime, after in lab.job["regimes"].items():
        Stopped.after = after
        codes[regime] = [lab.fit(regime, f"{regime}/whole"), lab.fit(regime, f"{regime}/stopped", kind=Stopped),
                         lab.fit(regime, f"{regime}/stopped")]
    codes["evaluated"] = [lab.fit("full_adaptive", "evaluated", {"train.eval_interval": 1, "log.interval": 1000})]
    codes["extended"] = [lab.fit("full_adaptive", "extended", {"train.steps": SHORTER}),
                         lab.fit("full_adaptive", "extended")]
    if dist.get_rank() == 0:
        (lab.out / "codes.json").write_text(json.dumps(codes))
    dist.barrier()


if __name__ == "__main__":
    main()
