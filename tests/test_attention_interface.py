"""window_attention's arguments, the choice of backend, and the counts of work."""

import numpy as np
import pytest
import torch

from aah_dist.attention import backends, window_attention
from aah_dist.config.pairs import acr, exact_pair_ratio, pairs
from aah_dist.config.schema import ConfigError


def tensors(heads=4, kv_heads=2, length=10, size=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, length, size, generator=generator) for h in (heads, kv_heads, kv_heads)]


def test_windows_in_any_container():
    q, k, v = tensors()
    windows = [1, 3, 10, 12]
    expected = window_attention(q, k, v, windows)
    for same in (tuple(windows), np.array(windows), np.array(windows, dtype=np.int32), torch.tensor(windows)):
        assert torch.equal(window_attention(q, k, v, same), expected)


@pytest.mark.parametrize("windows, word", [
    ([1, 2, 3], "4 heads"), ([[1, 2, 3, 4]], "4 heads"), (5, "give a list"), ([1, 2, 0, 4], "at least 1"),
    ([1, 2, -3, 4], "at least 1"), ([1.0, 2.0, 3.0, 4.0], "integers"), ([True] * 4, "integers"),
    ([True, 2, 3, 4], "integers"), ([1, 2, 3, None], "integers"), ([[1, 2], 3, 4, 5], "integers"),
    (np.ones(4), "integers"), (torch.ones(4, dtype=torch.bfloat16), "integers"), (torch.ones(1, 4), "4 heads"),
    (iter([1, 2, 3, 4]), "give a list"), ({1, 2, 3, 4}, "give a list"), ("1234", "give a list"),
])
@pytest.mark.parametrize("backend", ["dense", "banded", "native"])
def test_wrong_windows(windows, word, backend):
    with pytest.raises(ConfigError, match=word) as error:
        window_attention(*tensors(), windows, backend=backend)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


@pytest.mark.parametrize("change, word", [
    (lambda q, k, v: (q[0], k, v), "batch, heads, tokens"),
    (lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0]), "non-empty"),
    (lambda q, k, v: (q, k[:, :, :5], v), "number of heads"),
    (lambda q, k, v: (q, k[:, :, :5], v[:, :, :5]), "number of heads"),
    (lambda q, k, v: (q, k[..., :2], v[..., :2]), "number of heads"),
    (lambda q, k, v: (q[:, :3], k, v), "multiple"),
    (lambda q, k, v: (q, k[:, :0], v[:, :0]), "multiple"),
    (lambda q, k, v: (q.double(), k, v), "alike"),
    (lambda q, k, v: (q.int(), k.int(), v.int()), "int32"),
])
def test_wrong_tensors(change, word):
    q, k, v = change(*tensors())
    with pytest.raises(ConfigError, match=word):
        window_attention(q, k, v, [4] * 4)


@pytest.mark.parametrize("wrong, word", [
    (None, "q is of type NoneType"), ([[1.0]], "q is of type list"), (np.ones((2, 4, 10, 4)), "q is of type ndarray"),
    (torch.ones(2, 4, 10, 4).to_sparse(), "layout torch.sparse_coo"),
    (torch.ones(2, 4, 10, 4, device="meta"), "on meta"),
])
def test_what_is_no_ordinary_tensor(wrong, word):
    _, k, v = tensors()
    with pytest.raises(ConfigError, match=word):
        window_attention(wrong, k, v, [4] * 4)


@pytest.mark.parametrize("options, word", [
    ({"backend": "sparse"}, "dense, native, banded"),
    ({"backend": ["banded"]}, "dense, native, banded"),
    ({"scale": 0.0}, "above 0"),  # the library's causal attention on CPU gives NaN
    ({"scale": -0.3}, "above 0"),
    ({"scale": float("nan")}, "above 0"),
    ({"scale": float("inf")}, "finite"),
    ({"scale": 1e39}, "finite"),
    ({"scale": "0.3"}, "scale is of type str"),
    ({"scale": torch.tensor([0.3])}, "scale is of type Tensor"),
    ({"dropout_p": None}, "dropout_p is of type NoneType"),
    ({"dropout_p": torch.tensor(0.1)}, "dropout_p is of type Tensor"),
    ({"dropout_p": 1 - 2**-18}, "rounding"),
    ({"backend": "flash"}, "use backend native"),
    ({"dropout_p": 1.0}, "below 1"),
    ({"dropout_p": -0.1}, "at least 0"),
    ({"dropout_p": float("nan")}, "at least 0"),
    ({"dropout_p": 0.1, "dropout_seeds": torch.zeros(4, dtype=torch.int64)}, "each sample and head"),
    ({"dropout_p": 0.1, "dropout_seeds": torch.zeros(2, 4)}, "int64"),
    ({"dropout_p": 0.1, "dropout_seeds": np.zeros((2, 4), dtype=np.int64)}, "dropout_seeds are of type ndarray"),
    ({"dropout_seeds": torch.zeros(4, dtype=torch.int64)}, "each sample and head"),
])
def test_wrong_options(options, word):
    with pytest.raises(ConfigError, match=word):
        window_attention(*tensors(), [4] * 4, **options)


@pytest.mark.parametrize("backend", ["dense", "banded", "native"])
def test_autocast_changes_nothing(backend):
    expected = window_attention(*tensors(), [4] * 4, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(window_attention(*tensors(), [4] * 4, backend=backend), expected)


def test_dense_refuses_long_sequences():
    length = backends.DENSE_MAX_LENGTH + 1
    x = torch.zeros(1, 1, length, 1)
    with pytest.raises(ConfigError, match="use backend native"):
        window_attention(x, x, x, [3], backend="dense")
    assert window_attention(x, x, x, [3], backend="banded").shape == x.shape


def test_scale_and_causal_limit_equal_torch():
    q, k, v = (x.double() for x in tensors(kv_heads=4))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    for backend in ("dense", "banded", "native"):
        got = window_attention(q, k, v, [10, 11, 50, 10], backend=backend, scale=0.3)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 7, 12])
def test_pairs_by_counting(length):
    for window in range(1, length + 3):
        counted = sum(i - window < j <= i for i in range(length) for j in range(length))
        assert pairs(window, length) == counted


def test_ratios():
    assert acr([[512, 4096], [1024, 9999]], 4096) == pytest.approx((0.125 + 1 + 0.25 + 1) / 4)
    for window, floor in ((512, 0.2343), (1024, 0.4375), (2048, 0.7499), (4096, 1.0)):
        assert exact_pair_ratio([window], 4096) == pytest.approx(floor, abs=5e-5)
    mix = np.array([512] * 6 + [1024] * 2 + [2048] * 2 + [4096] * 2)
    assert exact_pair_ratio(mix, 4096) == pytest.approx(0.482, abs=5e-4)
    assert exact_pair_ratio(mix.reshape(2, 6), 4096) == exact_pair_ratio(mix, 4096)
