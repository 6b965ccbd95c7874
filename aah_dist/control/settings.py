"""What the controller needs to know of a run, with fractions and names resolved."""

from dataclasses import dataclass

import numpy as np

from aah_dist.config.schema import AahConfig, RunConfig
from aah_dist.config.windows import candidate_windows
from aah_dist.control.arithmetic import ARITHMETIC, Arithmetic


@dataclass(frozen=True)
class Settings:
    """aah: the configured knobs.  A unit is what gets one window: a query head, or the heads that share a KV head."""

    aah: AahConfig
    layers: int
    heads: int
    units: int
    length: int
    windows: tuple[int, ...]
    head_blocks: int
    seed: int

    @property
    def arithmetic(self) -> Arithmetic:
        return ARITHMETIC[self.aah.control_precision]

    @property
    def full_index(self) -> int | None:
        """Index of T among the windows, None if it is not one of them."""
        return self.windows.index(self.length) if self.length in self.windows else None

    def blocks(self) -> list[np.ndarray]:
        """The units of each head block: equal, contiguous, ascending."""
        return list(np.arange(self.units).reshape(self.head_blocks, -1))

    def to_heads(self, units: np.ndarray) -> np.ndarray:
        """[..., units] -> [..., heads]: heads of a unit are neighbours."""
        return np.repeat(units, self.heads // self.units, axis=-1)


def settings_from_config(config: RunConfig) -> Settings:
    """config.aah.head_blocks must be resolved (validate.resolve_head_blocks)."""
    model, aah = config.model, config.aah
    units = model.kv_heads if aah.control_unit == "kv_group" else model.num_heads
    return Settings(aah=aah, layers=model.num_layers, heads=model.num_heads, units=units, length=model.seq_length,
                    windows=tuple(candidate_windows(config)), head_blocks=aah.head_blocks, seed=config.train.seed)
