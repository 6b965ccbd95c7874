"""Which documents are held out for validation."""

from __future__ import annotations

import numpy as np

from aah_dist.config.schema import ConfigError

# Close enough to the share asked for to stop looking for documents that fit.
_TOLERANCE = 0.02


def choose_valid(characters: np.ndarray, keys: np.ndarray, fraction: float) -> np.ndarray:
    """bool [documents]: held out, by characters (int64 [documents]) and keys drawn from (seed, content) (uint64).

    Documents are taken in the order of their keys while each brings the held-out share of the characters closer to
    `fraction`, so one huge document does not become the whole split. Equal documents have equal keys and stay together.
    Raises ConfigError where either side would be empty.
    """
    unique, group = np.unique(keys, return_inverse=True)
    sizes = np.bincount(group, weights=characters)
    target = fraction * sizes.sum()
    held_out = np.zeros(len(unique), dtype=bool)
    missing = target
    for index, size in enumerate(sizes):
        if missing <= _TOLERANCE * target:
            break
        if abs(missing - size) < missing:
            held_out[index] = True
            missing -= size
    if not held_out.any() or held_out.all():
        side = "validation" if not held_out.any() else "training"
        share = sizes.min() / sizes.sum()
        raise ConfigError(f"valid_fraction {fraction} leaves the {side} split empty: there are {len(unique)} different "
                          f"documents, the smallest of which holds {share:.2g} of the text; give the validation "
                          "text (--valid_text), a larger --valid_fraction, or smaller documents "
                          "(--one_document_per line).")
    return held_out[group]
