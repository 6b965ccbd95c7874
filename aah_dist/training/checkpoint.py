"""Checkpoints that a kill at any moment cannot spoil.

    checkpoints/step_00000100/            complete: manifest.json lists its files and their sizes
    checkpoints/step_00000200.partial/    being written; ignored, and replaced by the next save of that step

A checkpoint is written under the `.partial` name, synced to disk and renamed.  It holds DeepSpeed's files (this
layout's parameters and optimizer state), `weights-tpI-of-N.safetensors` (the model alone, one file a TP rank, readable
at any layout) and the run's configuration.  No file in it is trusted to hold code: tensors are loaded as tensors only.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from aah_dist.config.load import save_config
from aah_dist.config.schema import ConfigError, RankError, RunConfig
from aah_dist.config.validate import Layout
from aah_dist.data.folder import sync
from aah_dist.model.shards import cut, is_split, join
from aah_dist.training.engine import refuse_code_in_checkpoints
from aah_dist.training.policy import PolicyState
from aah_dist.training.run_folder import write_atomically

_NAME = re.compile(r"step_(\d{8})")
FORMAT = 2
_CONTROLLER = "controller.safetensors"
_ENTRIES = {"step", "tp", "dp", "windows", "controller", "files", "zero_stage", "precision", "grad_accum_dtype",
            "offload", "vocab_size", "text_fingerprint", "tokenizer_fingerprint"}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; training stops, what was written before is intact."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: dict

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest["step"]

    @property
    def windows(self) -> np.ndarray:
        """The policy of the step that comes next, int64 [layers, heads]."""
        return np.asarray(self.manifest["windows"], dtype=np.int64)

    def policy(self) -> PolicyState:
        """The windows and the controller's state.  Raises: ConfigError if the latter cannot be read."""
        values = dict(self.manifest["controller"])
        if not values:
            return PolicyState(self.windows, {}, {})
        content = (self.path / _CONTROLLER).read_bytes()
        # A wrong choice would train on without a sign, so this file's content is checked as well as its size.
        if hashlib.sha256(content).hexdigest() != values.pop("sha256", None):
            raise ConfigError(f"{self.path / _CONTROLLER} is not what was written (its sha256 differs); move that "
                              "folder away to continue from the checkpoint before it.")
        return PolicyState(self.windows, safetensors.numpy.load(content), values)


def open_checkpoint(path: Path) -> Checkpoint:
    """Raises: ConfigError if the folder is not a complete checkpoint."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not a complete checkpoint: it has no manifest.json.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}/manifest.json cannot be read ({error}).") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} was written in another checkpoint format; this version reads format {FORMAT}.")
    missing = sorted(_ENTRIES - manifest.keys())
    if missing:
        raise ConfigError(f"{path}/manifest.json lacks {', '.join(missing)}.")
    for name, size in manifest["files"].items():
        file = path / name
        if not file.exists() or file.stat().st_size != size:
            found = f"{file.stat().st_size} bytes" if file.exists() else "missing"
            raise ConfigError(f"checkpoint file {file} is {found}; {size} bytes were written.")
    return Checkpoint(path, manifest)


def find(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a checkpoint folder, or the newest complete one of a run folder.

    Raises: ConfigError if there is none.
    """
    if (path / "manifest.json").exists() and path.suffix != ".partial":
        return open_checkpoint(path)
    newest, _ = newest_complete(path / "checkpoints")
    if newest is None:
        raise ConfigError(f"{path} holds no complete checkpoint; give a run folder or one of its checkpoints/step_*.")
    return newest


def newest_complete(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint of `folder`, and a sentence on each damaged one that was passed over."""
    problems = []
    for path in sorted(folder.glob("step_*"), reverse=True):
        if _NAME.fullmatch(path.name):
            try:
                return open_checkpoint(path), problems
            except ConfigError as error:
                problems.append(str(error))
    return None, problems


def save(engine: object, folder: Path, step: int, *, config: RunConfig, layout: Layout, policy: PolicyState,
         facts: dict, tp_rank: int, dp_rank: int) -> Path:
    """Write the checkpoint of `step`; every rank calls it and leaves it together.

    facts: what else identifies the run (vocabulary size, fingerprints, ZeRO stage, precision).
    Raises: CheckpointError if any rank cannot write.
    """
    final = folder / f"step_{step:08d}"
    partial = folder / f"step_{step:08d}.partial"
    rank0 = dist.get_rank() == 0
    try:
        if rank0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        engine.save_checkpoint(str(folder), tag=partial.name, client_state={"step": step}, save_latest=False)
        _save_weights(engine.module, partial, tp_rank, layout.tp, writes=dp_rank == 0)
        dist.barrier()
        if rank0:
            _seal(partial, final, step, config, layout, policy, facts)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _write_error(error)
        if reason is None:
            raise
        raise CheckpointError(f"the checkpoint of step {step} cannot be written to {partial} ({reason}); free space or "
                              f"choose another output_dir and start again: {_what_is_left(folder)}.") from error
    dist.barrier()
    return final


def _write_error(error: BaseException | None) -> str | None:
    """Why a file could not be written, or None if that is not what `error` is about.

    torch.save hides the system's error behind RuntimeErrors of its zip writer.
    """
    while error is not None:
        if isinstance(error, (OSError, SafetensorError)):
            return str(error)
        if any(text in str(error) for text in ("PytorchStreamWriter", "inline_container", "iostream error")):
            return "the file system takes no more data"
        error = error.__cause__ or error.__context__
    return None


def _what_is_left(folder: Path) -> str:
    newest, _ = newest_complete(folder)
    return f"the run continues from step {newest.step}" if newest else "there is no earlier checkpoint"


def _is_complete(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except ConfigError:
        return False
    return True


def _save_weights(model: nn.Module, folder: Path, tp_rank: int, tp_size: int, *, writes: bool) -> None:
    import deepspeed  # picks its accelerator at import, so after select_device

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if writes:
            tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
            save_file(tensors, folder / weights_name(tp_rank, tp_size))


def weights_name(tp_rank: int, tp_size: int) -> str:
    return f"weights-tp{tp_rank}-of-{tp_size}.safetensors"


def _seal(partial: Path, final: Path, step: int, config: RunConfig, layout: Layout, policy: PolicyState,
          facts: dict) -> None:
    save_config(config, partial / "config.yaml")
    controller = dict(policy.values)
    if controller:
        content = safetensors.numpy.save({name: np.ascontiguousarray(a) for name, a in policy.arrays.items()})
        (partial / _CONTROLLER).write_bytes(content)
        controller["sha256"] = hashlib.sha256(content).hexdigest()
    written = [file for file in sorted(partial.rglob("*")) if file.is_file()]
    files = {str(file.relative_to(partial)): file.stat().st_size for file in written}
    manifest = {"format": FORMAT, "step": step, "tp": layout.tp, "dp": layout.dp,
                "windows": policy.windows.tolist(), "controller": controller, **facts, "files": files}
    for name in files:
        sync(partial / name)
    write_atomically(partial / "manifest.json", json.dumps(manifest, indent=1))
    sync(partial)
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)
    sync(final.parent)


def prune(folder: Path, keep: int, always: list[int]) -> None:
    """Delete all but the newest `keep` complete checkpoints and the listed steps; called after a save, by one rank.

    Damaged ones do not count towards `keep`; those that the run has passed go as well.
    """
    named = sorted(path for path in folder.glob("step_*") if _NAME.fullmatch(path.name))
    complete = [path for path in named if _is_complete(path)]
    if not complete:
        return
    unlisted = [path for path in complete if int(_NAME.fullmatch(path.name)[1]) not in always]
    damaged = [path for path in named if path not in complete and path < complete[-1]]
    for path in damaged + unlisted[:-keep]:
        # First out of sight, so that a kill in the middle leaves no half-deleted checkpoint under a complete name.
        doomed = path.with_name(path.name + ".partial")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def check_layout(checkpoint: Checkpoint, layout: Layout, facts: dict) -> None:
    """Raises: ConfigError if the optimizer state in it belongs to another layout, model or data set."""
    saved = checkpoint.manifest
    here = {"tp": layout.tp, "dp": layout.dp, **facts}
    names = {"tp": "parallel.tensor_parallel_size", "dp": "data-parallel size (ranks / TP)",
             "zero_stage": "the ZeRO stage of ds_config", "precision": "the precision of ds_config",
             "grad_accum_dtype": "data_types.grad_accum_dtype of ds_config",
             "offload": "optimizer offload of ds_config", "vocab_size": "the tokenizer's vocabulary size",
             "text_fingerprint": "the text of data.path", "tokenizer_fingerprint": "the tokenizer of data.path"}
    for key, name in names.items():
        if saved[key] != here[key]:
            raise ConfigError(f"checkpoint {checkpoint.path} was written with {name} {saved[key]}, this run has "
                              f"{here[key]}; a run continues with the layout, precision and data it was started with.")


def load(engine: object, checkpoint: Checkpoint) -> None:
    """Restore parameters and optimizer state of this layout.

    Raises: ConfigError if a file cannot be read, or holds anything but tensors and plain values.
    """
    refuse_code_in_checkpoints()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed's bf16 optimizer prints a line of its own
            path, state = engine.load_checkpoint(str(checkpoint.path.parent), tag=checkpoint.path.name)
    except pickle.UnpicklingError as error:
        raise RankError(f"a file of checkpoint {checkpoint.path} holds more than tensors and plain values, or is "
                        "damaged; it is not loaded; move that folder away to continue from the checkpoint before "
                        "it.") from error
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):
            raise
        raise RankError(f"a file of checkpoint {checkpoint.path} is damaged ({str(error).splitlines()[0]}); move that "
                        "folder away to continue from the checkpoint before it.") from error
    if path is None or state.get("step") != checkpoint.step:
        raise ConfigError(f"DeepSpeed found no usable state in checkpoint {checkpoint.path}.")


def load_weights(model: nn.Module, checkpoint: Checkpoint, tp_rank: int, tp_size: int) -> None:
    """The model's weights at any TP size: the shards on disk are joined and cut anew."""
    saved_tp = checkpoint.manifest["tp"]
    shards = [load_file(checkpoint.path / weights_name(rank, saved_tp)) for rank in range(saved_tp)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_split(parameter):
                dim, stride = parameter.partition_dim, parameter.partition_stride
                value = cut(join([shard[name] for shard in shards], dim, stride), dim, stride, tp_rank, tp_size)
            else:
                value = shards[0][name]
            parameter.copy_(value)
