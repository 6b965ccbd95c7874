"""Train one small model in several cases on this job's ranks and store what each did.

argv: a JSON file with {"tp": N, "data": folder, "out": folder, "cases": {name: {"overrides": {...}, "zero": stage,
"precision": "fp32", "mutant": null}}}.  Rank 0 writes out/NAME.npz: losses, norms, and full tensors grad/* and param/*.
"""

import json
import sys
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

from aah_dist.config.deepspeed import build_ds_config
from aah_dist.config.load import load_config
from aah_dist.config.validate import resolve_layout
from aah_dist.model.shards import is_split, join
from aah_dist.parallel import device as devices
from aah_dist.parallel import launch
from aah_dist.training import engine as engines
from aah_dist.training import start
from aah_dist.training.trainer import Trainer

PARAMETERS_AFTER = 5
BASE = {
    "model.num_layers": 2, "model.hidden_size": 48, "model.num_heads": 4, "model.seq_length": 40,
    "model.position": "learned", "model.norm": "layernorm",
    "aah.windows": [3, 16, 40], "aah.policy": "fixed_window", "aah.fixed_window": [3, 40, 16, 1],
    "train.steps": 30, "train.micro_batch_size": 2, "train.global_batch_size": 4, "train.warmup_steps": 0,
    "train.lr": 1e-3, "train.min_lr": 1e-4,
}


class ProbedTrainer(Trainer):
    """Keeps the full gradient of the first step."""

    gradients: dict[str, np.ndarray]

    def _update(self, step: int) -> float:
        if step == 0:
            self.gradients = {}
            for name, parameter in self.engine.module.named_parameters():
                stage_0 = self.engine.zero_optimization_stage() == 0
                gradient = parameter.grad if stage_0 else safe_get_full_grad(parameter)
                self.gradients[name] = self.full(parameter, gradient)
        return super()._update(step)

    def full(self, parameter: torch.nn.Parameter, shard: torch.Tensor) -> np.ndarray:
        shard = shard.detach().float().contiguous()
        if is_split(parameter):
            group = self.mpu.get_tensor_model_parallel_group()
            shards = [torch.empty_like(shard) for _ in range(self.layout.tp)]
            dist.all_gather(shards, shard, group=group)
            shard = join(shards, parameter.partition_dim, parameter.partition_stride)
        return shard.numpy().copy()

    def parameters(self) -> dict[str, np.ndarray]:
        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters())):
            return {name: self.full(p, p.data) for name, p in self.engine.module.named_parameters()}


def run_case(case: dict, job: dict, mpu, device: torch.device) -> dict[str, np.ndarray]:
    config = load_config("demo", overrides={**BASE, "data.path": job["data"],
                                            "parallel.tensor_parallel_size": job["tp"], **case.get("overrides", {})})
    layout = resolve_layout(config, dist.get_world_size())
    bf16 = case.get("precision") == "bf16"
    ds = {"zero_optimization": {"stage": case["zero"]}, "bf16": {"enabled": bf16}}
    ds_config = build_ds_config(ds, config, layout)
    data = start.open_data(config)
    trainer = ProbedTrainer(config, layout, ds_config, data, mpu, device, Path(job["out"]), None)
    losses, norms, parameters = [], [], {}
    for step in range(config.train.steps):
        result = trainer.train_step(step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step + 1 == PARAMETERS_AFTER:
            parameters = trainer.parameters()
    gradients = {f"grad/{name}": value for name, value in trainer.gradients.items()}
    return {"losses": np.array(losses), "norms": np.array(norms), **gradients,
            **{f"param/{name}": value for name, value in parameters.items()}}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    config = load_config("demo", overrides={**BASE, "data.path": job["data"]})
    ranks = launch.discover()
    device = devices.select_device("cpu", ranks.local_rank)
    mpu = start.join_job(config, {}, job["tp"], device)
    install = engines.install_tp_gradient_sum
    for name, case in job["cases"].items():
        engines.install_tp_gradient_sum = (lambda *_: 0) if case.get("mutant") == "no_tp_gradient_sum" else install
        result = run_case(case, job, mpu, device)
        if dist.get_rank() == 0:
            np.savez(Path(job["out"]) / f"{name}.npz", **result)
            print("done", name, flush=True)
        dist.barrier()


if __name__ == "__main__":
    main()
