"""What a run records and prints: metrics.jsonl, policy.jsonl, one line a log step, W&B and TensorBoard.

Rank 0 only.  Nothing here may stop or slow a run: trouble with a service is said once and the run goes on.
"""

import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from aah_dist.config.schema import RunConfig
from aah_dist.training.run_folder import cut_back, write_atomically


class Recorder:
    """Opens the run's records, cut back to `start_step`, so that every step stands in them once."""

    def __init__(self, folder: Path, config: RunConfig, start_step: int) -> None:
        self.folder = folder
        for name in ("metrics.jsonl", "policy.jsonl"):
            # From the beginning nothing stays, not even what an earlier start recorded as step 0.
            cut_back(folder / name, start_step or -1)
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
        self._policy = open(folder / "policy.jsonl", "a", encoding="utf-8", buffering=1)
        self._last = _last_record(folder / "policy.jsonl")
        services = (_start_wandb(folder, config), _start_tensorboard(folder, config, start_step))
        self._services = [service for service in services if service is not None]

    def metrics(self, step: int, values: dict[str, object]) -> None:
        # JSON has no infinity: a perplexity too large for a double becomes null.
        finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                  for key, value in values.items()}
        self._metrics.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._each_service(lambda service: service.log(step, values))

    def policy(self, step: int, record: dict) -> None:
        """Records what is in force from 0-based step `step` on, if it differs from what was recorded last."""
        if record != self._last:
            self._last = record
            self._policy.write(json.dumps({"step": step, **record}) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._policy.close()
        self._each_service(lambda service: service.close())

    def _each_service(self, use: Callable[["_Wandb | _TensorBoard"], None]) -> None:
        for service in list(self._services):
            try:
                use(service)
            except Exception as error:  # any fault of an optional service: said once, and the run goes on
                say(f"{service.name} has failed ({_first_line(error)}); the run goes on without it.")
                self._services.remove(service)


def _last_record(path: Path) -> dict | None:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {key: value for key, value in json.loads(lines[-1]).items() if key != "step"} if lines else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Wandb:
    name = "W&B"

    def __init__(self, run: object) -> None:
        self._run = run

    def log(self, step: int, values: dict[str, object]) -> None:
        # An explicit axis: W&B's own counter would refuse the steps repeated after a resume.
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def _start_wandb(folder: Path, config: RunConfig) -> _Wandb | None:
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")):
        return None
    try:
        import wandb

        id_file = folder / "wandb_id.txt"
        if not id_file.exists():
            write_atomically(id_file, secrets.token_hex(4) + "\n")
        run = wandb.init(project=config.log.wandb_project, id=id_file.read_text().strip(), name=folder.name,
                         resume="allow", dir=str(folder), config=config.to_dict(),
                         settings=wandb.Settings(init_timeout=30, silent=True))
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
    except Exception as error:  # any fault of an optional service: said, and the run goes on
        say(f"W&B cannot be used ({_first_line(error)}); the run goes on without it.")
        return None
    return _Wandb(run)


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, writer: object) -> None:
        self._writer = writer

    def log(self, step: int, values: dict[str, object]) -> None:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


def _start_tensorboard(folder: Path, config: RunConfig, start_step: int) -> _TensorBoard | None:
    if not config.log.tensorboard:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("log.tensorboard is true, but TensorBoard is not installed (pip install tensorboard); going on without it.")
        return None
    return _TensorBoard(SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else None))


def say(text: str) -> None:
    """A line for the user, kept clear of a progress bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


class Progress:
    """One line a log step, and a progress bar on a terminal."""

    def __init__(self, total_steps: int, start_step: int, bar: str) -> None:
        self.total, self.start, self._began = total_steps, start_step, time.monotonic()
        wanted = bar == "on" or (bar == "auto" and sys.stderr.isatty())
        self._bar = tqdm(total=total_steps, initial=start_step, unit="step", file=sys.stderr, dynamic_ncols=True,
                         leave=False) if wanted else None

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def line(self, step: int, values: dict[str, float]) -> None:
        elapsed = time.monotonic() - self._began
        left = elapsed / max(1, step - self.start) * (self.total - step)
        width = len(str(self.total))
        parts = [f"step {step:>{width}}/{self.total}", f"{100 * step / self.total:5.1f}%",
                 f"loss {values['train/loss']:.4f}", f"lr {values['train/lr']:.2e}",
                 f"grad {values['train/grad_norm']:.3f}", f"{values['perf/tok_s']:,.0f} tok/s"]
        if "perf/mfu" in values:
            parts.append(f"mfu {100 * values['perf/mfu']:.1f}%")
        memory = values.get("perf/gpu_alloc_max_mb", values["perf/cpu_rss_mb"])
        parts += [f"mem {memory / 1024:.2f} GiB", f"ACR {values['aah/ACR']:.3f}", f"elapsed {_clock(elapsed)}",
                  f"eta {_clock(left)}"]
        if "val/loss" in values:
            parts.append(f"| val loss {values['val/loss']:.4f} ppl {values['val/ppl']:.4g}")
        say("  ".join(parts))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
