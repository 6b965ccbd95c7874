"""Scoring under windows that the controller decides batch by batch: the paper's protocol for its inference table."""

import dataclasses

import numpy as np
import torch
from torch import nn

from aah_dist.config.schema import ConfigError, RunConfig
from aah_dist.config.validate import Layout
from aah_dist.model.context import StepContext
from aah_dist.training.checkpoint import Checkpoint
from aah_dist.training.policy import Policy


class AdaptingForward:
    """A forward that first runs a batch for its statistics, decides, and then scores it under that decision.

    Starts from an empty state: full attention, no history, no groups.  The scorers are the run's.
    """

    def __init__(self, model: nn.Module, config: RunConfig, layout: Layout, context: StepContext, tp_rank: int,
                 device: torch.device, checkpoint: Checkpoint) -> None:
        """Raises: ConfigError if the run has no controller."""
        if not config.aah.decides:
            raise ConfigError(f"--policy adapt needs a run with a controller; {checkpoint.path} has aah.policy "
                              f"{config.aah.policy}: use --policy frozen.")
        every_batch = dataclasses.replace(config.aah, warmup_steps=0, interval=1)
        config = dataclasses.replace(config, aah=every_batch)
        self.model, self.context = model, context
        # The scorers alone are taken over: everything else begins empty.
        trained = Policy(config, layout, context, tp_rank, device, checkpoint.policy()).controller.weights
        self.policy = Policy(config, dataclasses.replace(layout, accumulation=1), context, tp_rank, device, None)
        self.policy.controller.weights = trained
        self.batches = 0
        self.windows: list[np.ndarray] = []

    def __call__(self, *inputs: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
        self.policy.begin(self.batches, shown=False)
        self.model(*inputs, labels=labels)
        self.policy.end(self.batches)
        self.batches += 1
        self.windows.append(self.context.windows)
        return self.model(*inputs, labels=labels)
