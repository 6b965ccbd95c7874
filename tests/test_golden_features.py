"""Features, history, feature EMA and window attention against the golden data."""

import math

import numpy as np
import pytest
import torch
from golden_data import arrays, attend, cases, no_history, settings, sums_of

from aah_dist.attention import window_attention
from aah_dist.control.features import history_from_sums, mean_features, pooled_features, smooth, unit_features

TOLERANCE = {"f32": 2e-6, "f64": 1e-12}


@pytest.mark.parametrize("case", cases("a_features.npz"), ids=lambda c: f"s{c['seed']}")
@pytest.mark.parametrize("precision", TOLERANCE)
def test_features(case: dict, precision: str):
    data, name = arrays("a_features.npz"), f"s{case['seed']}"
    q, k, v, history = (data[f"{name}/{x}"] for x in ("q", "k", "v", "hist"))
    sums, history = sums_of(q, k, v), history.astype(np.float64)
    heads = unit_features(sums, history)
    found = {"head_feats_nohist": unit_features(sums, no_history(len(sums))), "head_feats": heads,
             "group_feats_pooled": pooled_features(sums, history, case["groups"]),
             "group_feats_meanagg": mean_features(heads, case["groups"])}
    for key, value in found.items():
        np.testing.assert_allclose(value, data[f"{name}/{key}_{precision}"], rtol=0, atol=TOLERANCE[precision])


@pytest.mark.parametrize("case", cases("b_feature_ema.npz"), ids=lambda c: f"s{c['seed']}")
def test_feature_ema(case: dict):
    data, name = arrays("b_feature_ema.npz"), f"s{case['seed']}"
    history, ema = no_history(data[f"{name}/feats"].shape[1]), None
    for step in range(case["steps"]):
        q, k, v = data[f"{name}/qkv"][step]
        features = unit_features(sums_of(q, k, v), history)
        ema = smooth(ema, features, case["alpha"])
        np.testing.assert_allclose(features, data[f"{name}/feats"][step], rtol=0, atol=2e-6)
        np.testing.assert_allclose(ema, data[f"{name}/ema"][step], rtol=0, atol=2e-6)
        history = data[f"{name}/hist_after"][step]


def attention_cases() -> list:
    keys = [key for key in arrays("e_window_attention.npz") if key.endswith(("/y_f32", "/y_f64"))]
    return sorted(key.rsplit("/", 1)[0] + key[-4:] for key in keys if "/w" in key)


@pytest.mark.parametrize("key", attention_cases())
@pytest.mark.parametrize("backend", ["dense", "banded", "native"])
def test_window_attention(key: str, backend: str):
    data = arrays("e_window_attention.npz")
    (case, window), precision = key[:-4].split("/"), key[-3:]
    dtype = torch.float64 if precision == "f64" else torch.float32
    q, k, v, grad = (torch.from_numpy(data[f"{case}/{x}"])[None].to(dtype) for x in ("q", "k", "v", "grad_out"))
    for x in (q, k, v):
        x.requires_grad_()
    y = window_attention(q, k, v, [int(window[1:])] * q.shape[1], backend=backend)
    y.backward(grad)
    value, gradient = (2e-6, 1e-5) if precision == "f32" else (1e-12, 1e-12)
    expected = {"y": (y, value), "dq": (q.grad, gradient), "dk": (k.grad, gradient), "dv": (v.grad, gradient)}
    for name, (found, tolerance) in expected.items():
        theirs = data[f"{case}/{window}/{name}_{precision}"]
        np.testing.assert_allclose(found[0].detach().numpy(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", cases("e_window_attention.npz"), ids=lambda c: c["name"])
def test_history_of_mixed_windows(case: dict):
    data, name = arrays("e_window_attention.npz"), case["name"]
    q, k, v = data[f"{name}/qkv"]
    windows = np.array([4, 8, 16, 32])[data[f"{name}/idx"]]
    out, sums = attend(q, k, v, windows)
    joined = out.transpose(0, 2, 1, 3).reshape(data[f"{name}/y"].shape)
    np.testing.assert_allclose(joined, data[f"{name}/y"], rtol=0, atol=2e-6)
    history = history_from_sums(sums, q.shape[2])
    for column, key in enumerate(("head_entropy", "head_norms", "head_usage")):
        np.testing.assert_allclose(history[:, column], data[f"{name}/{key}"], rtol=0, atol=2e-6)


def test_history_is_normalised_by_the_whole_length():
    sums = np.ones((1, 14))
    assert history_from_sums(sums, 64)[0, 0] == pytest.approx(1 / math.log(64))
    assert history_from_sums(sums, 2)[0, 0] == 1  # ln 2 is below 1
    assert settings().length == 64
