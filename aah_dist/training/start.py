"""What happens between the command line and the first step: ranks, data, the run's folder, where to start from."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from aah_dist.attention import check_backend
from aah_dist.config.deepspeed import offloads_optimizer, precision
from aah_dist.config.load import read_config, to_yaml
from aah_dist.config.schema import ConfigError, RunConfig
from aah_dist.config.validate import Layout, check_resume, resolve_decay_steps, resolve_head_blocks
from aah_dist.data.dataset import PreparedData, check_tokenizer
from aah_dist.parallel import device as devices
from aah_dist.parallel import launch, ops, topology
from aah_dist.training import checkpoint as checkpoints
from aah_dist.training import run_folder

T = TypeVar("T")


def prepare_data(config: RunConfig, ranks: launch.Ranks) -> None:
    """Prepare the configured text if data.path does not exist yet; one rank a machine works, the others wait for it
    where they meet."""
    if config.data.text is None or ranks.local_rank != 0:
        return
    from aah_dist.data.prepare import prepare

    if not Path(config.data.path).exists():
        prepare(config.data.text, config.data.tokenizer, Path(config.data.path),
                valid_fraction=config.data.valid_fraction, workers=len(os.sched_getaffinity(0)))


def open_data(config: RunConfig) -> PreparedData:
    """Raises: ConfigError if the prepared data is missing, damaged, or not what the configuration says."""
    data = PreparedData(Path(config.data.path))
    tokenizer = config.data.tokenizer
    if tokenizer is not None and tokenizer.startswith("sentencepiece-"):
        made_with = data.meta["request"]["tokenizer"]
        if tokenizer != made_with:
            raise ConfigError(f"data.tokenizer is {tokenizer}, but {config.data.path} was made with {made_with}; leave "
                              "it unset, or prepare another folder.")
    elif tokenizer is not None:
        check_tokenizer(data, tokenizer)
    if config.model.vocab_size is not None and config.model.vocab_size < data.vocab_size:
        raise ConfigError(f"model.vocab_size {config.model.vocab_size} is below the {data.vocab_size} tokens of "
                          f"{config.data.path}; give {data.vocab_size} or leave it unset.")
    return data


def check_attention(config: RunConfig, ds_config: dict, device: torch.device) -> None:
    """Raises: ConfigError if aah.backend cannot run this model here."""
    model = config.model
    dtype = torch.bfloat16 if precision(ds_config) == "bf16" else torch.float32
    check_backend(config.aah.backend, device, dtype, model.seq_length, model.head_dim, model.attention_dropout_p)


def join_job(config: RunConfig, ds_config: dict, tp: int, device: torch.device) -> topology.DeepSpeedMPU:
    """Meet the other ranks and form all process groups."""
    timeout = config.parallel.timeout_minutes
    if device.type == "cpu":
        ops.load(ops.COMMUNICATION)
    if offloads_optimizer(ds_config):
        ops.load(ops.CPU_ADAM)
    backend = devices.communication_backend(device)
    launch.form_process_group(backend, timeout)
    launch.attach_deepspeed(backend, timeout)
    mpu = topology.form_groups(tp, timeout)
    devices.make_portable(device, config.train.seed)
    return mpu


def on_rank0(decide: Callable[[], T], device: torch.device) -> T:
    """Rank 0's result on every rank; its ConfigError too, so that no rank waits for one that has stopped."""
    outcome: tuple[object, str | None] = (None, None)
    if torch.distributed.get_rank() == 0:
        try:
            outcome = (decide(), None)
        except ConfigError as error:
            outcome = (None, str(error))
        except OSError as error:
            outcome = (None, f"{error.filename} cannot be used: {error.strerror}.")
    value, problem = topology.broadcast_object(outcome, device)
    if problem is not None:
        raise ConfigError(problem)
    return value


@dataclass(frozen=True)
class Start:
    """Rank 0's decision on where the run lives and begins."""

    folder: str
    checkpoint: str | None
    decay_steps: int
    head_blocks: int
    remarks: list[str]


def open_run(config: RunConfig, layout: Layout, facts: dict) -> Start:
    """Choose the folder, find the checkpoint to start from, check that it is the same run, record the configuration.

    facts: what a checkpoint remembers besides the configuration (trainer.run_facts).
    Raises: ConfigError for a folder of a different run, or a checkpoint that cannot be used.
    """
    folder = run_folder.choose_output_dir(config)
    chosen, remarks = _choose_checkpoint(config, folder)
    old = None
    if chosen is not None:
        old = read_config(chosen.path / "config.yaml")
        check_resume(old, config)
        checkpoints.check_layout(chosen, layout, facts)
    elif (folder / "config.yaml").exists():
        old = read_config(folder / "config.yaml")
        check_resume(old, config)
    if chosen is not None and chosen.step > config.train.steps:
        raise ConfigError(f"train.steps {config.train.steps} is below step {chosen.step} of checkpoint {chosen.path}; "
                          "a run can be extended, not shortened.")
    if old is None and (folder / "metrics.jsonl").exists():
        raise ConfigError(f"output_dir {folder} holds a metrics.jsonl but no run's config.yaml; choose another folder.")
    decay_steps, sentence = resolve_decay_steps(config, old)
    config.train.decay_steps = decay_steps
    config.aah.head_blocks = resolve_head_blocks(config, layout, old)
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.claim(folder)
    for leftover in (folder / "checkpoints").glob("*.partial"):
        shutil.rmtree(leftover)
    if chosen is None or chosen.step < config.train.steps:
        run_folder.mark_running(folder)
        run_folder.write_atomically(folder / "config.yaml", to_yaml(config))
    elif run_folder.is_unfinished(folder):  # killed between the last checkpoint and the mark
        run_folder.mark_finished(folder, {"steps": chosen.step})
    if old is not None:
        remarks.append(sentence)
    return Start(str(folder), str(chosen.path) if chosen else None, decay_steps, config.aah.head_blocks,
                 remarks)


def _choose_checkpoint(config: RunConfig, folder: Path) -> tuple[checkpoints.Checkpoint | None, list[str]]:
    newest, problems = checkpoints.newest_complete(folder / "checkpoints")
    resume = config.checkpoint.resume
    if resume == "auto":
        remarks = [f"warning: {problem} Passed over." for problem in problems]
        if newest is not None:
            remarks.append(f"resuming {folder} from step {newest.step}")
        elif problems:
            raise ConfigError(f"no checkpoint of {folder} is complete: {problems[0]} Move the folder away, or choose "
                              "another --output_dir.")
        return newest, remarks
    if resume == "none":
        if newest is not None or problems:
            raise ConfigError(f"checkpoint.resume is none, but {folder} holds checkpoints of a run; choose another "
                              "--output_dir, or --checkpoint.resume auto.")
        return None, []
    chosen = checkpoints.find(Path(resume))
    if newest is not None and newest.path.resolve() != chosen.path.resolve():
        raise ConfigError(f"checkpoint.resume is {chosen.path}, but {folder} already holds the checkpoint of step "
                          f"{newest.step}; choose another --output_dir, or --checkpoint.resume auto.")
    return chosen, [f"starting {folder} from {chosen.path}, step {chosen.step}"]


def facts(decision: Start, data: PreparedData, device: torch.device, ds_config: dict) -> list[str]:
    """Lines on what the run found: device, data, folder."""
    counts = data.meta["splits"]
    lines = [f"device    {devices.describe(device)}",
             f"data      {data.path}: {counts['train']['tokens']:,} training and {counts['valid']['tokens']:,} "
             "validation tokens",
             f"run       {decision.folder}"]
    if precision(ds_config) == "bf16" and not devices.has_bf16_products(device):
        lines.append("note      this CPU has no bf16 matrix instructions: weights, gradients and ZeRO are bf16, "
                     "products are formed in fp32 from bf16 operands")
    return lines
