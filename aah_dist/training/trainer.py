"""The training loop."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from aah_dist.config.deepspeed import precision, zero_stage
from aah_dist.config.load import config_hash
from aah_dist.config.schema import RunConfig
from aah_dist.config.validate import Layout
from aah_dist.data.dataset import PreparedData
from aah_dist.data.sampler import SampleOrder, micro_batch_ids
from aah_dist.model.context import StepContext
from aah_dist.model.gpt import build_gpt
from aah_dist.parallel import device as devices
from aah_dist.parallel.topology import DeepSpeedMPU
from aah_dist.training import checkpoint as checkpoints
from aah_dist.training import run_folder, signals
from aah_dist.training.engine import build_engine, gradient_norm, set_learning_rate
from aah_dist.training.evaluation import batch_tensors, perplexity, validation_loss
from aah_dist.training.flops import training_flops_per_token
from aah_dist.training.interval import Interval
from aah_dist.training.metrics import Progress, Recorder, say
from aah_dist.training.policy import Policy
from aah_dist.training.schedule import learning_rate


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or Inf; raised before the update, so parameters are those of the step before."""


@dataclass
class StepResult:
    """What every rank knows after a step, in the same order everywhere."""

    loss: float
    grad_norm: float
    stop_signal: int


class Trainer:
    """One run on this rank: model, engine, data, records.

    folder: the run's folder.  resume_from: the checkpoint to start from, already checked, or None.
    """

    def __init__(self, config: RunConfig, layout: Layout, ds_config: dict, data: PreparedData, mpu: DeepSpeedMPU,
                 device: torch.device, folder: Path, resume_from: checkpoints.Checkpoint | None) -> None:
        self.config, self.layout, self.data, self.mpu, self.device = config, layout, data, mpu, device
        self.folder = folder
        self.rank = dist.get_rank()
        self.tp_rank, self.dp_rank = mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank()
        self.vocab_size = config.model.vocab_size or data.vocab_size
        self.facts = run_facts(ds_config, data, self.vocab_size)
        self.start_step = resume_from.step if resume_from else 0

        full = np.full((config.model.num_layers, config.model.num_heads), config.model.seq_length)
        self.context = StepContext(seed=config.train.seed, windows=full, backend=config.aah.backend)
        self.policy = Policy(config, layout, self.context, self.tp_rank, device,
                             resume_from.policy() if resume_from else None)
        dtype = torch.bfloat16 if precision(ds_config) == "bf16" else torch.float32
        model = build_gpt(config.model, self.vocab_size, self.context, tp_rank=self.tp_rank, tp_size=layout.tp,
                          sequence_parallel=config.parallel.sequence_parallel, recompute=config.train.recompute,
                          dtype=dtype, seed=config.train.seed, device=device)
        self.engine, self.watch = build_engine(model, ds_config, config.train, mpu, device)
        if resume_from:
            checkpoints.load(self.engine, resume_from)

        self.train_rows = data.split("train", config.model.seq_length)
        self.valid_rows = data.split("valid", config.model.seq_length)
        self.order = SampleOrder(len(self.train_rows), config.train.seed)
        self._flops_of: tuple[np.ndarray, float] | None = None

    def fit(self) -> int:
        """Train to the last step or a signal; returns the process's exit code (training/signals.py)."""
        config = self.config.train
        recorder = Recorder(self.folder, self.config, self.start_step) if self.rank == 0 else None
        progress = Progress(config.steps, self.start_step, self.config.log.progress_bar) if self.rank == 0 else None
        if recorder and self.start_step == 0:
            recorder.metrics(0, {"run/started": 1, "run/config_hash": config_hash(self.config),
                                 "run/git_commit": run_folder.git_commit(), "run/seed": config.seed})
        if recorder:
            recorder.policy(self.start_step, self.policy.record())
        last_eval: float | None = None
        since_log = Interval()
        saved_at = self.start_step
        stop = 0
        with signals.StopRequest() as request:
            for step in range(self.start_step, config.steps):
                done = step + 1
                shown = done % self.config.log.interval == 0 or done in (self.start_step + 1, config.steps)
                windows = self.context.windows
                self.policy.begin(step, shown)
                result = self.train_step(step, request)
                self.policy.end(step)
                stop = result.stop_signal
                since_log.count(config.global_batch_size * self.config.model.seq_length, self._flops(windows))
                values: dict[str, object] = {}
                if shown or stop:
                    values |= self._step_values(step, result, windows, since_log)
                if done == config.steps or (config.eval_interval and done % config.eval_interval == 0):
                    last_eval, eval_values = self._evaluate(since_log)
                    values |= eval_values
                if recorder:
                    recorder.policy(done, self.policy.record())
                if recorder and values:
                    recorder.metrics(done, values)
                if progress:
                    progress.advance()
                    if "train/loss" in values:
                        progress.line(done, values)
                    elif "val/loss" in values:
                        say(f"step {done}: val loss {values['val/loss']:.4f} ppl {values['val/ppl']:.4g}")
                if stop or done == config.steps or self._save_due(done):
                    self._save(done, since_log)
                    saved_at = done
                if stop:
                    break
        if recorder:
            progress.close()
            recorder.close()
        if stop and saved_at < config.steps:
            if self.rank == 0:
                same = "" if self.config.checkpoint.resume == "auto" else " with --checkpoint.resume auto"
                say(f"stopped by {signals.name(stop)} after step {saved_at}; a checkpoint is saved, the same command"
                    f"{same} continues the run")
            dist.barrier()  # a launcher ends all ranks once one has left with a code other than 0
            return signals.EXIT_SAVED_AND_STOPPED
        if self.rank == 0:
            self._finish(last_eval)
        dist.barrier()
        return signals.EXIT_OK

    def train_step(self, step: int, request: signals.StopRequest | None = None) -> StepResult:
        """One optimizer step.

        Raises: NonFiniteError, on every rank, before the update.
        """
        config = self.config.train
        self.context.step = step
        set_learning_rate(self.engine, learning_rate(step, config, config.decay_steps or config.steps))
        ids = [micro_batch_ids(step, micro, self.dp_rank, self.layout.dp, config.micro_batch_size,
                               config.global_batch_size) for micro in range(self.layout.accumulation)]
        # Loss = sum over tokens / global count, so every layout and accumulation has the same gradient.  Rows are
        # packed: all their tokens count, and the count needs no communication.
        tokens_in_batch = config.global_batch_size * self.config.model.seq_length
        self.watch.reset()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro, samples in enumerate(ids):
            self.context.samples = samples
            self.policy.select(micro)
            rows = [self.train_rows[self.order.row(k)] for k in samples]
            tokens, positions, labels = batch_tensors(rows, self.device)
            loss = self.engine(tokens, positions, None, labels=labels).sum()
            # DeepSpeed averages over DP ranks; the factor undoes it.
            self.engine.backward(loss * (self.layout.dp / tokens_in_batch), scale_wrt_gas=False)
            loss_sum += loss.detach().double()
            if micro + 1 < len(ids):
                self.engine.step()
        reports = self._exchange(loss_sum, request.signal if request else 0)
        self._refuse_non_finite(step, reports)
        norm = self._update(step)
        loss = float(reports[::self.layout.tp, 0].sum()) / tokens_in_batch
        return StepResult(loss, norm, int(reports[:, 3].max()))

    def _update(self, step: int) -> float:
        """The optimizer's step; returns the gradient norm.  ZeRO 1 to 3 skip it if the norm is not finite."""
        stage_0 = self.engine.zero_optimization_stage() == 0
        norm = gradient_norm(self.engine, self.mpu) if stage_0 else None
        if norm is None or np.isfinite(norm):
            self.engine.step()
        if norm is None:
            norm = gradient_norm(self.engine, self.mpu)
        if not np.isfinite(norm):
            raise NonFiniteError(f"step {step + 1}: every rank's gradients are finite but their norm is {norm}; "
                                 f"stopped before the update, parameters are those of step {step}.")
        return norm

    def _exchange(self, loss_sum: torch.Tensor, signal: int) -> np.ndarray:
        """One small all-gather a step: float64 [ranks, 4] of loss sum, loss finite, gradients finite, stop signal."""
        mine = torch.stack([loss_sum, loss_sum.isfinite().double(), self.watch.finite.double(),
                            torch.full_like(loss_sum, signal)])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.stack(parts).cpu().numpy()

    def _refuse_non_finite(self, step: int, reports: np.ndarray) -> None:
        # The loss first: within a TP group the gradients of all ranks follow it.
        bad_losses, bad_gradients = np.flatnonzero(reports[:, 1] == 0), np.flatnonzero(reports[:, 2] == 0)
        if not bad_losses.size and not bad_gradients.size:
            return
        rank, what = (int(bad_losses[0]), "the loss") if bad_losses.size else (int(bad_gradients[0]), "a gradient")
        train = self.config.train
        samples = [micro_batch_ids(step, micro, rank // self.layout.tp, self.layout.dp, train.micro_batch_size,
                                   train.global_batch_size) for micro in range(self.layout.accumulation)]
        rows = [self.order.row(k) for micro in samples for k in micro]
        raise NonFiniteError(
            f"step {step + 1}: {what} of rank {rank} is NaN or Inf (training rows {rows}); stopped before the update, "
            f"parameters are those of step {step}; lower train.lr, set train.clip, or look at these rows.")

    def _flops(self, windows: np.ndarray) -> float:
        """Model FLOPs a token under these windows; they change seldom."""
        if self._flops_of is None or not np.array_equal(self._flops_of[0], windows):
            self._flops_of = windows, training_flops_per_token(self.config.model, self.vocab_size, windows)
        return self._flops_of[1]

    def _step_values(self, step: int, result: StepResult, windows: np.ndarray,
                     since_log: Interval) -> dict[str, object]:
        config = self.config.train
        tokens_per_second, flops_per_second = since_log.rates(self.device)
        values: dict[str, object] = {
            "train/loss": result.loss, "train/grad_norm": result.grad_norm,
            "train/lr": learning_rate(step, config, config.decay_steps or config.steps),
            "perf/tok_s": tokens_per_second, **devices.memory(self.device), **self.policy.figures(windows)}
        peak = devices.peak_flops(self.device)
        if peak is not None:
            values["perf/mfu"] = flops_per_second / (peak * dist.get_world_size())
        return values

    def _evaluate(self, since_log: Interval) -> tuple[float, dict[str, object]]:
        began = time.monotonic()
        with since_log.paused():
            loss, _ = validation_loss(self.engine, self.engine.module, self.valid_rows, self.config.train.eval_samples,
                                      micro_batch_size=self.config.train.micro_batch_size, dp_rank=self.dp_rank,
                                      dp_size=self.layout.dp, dp_group=self.mpu.get_data_parallel_group(),
                                      device=self.device)
        return loss, {"val/loss": loss, "val/ppl": perplexity(loss), "perf/eval_time_s": time.monotonic() - began}

    def _save_due(self, done: int) -> bool:
        settings = self.config.checkpoint
        return done in settings.steps or bool(settings.interval and done % settings.interval == 0)

    def _save(self, done: int, since_log: Interval) -> None:
        with since_log.paused():
            folder = self.folder / "checkpoints"
            checkpoints.save(self.engine, folder, done, config=self.config, layout=self.layout,
                             policy=self.policy.state(), facts=self.facts, tp_rank=self.tp_rank, dp_rank=self.dp_rank)
            if self.rank == 0:
                checkpoints.prune(folder, self.config.checkpoint.keep, self.config.checkpoint.steps)

    def _finish(self, val_loss: float | None) -> None:
        entropy = self.data.valid_unigram_entropy
        summary = {"steps": self.config.train.steps, "val_loss": val_loss, "valid_unigram_entropy": entropy}
        run_folder.mark_finished(self.folder, summary)
        if val_loss is not None:
            samples = min(self.config.train.eval_samples, len(self.valid_rows))
            say(f"validation loss {val_loss:.4f} nats a token over {samples} samples (perplexity "
                f"{perplexity(val_loss):.4g}); unigram entropy of the held-out text {entropy:.4f}; ratio "
                f"{val_loss / entropy:.3f}")


def run_facts(ds_config: dict, data: PreparedData, vocab_size: int) -> dict:
    """What a checkpoint remembers of the engine and the data besides the configuration."""
    zero = ds_config.get("zero_optimization", {})
    return {"zero_stage": zero_stage(ds_config), "precision": precision(ds_config), "vocab_size": vocab_size,
            "grad_accum_dtype": ds_config.get("data_types", {}).get("grad_accum_dtype", "fp32"),
            "offload": zero.get("offload_optimizer", {}).get("device", "none"),
            "text_fingerprint": data.meta["text"]["fingerprint"],
            "tokenizer_fingerprint": data.meta["tokenizer"]["fingerprint"]}
