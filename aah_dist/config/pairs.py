"""Windows as numbers: token counts, and the work they ask for.

A window of W is W keys, the query's own included: query i reads keys j with i - W < j <= i.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aah_dist.config.errors import ConfigError


def tokens(window: Any, length: int, field: str) -> int:
    """A window in tokens: a float up to 1.0 is a fraction of `length` (halves round up), anything else a token count.

    Raises ConfigError, naming `field`, for what is no window, or one outside 1..length.
    """
    if isinstance(window, float) and -math.inf < window <= 1:
        count = int(window * length + 0.5)
    elif (isinstance(window, int) and not isinstance(window, bool)) or (isinstance(window, float) and
                                                                        window.is_integer()):
        count = int(window)
    else:
        raise ConfigError(f"{field} {window} is neither a token count nor a fraction of model.seq_length in (0, 1].")
    if count < 1:
        raise ConfigError(f"{field} {window} is {count} tokens at model.seq_length {length}; it must be at least 1.")
    if count > length:
        raise ConfigError(f"{field} {window} is above model.seq_length {length}; give at most {length}, or fractions "
                          "such as 0.25, which follow seq_length.")
    return count


def pairs(window: int, length: int) -> int:
    """Query-key pairs one head reads over a sequence of `length` tokens: W*T - W(W-1)/2, W at most T."""
    window = min(int(window), length)
    return window * length - window * (window - 1) // 2


def acr(windows: Any, length: int) -> float:
    """Attention context ratio: the mean of W/T over all heads (an array of any shape), W at most T."""
    return float(np.minimum(np.asarray(windows), length).mean()) / length


def exact_pair_ratio(windows: Any, length: int) -> float:
    """Pairs read under these windows (an array of any shape) over the pairs of as many causal heads: the work that
    remains."""
    flat = np.asarray(windows).ravel().tolist()
    return sum(pairs(window, length) for window in flat) / (len(flat) * pairs(length, length))
