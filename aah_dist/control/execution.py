"""From the raw choice to the windows of one step: resolution EMA, then ramp, then ablation (AAH-v3, per-call state
machine).

Functions of (raw choice, EMA state, step, seed) alone: every rank computes them, without communication.
"""

import numpy as np
import torch

from aah_dist.control.settings import Settings


def smooth_choice(ema: np.ndarray | None, choice: np.ndarray, weight_of_past: float,
                  num_windows: int) -> tuple[np.ndarray, np.ndarray]:
    """The EMA over window indices, float32: new state, and indices rounded half to even."""
    choice32 = choice.astype(np.float32)
    past = np.float32(weight_of_past)
    ema = past * (choice32 if ema is None else ema) + (np.float32(1) - past) * choice32
    return ema, np.clip(np.rint(ema), 0, num_windows - 1).astype(np.int64)


def ramp(index: np.ndarray, step: int, settings: Settings) -> np.ndarray:
    """From full attention to the choice over aah.ramp_steps steps; from the largest window where T is not one."""
    steps = settings.aah.ramp_steps
    if steps == 0:
        return index
    share = np.float32(np.clip((step - settings.aah.warmup_steps + 1) / steps, 0, 1))
    full = len(settings.windows) - 1 if settings.full_index is None else settings.full_index
    return np.rint(share * index + (np.float32(1) - share) * np.float32(full)).astype(np.int64)


def ablate(windows: np.ndarray, step: int, settings: Settings) -> np.ndarray:
    """[layers, units] windows, shuffled over the units of a layer or drawn at random, anew every step."""
    kind = settings.aah.ablation
    if kind == "none":
        return windows
    out = np.empty_like(windows)
    for layer in range(len(windows)):
        generator = ablation_generator(settings.seed, layer, step)
        if kind == "shuffle":
            out[layer] = windows[layer][shuffle_order(settings.units, generator)]
        else:
            drawn = torch.randint(0, len(settings.windows), (settings.units,), generator=generator)
            out[layer] = np.array(settings.windows)[drawn.numpy()]
    return out


def shuffle_order(size: int, generator: torch.Generator) -> np.ndarray:
    return torch.randperm(size, generator=generator).numpy()


def ablation_generator(seed: int, layer: int, step: int) -> torch.Generator:
    """Another one for each layer and step: (seed + 1000003 layer + 97409 step) mod (2^31 - 1)."""
    return torch.Generator().manual_seed((seed + 1_000_003 * layer + 97_409 * step) % (2**31 - 1))
