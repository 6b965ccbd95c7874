"""The policy over a run's steps: fixed from the start, or decided between steps by the controller.

After step s the statistics of all layers are reduced in one all-reduce, rank 0 decides, and one broadcast makes its
choice everybody's.  Within a step nothing changes.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from aah_dist.config.pairs import acr, exact_pair_ratio, pairs
from aah_dist.config.schema import ConfigError, RunConfig
from aah_dist.config.validate import Layout
from aah_dist.config.windows import policy_from_config
from aah_dist.control.controller import Controller, Decision
from aah_dist.control.diagnostics import GroupHistory, decision_figures
from aah_dist.control.metrics import flops_proxy, tensor_parallel_imbalance, window_figures
from aah_dist.control.settings import settings_from_config
from aah_dist.model.context import StepContext
from aah_dist.training.statistics import StatisticsBuffer


@dataclass(frozen=True)
class PolicyState:
    """What a checkpoint holds of a policy: windows int64 [layers, heads] of the step that comes next, and the
    controller's state (arrays by name, plain values; both empty without a controller)."""

    windows: np.ndarray
    arrays: dict[str, np.ndarray]
    values: dict


class Policy:
    """context.windows of each step, and what of it is worth recording."""

    def __init__(self, config: RunConfig, layout: Layout, context: StepContext, tp_rank: int, device: torch.device,
                 saved: PolicyState | None) -> None:
        """config.aah.head_blocks must be a number where a controller decides."""
        self.config, self.layout, self.context, self.device = config, layout, context, device
        self.controller: Controller | None = None
        self.decision: Decision | None = None
        self._measuring = False
        self._groups = GroupHistory()
        self._times = {"aah/time/control_ms": 0.0, "aah/time/statistics_ms": 0.0}
        if config.aah.decides:
            self.controller = Controller(settings_from_config(config))
            local = config.model.num_heads // layout.tp
            self.buffer = StatisticsBuffer(
                config.model.num_layers, config.model.num_heads, slice(tp_rank * local, (tp_rank + 1) * local),
                layout.accumulation, device, seed=config.train.seed, entropy_rows=config.aah.entropy_rows,
                length=config.model.seq_length)
        if saved is not None:
            if bool(saved.values) != (self.controller is not None):
                raise ConfigError(f"aah.policy is {config.aah.policy}, but the checkpoint holds "
                                  f"{'a' if saved.values else 'no'} controller's state; resume with the run's own "
                                  "regime.")
            if self.controller:
                self.controller.restore(saved.arrays, saved.values)
            context.windows = saved.windows
        else:
            context.windows = self.controller.execute(0) if self.controller else policy_from_config(config)

    def begin(self, step: int, shown: bool) -> None:
        """Before `step` runs.  shown: a log line follows it."""
        self._measuring = self.controller is not None and self.controller.wants(step, shown)
        if self._measuring:
            self.buffer.begin(step)
            self.context.statistics = self.buffer

    def select(self, micro: int) -> None:
        """Before each micro batch."""
        if self._measuring:
            self.buffer.select(micro)

    def end(self, step: int) -> None:
        """After `step`: decide, and set the windows of the step that comes next.  Every rank calls it."""
        if self.controller is None:
            return
        self.context.statistics = None
        if self._measuring:
            self._decide(step + 1)
        self.context.windows = self.controller.execute(step + 1)

    def _decide(self, step: int) -> None:
        controller = self.controller
        began = time.monotonic()
        sums = self.buffer.reduce()
        decided = time.monotonic()
        choice = torch.zeros(controller.settings.layers, controller.settings.units, dtype=torch.int64)
        if dist.get_rank() == 0:
            if not np.isfinite(sums).all():
                layer, head, _ = np.argwhere(~np.isfinite(sums))[0]
                raise RuntimeError(f"the statistics of layer {layer}, head {head} before step {step} are not finite, "
                                   "though the loss was: activations overflow in sums of squares; lower train.lr.")
            self.decision = controller.decide(step, sums)
            choice = torch.from_numpy(self.decision.choice)
        if controller.is_update(step):
            choice = choice.to(self.device)
            dist.broadcast(choice, src=0)
            controller.adopt(step, choice.cpu().numpy())
        self._times = {"aah/time/control_ms": 1e3 * (time.monotonic() - decided),
                       "aah/time/statistics_ms": 1e3 * (decided - began + self.buffer.take_seconds())}

    def state(self) -> PolicyState:
        arrays, values = self.controller.state() if self.controller else ({}, {})
        return PolicyState(self.context.windows, arrays, values)

    def record(self) -> dict:
        """What policy.jsonl says of the step that comes next: its windows, or for regimes that redraw them every step
        what they are drawn from."""
        if self.controller is None or self.config.aah.ablation == "none":
            return {"windows": self.context.windows.tolist()}
        settings = self.controller.settings
        raw = np.full((settings.layers, settings.units), settings.length)
        if self.controller.choice is not None:
            raw = np.array(settings.windows)[self.controller.choice]
        return {"ablation": self.config.aah.ablation, "seed": settings.seed, "raw": settings.to_heads(raw).tolist()}

    def figures(self, windows: np.ndarray) -> dict[str, float]:
        """Figures for a log line of a step that ran under `windows`, and of the newest decision (on rank 0)."""
        model, length = self.config.model, self.config.model.seq_length
        proxy = flops_proxy(windows, length=length, hidden=model.hidden_size, ffn=model.ffn_size)
        work = np.array([[pairs(w, length) for w in row] for row in windows.tolist()])
        values = {"aah/ACR": acr(windows, length), "aah/exact_pair_ratio": exact_pair_ratio(windows, length),
                  "aah/tp_imbalance": tensor_parallel_imbalance(work, self.layout.tp),
                  "aah/flops_attn_est": proxy.attention, "aah/flops_total_est": proxy.total,
                  "aah/flops_ratio": proxy.ratio}
        if self.controller is None:
            return values
        settings = self.controller.settings
        values |= window_figures(windows, settings.windows, settings.aah.collapse_fraction) | self._times
        if self.decision is not None:
            values |= decision_figures(self.decision, settings) | self._groups.figures(self.decision.maps)
        return values
