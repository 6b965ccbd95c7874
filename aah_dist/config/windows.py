"""A policy from the configuration: how many keys each head of each layer reads (its own position included)."""

from __future__ import annotations

from itertools import pairwise
from typing import List, Sequence

import numpy as np

from aah_dist.config.schema import ConfigError, RunConfig, Window


def candidate_windows(config: RunConfig) -> List[int]:
    """aah.windows in tokens, ascending.  Raises ConfigError where one is below 1, above T, or not above the last."""
    windows = [_tokens(w, config.model.seq_length, "aah.windows") for w in config.aah.windows]
    for low, high in pairwise(windows):
        if low >= high:
            raise ConfigError(f"aah.windows {config.aah.windows} is {windows} tokens at model.seq_length "
                              f"{config.model.seq_length}; each window must be above the one before.")
    return windows


def policy_from_config(config: RunConfig) -> np.ndarray:
    """The windows in force at the start of a run: int64 [num_layers, num_heads], each in 1..seq_length.

    Raises ConfigError for windows that cannot be, under either policy.
    """
    candidate_windows(config)
    layers, heads, length = config.model.num_layers, config.model.num_heads, config.model.seq_length
    fixed = config.aah.fixed_window
    if fixed is None:
        return np.full((layers, heads), length, dtype=np.int64)
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
    tokens = [_tokens(w, length, "aah.fixed_window") for w in windows]
    return [tokens[head % len(tokens)] for head in range(heads)]


def _tokens(window: Window, length: int, field: str) -> int:
    """A float up to 1.0 is a fraction of the length (halves round up); anything else is a token count."""
    if isinstance(window, float) and window <= 1:
        tokens = int(window * length + 0.5)
    elif window == int(window):
        tokens = int(window)
    else:
        raise ConfigError(f"{field} {window} is neither a token count nor a fraction of model.seq_length in (0, 1].")
    if tokens < 1:
        raise ConfigError(f"{field} {window} is {tokens} tokens at model.seq_length {length}; it must be at least 1.")
    if tokens > length:
        raise ConfigError(f"{field} {window} is above model.seq_length {length}; give at most {length}, or fractions "
                          "such as 0.25, which follow seq_length.")
    return tokens
