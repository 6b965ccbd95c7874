"""Learning rate as a pure function of the step: nothing to save, nothing to restore, nothing to advance twice."""

import math

from aah_dist.config.schema import TrainConfig


def learning_rate(step: int, train: TrainConfig, decay_steps: int) -> float:
    """Linear warm-up, then a cosine from `lr` to `min_lr` that ends at `decay_steps` (the paper's, section 8).

    `step` counts from 0, and step 0 has learning rate 0 if there is a warm-up.
    """
    if step < train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if step >= decay_steps:
        return train.min_lr
    progress = (step - train.warmup_steps) / (decay_steps - train.warmup_steps)
    return train.min_lr + 0.5 * (train.lr - train.min_lr) * (1 + math.cos(math.pi * progress))
