"""Interrupt, spoil and resume small runs in many ways on this job's data-parallel ranks; one launch for all of them.

argv: a JSON file with {"data": folder, "out": folder}.  Rank R writes out/report-R.json: {case: what happened}.
"""

import json
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from aah_dist.config.deepspeed import build_ds_config
from aah_dist.config.load import load_config
from aah_dist.config.schema import ConfigError
from aah_dist.config.validate import Layout, resolve_layout
from aah_dist.data.dataset import PreparedData
from aah_dist.parallel import device as devices
from aah_dist.parallel import launch
from aah_dist.parallel.gradients import FiniteWatch
from aah_dist.training import checkpoint as checkpoints
from aah_dist.training import engine as engines
from aah_dist.training import run_folder, start
from aah_dist.training.trainer import NonFiniteError, Trainer

STEPS, SAVED = 6, 3
SETTINGS = {
    "model.num_layers": 2, "model.hidden_size": 48, "model.num_heads": 4, "model.seq_length": 40, "model.dropout": 0.1,
    "aah.windows": [3, 16, 40], "aah.policy": "fixed_window", "aah.fixed_window": [3, 40, 16, 1],
    "train.steps": STEPS, "train.warmup_steps": 2, "train.lr": 1e-2, "train.min_lr": 1e-4,
    "train.eval_interval": 2, "train.eval_samples": 5,
    "parallel.tensor_parallel_size": 1, "checkpoint.interval": SAVED, "log.interval": 1, "log.progress_bar": "off",
}
CASES = {"zero0-fp32": (0, False), "zero1-fp32": (1, False), "zero1-bf16": (1, True), "zero2-fp32": (2, False),
         "zero2-bf16": (2, True), "zero3-fp32": (3, False), "zero3-bf16": (3, True)}
RESUMED = ("zero0-fp32", "zero1-bf16", "zero2-bf16", "zero3-fp32", "zero3-bf16")
POISONED_RANK = 1


class PoisonedWatch(FiniteWatch):
    """One entry of the gradient of one parameter of one rank becomes Inf, before the watch looks."""

    poison = False
    blind = False

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            if not PoisonedWatch.poison or dist.get_rank() != POISONED_RANK:
                return gradient
            spoiled = gradient.clone()
            spoiled.view(-1)[-1] = float("inf")
            return spoiled

        list(model.parameters())[-1].register_hook(spoil)
        super().__init__(model, device)

    @property
    def finite(self) -> torch.Tensor:
        return torch.ones_like(self._finite) if PoisonedWatch.blind else super().finite


class Signalled(Trainer):
    """Receives a signal on one rank in the middle of a step."""

    number = 0

    def train_step(self, step: int, request: object = None) -> object:
        if step == SAVED - 2 and self.rank == 1:
            os.kill(os.getpid(), self.number)
        return super().train_step(step, request)


class Lab:
    """Makes trainers of one data set and device."""

    def __init__(self, job: dict) -> None:
        self.job, self.out = job, Path(job["out"])
        ranks = launch.discover()
        self.device = devices.select_device("cpu", ranks.local_rank)
        # 3.5 batches of 2 ranks x 2 micro batches an epoch: it ends inside step 4, the first after the checkpoint.
        self.data = PreparedData(Path(job["data"]))
        self.micro = len(self.data.split("train", SETTINGS["model.seq_length"])) // 14
        batch = {"train.micro_batch_size": self.micro, "train.global_batch_size": 4 * self.micro}
        self.config = load_config("demo", overrides={**SETTINGS, **batch, "data.path": job["data"]})
        self.mpu = start.join_job(self.config, {}, 1, self.device)
        self.layout: Layout = resolve_layout(self.config, ranks.world_size)
        self.rank = dist.get_rank()

    def trainer(self, name: str, stage: int, bf16: bool, *, resume: bool = False,
                kind: type[Trainer] = Trainer) -> Trainer:
        folder = self.out / name
        if self.rank == 0:
            folder.mkdir(exist_ok=True)
        dist.barrier()
        engine = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}}
        ds = build_ds_config(engine, self.config, self.layout)
        found = checkpoints.newest_complete(folder / "checkpoints")[0] if resume else None
        return kind(self.config, self.layout, ds, self.data, self.mpu, self.device, folder, found)

    def on_rank0(self, work: object) -> None:
        if self.rank == 0:
            work()
        dist.barrier()


def parameters(trainer: Trainer) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(trainer.engine.module.parameters())):
        return [p.detach().clone() for p in trainer.engine.module.parameters()]


def resumed(lab: Lab, name: str, stage: int, bf16: bool) -> dict:
    """A whole run, then the same again from its checkpoint in the middle."""
    folder = lab.out / name
    last = folder / "checkpoints" / f"step_{STEPS:08d}"
    weights = last / checkpoints.weights_name(0, 1)
    report: dict[str, object] = {"codes": [lab.trainer(name, stage, bf16).fit()]}
    report["whole"], report["whole_weights"] = (folder / "metrics.jsonl").read_text(), weights.read_bytes().hex()
    dist.barrier()
    lab.on_rank0(lambda: shutil.rmtree(last))
    report["codes"].append(lab.trainer(name, stage, bf16, resume=True).fit())
    report["again"], report["again_weights"] = (folder / "metrics.jsonl").read_text(), weights.read_bytes().hex()
    report["policy"] = (folder / "policy.jsonl").read_text()
    return report


class Exploit:
    """Unpickled by a careless torch.load, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


def exploited(lab: Lab, name: str, stage: int, bf16: bool) -> dict:
    """Load a checkpoint whose files hold code; sizes in the manifest are made to fit."""
    target = lab.out / f"{name}-executed"

    def spoil() -> None:
        folder = checkpoints.newest_complete(lab.out / name / "checkpoints")[0].path
        manifest = json.loads((folder / "manifest.json").read_text())
        for file in folder.glob("*.pt"):
            torch.save({"module": Exploit(target)}, file, pickle_module=pickle)
            manifest["files"][file.name] = file.stat().st_size
        (folder / "manifest.json").write_text(json.dumps(manifest))

    lab.on_rank0(spoil)
    try:
        lab.trainer(name, stage, bf16, resume=True)
        problem = ""
    except ConfigError as error:
        problem = str(error)
    dist.barrier()
    return {"problem": problem, "executed": target.exists()}


def non_finite(lab: Lab, name: str, stage: int, bf16: bool) -> dict:
    """Good steps, then one with a spoiled loss or gradient on one rank; also one that the watch does not see."""
    report = {}
    trainer = None
    for what in ("unwatched", "gradient", "loss"):
        if what != "gradient" or stage == 0:  # ZeRO 1 to 3 clean up after the step that they skipped themselves
            trainer = lab.trainer(name, stage, bf16)
            trainer.train_step(0)
            trainer.train_step(1)
        before = parameters(trainer)
        if what == "loss":
            trainer.engine.module.register_forward_hook(
                lambda module, inputs, loss: loss * (float("nan") if lab.rank == POISONED_RANK else 1))
        PoisonedWatch.poison, PoisonedWatch.blind = what != "loss", what == "unwatched"
        try:
            trainer.train_step(2)
            problem = ""
        except NonFiniteError as error:
            problem = str(error)
        PoisonedWatch.poison = PoisonedWatch.blind = False
        same = all(torch.equal(a, b) for a, b in zip(before, parameters(trainer), strict=True))
        first = 2 * 4 * lab.micro
        rows = [trainer.order.row(first + k) for k in range(4 * lab.micro) if k // lab.micro % 2 == POISONED_RANK]
        report[what] = {"problem": problem, "same": same, "rows": rows}
    return report


def signalled(lab: Lab, name: str, number: int) -> dict:
    Signalled.number = number
    before = [signal.getsignal(n) for n in (number, signal.SIGINT)]
    code = lab.trainer(name, 2, False, kind=Signalled).fit()
    newest, _ = checkpoints.newest_complete(lab.out / name / "checkpoints")
    lines = (lab.out / name / "metrics.jsonl").read_text().splitlines()
    after = [signal.getsignal(n) for n in (number, signal.SIGINT)]
    return {"code": code, "step": newest.step, "handlers_restored": before == after,
            "logged": [json.loads(line)["step"] for line in lines]}


def restarted(lab: Lab) -> dict:
    """Start again in a folder whose run has recorded steps but no checkpoint."""
    folder = lab.out / "restarted"
    lab.on_rank0(lambda: folder.mkdir())
    lines = [{"step": 0, "run/started": 1}, {"step": 1, "train/loss": 9.0}]
    lab.on_rank0(lambda: (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines)))
    lab.trainer("restarted", 2, False).fit()
    return {"metrics": (folder / "metrics.jsonl").read_text(),
            "finished": not run_folder.is_unfinished(folder)}


def main() -> None:
    lab = Lab(json.loads(Path(sys.argv[1]).read_text()))
    engines.FiniteWatch = PoisonedWatch
    report = {}
    for name, (stage, bf16) in CASES.items():
        report[f"non-finite {name}"] = non_finite(lab, f"non-finite-{name}", stage, bf16)
        if name in RESUMED:
            report[name] = resumed(lab, name, stage, bf16)
            report[f"exploit {name}"] = exploited(lab, name, stage, bf16)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        report[signal.Signals(number).name] = signalled(lab, f"signal-{number}", number)
    report["restarted"] = restarted(lab)
    (lab.out / f"report-{lab.rank}.json").write_text(json.dumps(report))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
