"""The controller's benchmark measures what it says: every regime decides, from statistics that could be a model's."""

import numpy as np

from aah_dist.bench.controller import REGIMES, decision, random_sums
from aah_dist.control.features import unit_features


def test_every_regime_decides():
    found = decision(rounds=1, updates=2)
    assert list(found) == list(REGIMES)
    assert all(row["cpu"] > 0 and row["wall"] > 0 for row in found.values())
    levels = {regime: row["levels"] for regime, row in found.items()}
    assert levels["shallow_freeze"] == levels["grouping_off"] == 1
    # Four levels cost the most; with only one nearly everywhere, the figure would flatter.
    assert levels["full_adaptive"] > 3 and levels["deep_practical_reuse"] > 3


def test_random_statistics_could_be_a_models():
    rng = np.random.default_rng(4)
    first, second = (random_sums(rng, 2, 5, 40, 8) for _ in range(2))
    assert first.shape == second.shape == (2, 5, 14) and not np.array_equal(first[..., 2:], second[..., 2:])
    features = unit_features(first[0], np.zeros((5, 3)))
    # mean |x| of a normal variable is sqrt(2 / pi) of its standard deviation
    np.testing.assert_allclose(features[:, 0:6:2] / features[:, 1:6:2], (2 / np.pi)**0.5, rtol=0.05)
