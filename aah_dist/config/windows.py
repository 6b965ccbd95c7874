"""A policy from the configuration: how many keys each head of each layer reads (its own position included)."""

from __future__ import annotations

from itertools import pairwise
from typing import List, Sequence

import numpy as np

from aah_dist.config.pairs import tokens
from aah_dist.config.plans import random_heads_matched, read_plan, uniform_matched
from aah_dist.config.schema import ConfigError, RunConfig, Window


def candidate_windows(config: RunConfig) -> List[int]:
    """aah.windows in tokens, ascending.  Raises ConfigError where one is below 1, above T, or not above the last."""
    windows = [tokens(w, config.model.seq_length, "aah.windows") for w in config.aah.windows]
    for low, high in pairwise(windows):
        if low >= high:
            raise ConfigError(f"aah.windows {config.aah.windows} is {windows} tokens at model.seq_length "
                              f"{config.model.seq_length}; each window must be above the one before.")
    return windows


def policy_from_config(config: RunConfig) -> np.ndarray:
    """The windows in force at step 0: int64 [num_layers, num_heads], each in 1..seq_length.

    Controllers begin at full attention.  Reads aah.plan where the policy needs it.  Raises ConfigError for windows that
    cannot be, under any policy.
    """
    candidate_windows(config)
    aah, layers, heads = config.aah, config.model.num_layers, config.model.num_heads
    length = config.model.seq_length
    if aah.policy == "fixed_window":
        return _fixed(aah.fixed_window, layers, heads, length)
    if aah.policy == "layer_pattern":
        pattern = [tokens(w, length, "aah.layer_pattern") for w in aah.layer_pattern]
        return np.repeat(np.resize(np.array(pattern, dtype=np.int64), (layers, 1)), heads, axis=1)
    if aah.plan is None:
        return np.full((layers, heads), length, dtype=np.int64)
    plan = read_plan(aah.plan, aah.plan_step, layers, heads, length)
    if aah.policy == "uniform_matched":
        return uniform_matched(plan, length)
    return random_heads_matched(plan, config.train.seed) if aah.policy == "random_heads_matched" else plan


def _fixed(fixed: object, layers: int, heads: int, length: int) -> np.ndarray:
    if isinstance(fixed, list) and any(isinstance(item, list) for item in fixed):
        if len(fixed) != layers:
            raise ConfigError(f"aah.fixed_window has {len(fixed)} lists; one per layer would be {layers} "
                              "(model.num_layers).")
        rows = [_head_row(row, heads, length) for row in fixed]
    else:
        rows = [_head_row(fixed if isinstance(fixed, list) else [fixed], heads, length)] * layers
    return np.array(rows, dtype=np.int64)


def _head_row(windows: Sequence[Window], heads: int, length: int) -> List[int]:
    if not 1 <= len(windows) <= heads:
        raise ConfigError(f"aah.fixed_window lists {len(windows)} windows {list(windows)}; give 1 to {heads} "
                          "(model.num_heads).")
    row = [tokens(w, length, "aah.fixed_window") for w in windows]
    return [row[head % len(row)] for head in range(heads)]
