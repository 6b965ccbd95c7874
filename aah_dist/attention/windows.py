"""Windows as an attention backend gets them.

A window of W is W keys, the query's own included: query i reads keys j with i - W < j <= i.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from aah_dist.config.schema import ConfigError

Windows = Iterable[int] | np.ndarray | torch.Tensor


def as_windows(windows: Windows, num_heads: int) -> tuple[int, ...]:
    """The windows as Python integers, one per head.

    Raises ConfigError when they are not `num_heads` integers of at least 1 in host memory.
    """
    if isinstance(windows, torch.Tensor):
        if windows.device.type != "cpu":
            raise ConfigError(f"windows are on {windows.device}; this backend plans on the host and needs them in CPU "
                              "memory, once for each change of the windows.")
        windows = windows.numpy()
    array = np.asarray(windows)
    if array.shape != (num_heads,):
        raise ConfigError(f"windows have shape {list(array.shape)}; one window for each of the {num_heads} heads is "
                          "needed.")
    if not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"windows are of type {array.dtype}; they are counts of keys and must be integers.")
    if array.min() < 1:
        raise ConfigError(f"windows hold {array.min()}; a window counts the query's own key, so it is at least 1.")
    return tuple(array.tolist())
