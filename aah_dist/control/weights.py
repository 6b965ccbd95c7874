"""The scorers' weights: drawn once, never trained, part of the controller's state and not of the model."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from aah_dist.control.features import NUM_FEATURES
from aah_dist.control.settings import Settings

ENRICHED = 3 * NUM_FEATURES + 2

Mlp = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ScorerWeights:
    """independent: 29 -> hidden -> K.  joint: 4 * 29 -> hidden -> 2 K.  K windows; each as weight, bias, weight, bias,
    weights [out, in]."""

    independent: Mlp
    joint: Mlp


def draw_linear(inputs: int, outputs: int, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Weight [out, in] and bias [out], float32, in PyTorch's default distribution and order of draws."""
    weight, bias = torch.empty(outputs, inputs), torch.empty(outputs)
    nn.init.kaiming_uniform_(weight, a=5**0.5, generator=generator)
    nn.init.uniform_(bias, -(inputs**-0.5), inputs**-0.5, generator=generator)
    return weight.numpy(), bias.numpy()


def draw_mlp(inputs: int, hidden: int, outputs: int, generator: torch.Generator) -> Mlp:
    return draw_linear(inputs, hidden, generator) + draw_linear(hidden, outputs, generator)


def draw_scorers(settings: Settings, layer: int) -> ScorerWeights:
    """The weights of one layer, a function of (run seed, layer) alone."""
    seed = int(np.random.SeedSequence((settings.seed, layer)).generate_state(1, np.uint64)[0] >> 1)
    generator = torch.Generator().manual_seed(seed)
    aah, k = settings.aah, len(settings.windows)
    drawn = ScorerWeights(draw_mlp(ENRICHED, aah.scorer_hidden, k, generator),
                          draw_mlp(4 * ENRICHED, aah.joint_hidden, 2 * k, generator))
    return in_precision(drawn, settings)


def in_precision(weights: ScorerWeights, settings: Settings) -> ScorerWeights:
    dtype = settings.arithmetic.dtype
    return ScorerWeights(*(tuple(p.astype(dtype) for p in mlp) for mlp in (weights.independent, weights.joint)))
