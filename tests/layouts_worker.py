"""Train one small model under the controller in several cases on this job's ranks and store every window of every step.

argv: a JSON file with {"tp": N, "data": folder, "out": folder, "cases": {name: {"overrides": {...}, "zero": stage,
"mutant": null}}}.  Rank R writes out/NAME-R.npz: windows [steps + 1, layers, heads]; rank 0 also losses, the
features, margins and choices of all decisions, and how often each collective was called between steps.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from aah_dist.config.deepspeed import build_ds_config
from aah_dist.config.load import load_config
from aah_dist.config.schema import RunConfig
from aah_dist.config.validate import resolve_head_blocks, resolve_layout
from aah_dist.control.controller import Controller
from aah_dist.control.weights import ScorerWeights, in_precision
from aah_dist.parallel import device as devices
from aah_dist.parallel import launch
from aah_dist.training import policy as policies
from aah_dist.training import start, statistics
from aah_dist.training import trainer as trainers
from aah_dist.training.checkpoint import Checkpoint

BASE = {
    "model.num_layers": 4, "model.hidden_size": 96, "model.num_heads": 12, "model.seq_length": 48,
    "model.ffn_hidden_size": 192, "model.position": "learned", "model.norm": "layernorm", "model.dropout": 0.0,
    "aah.windows": [6, 12, 24, 48], "aah.warmup_steps": 5, "aah.interval": 5, "aah.entropy_rows": 8,
    "aah.backend": "dense",  # the quickest at this length
    "train.steps": 40, "train.global_batch_size": 8, "train.micro_batch_size": 8, "train.warmup_steps": 0,
    "train.lr": 1e-3, "train.min_lr": 1e-4, "train.decay_steps": 40, "train.seed": 9,
}
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce", "barrier")
# As drawn, the controller chooses nearly the same for all heads of so small a model.
WEIGHT_SCALES = (2.0, 0.3, 1.5, 0.3)
WEIGHT_SEED, GAIN_SEED = 7009, 8009


def widen(controller: Controller) -> None:
    """Scorers drawn much wider, a function of the layer alone."""
    for layer, weights in enumerate(controller.weights):
        draw = np.random.default_rng(WEIGHT_SEED + layer)
        mlps = [tuple(draw.standard_normal(p.shape) * scale for p, scale in zip(mlp, WEIGHT_SCALES, strict=True))
                for mlp in (weights.independent, weights.joint)]
        controller.weights[layer] = in_precision(ScorerWeights(*mlps), controller.settings)


def with_gains(build: Callable) -> Callable:
    """build_gpt whose query, key and value rows have another gain in every head, whatever the TP size."""
    def gained(model, *args, tp_rank: int, tp_size: int, **options):
        gpt = build(model, *args, tp_rank=tp_rank, tp_size=tp_size, **options)
        local = model.num_heads // tp_size
        for number, layer in enumerate(gpt.decoder.layers):
            gains = 0.4 + 2.2 * np.random.default_rng(GAIN_SEED + number).random((model.num_heads, 3))
            mine = torch.from_numpy(gains[tp_rank * local : (tp_rank + 1) * local])
            weight = layer.self_attention.linear_qkv.weight
            weight.data.view(local, 3, model.head_dim, -1).mul_(mine[:, :, None, None].to(weight.dtype))
        return gpt
    return gained


class Collectives:
    """Counts calls of torch.distributed's collectives while entered."""

    def __init__(self) -> None:
        self.calls = dict.fromkeys(COLLECTIVES, 0)

    def __enter__(self) -> None:
        self._originals = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, original in self._originals.items():
            setattr(dist, name, self._counted(name, original))

    def __exit__(self, *unused: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counted(self, name: str, original: Callable) -> Callable:
        def call(*args, **options):
            self.calls[name] += 1
            return original(*args, **options)
        return call


def spoil(mutant: str | None, mpu) -> None:
    """What the modules under test take for torch.distributed."""
    statistics.dist, policies.dist = dist, dist
    if mutant in ("no_dp_sum", "every_rank_decides"):
        group = mpu.get_tensor_model_parallel_group()
        statistics.dist = SimpleNamespace(all_reduce=lambda sums: dist.all_reduce(sums, group=group))
    if mutant == "every_rank_decides":
        policies.dist = SimpleNamespace(get_rank=lambda: 0, broadcast=lambda choice, src: None)


def configuration(job: dict, regime: str, overrides: dict) -> RunConfig:
    return load_config("demo", regime, {"data.path": job["data"], "parallel.tensor_parallel_size": job["tp"],
                                        **overrides})


def make_trainer(config: RunConfig, zero: int, folder: Path, mpu, device: torch.device,
                 resume_from: Checkpoint | None = None, kind: type[trainers.Trainer] = trainers.Trainer):
    """fp32, scorers widened; those of a checkpoint are left as they were saved."""
    layout = resolve_layout(config, dist.get_world_size())
    config.aah.head_blocks = resolve_head_blocks(config, layout)
    ds = build_ds_config({"zero_optimization": {"stage": zero}, "bf16": {"enabled": False}}, config, layout)
    trainer = kind(config, layout, ds, start.open_data(config), mpu, device, folder, resume_from)
    if trainer.policy.controller is not None and resume_from is None:
        widen(trainer.policy.controller)
    return trainer


def join_job(job: dict) -> tuple[object, torch.device]:
    """This rank's process groups and device; models are built with gains from here on."""
    device = devices.select_device("cpu", launch.discover().local_rank)
    trainers.build_gpt = with_gains(trainers.build_gpt)
    return start.join_job(configuration(job, "full_adaptive", {}), {}, job["tp"], device), device


def run_case(case: dict, job: dict, mpu, device: torch.device) -> dict[str, np.ndarray]:
    config = configuration(job, "full_adaptive", {**BASE, **case["overrides"]})
    trainer = make_trainer(config, case["zero"], Path(job["out"]), mpu, device)
    policy, collectives = trainer.policy, Collectives()
    windows, losses, decisions = [trainer.context.windows], [], []
    for step in range(config.train.steps):
        policy.decision = None
        with collectives:
            policy.begin(step, False)
        losses.append(trainer.train_step(step).loss)
        with collectives:
            policy.end(step)
        windows.append(trainer.context.windows)
        if policy.decision is not None:
            decisions.append(policy.decision)
    if dist.get_rank() != 0:
        return {"windows": np.array(windows)}
    return {"windows": np.array(windows), "losses": np.array(losses),
            "features": np.array([[layer.features for layer in decision.layers] for decision in decisions]),
            "margins": np.array([[layer.margin for layer in decision.layers] for decision in decisions]),
            "choices": np.array([decision.choice for decision in decisions]),
            "reductions": policy.buffer.reductions, "bytes": policy.buffer.bytes_reduced,
            **{f"calls/{name}": count for name, count in collectives.calls.items()}}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    mpu, device = join_job(job)
    for name, case in job["cases"].items():
        spoil(case.get("mutant"), mpu)
        np.savez(Path(job["out"]) / f"{name}-{dist.get_rank()}.npz", **run_case(case, job, mpu, device))
        dist.barrier()


if __name__ == "__main__":
    main()
