"""The banded backend against fp64 dense attention: outputs and gradients of q, k, v."""

import contextlib

import pytest
import torch

from aah_dist.attention import banded, groups, window_attention
from aah_dist.attention.dropout import draw_seeds

CHUNK = groups.chunk_length(1, 1)


def make_inputs(batch, heads, kv_heads, length, size=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length * 1000 + heads * 10 + kv_heads)
    shapes = [(batch, heads, length, size), *[(batch, kv_heads, length, size)] * 2, (batch, heads, length, size)]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def run(backend, inputs, windows, **options):
    """Output and the gradients of q, k, v."""
    q, k, v, grad = inputs
    out = window_attention(q, k, v, windows, backend=backend, **options)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def assert_same(inputs, windows, tolerance=1e-12, **options):
    reference = run("dense", inputs, windows, **options)
    for name, expected, got in zip(("out", "dq", "dk", "dv"), reference, run("banded", inputs, windows, **options),
                                   strict=True):
        assert got.isfinite().all(), name
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance,
                                   msg=lambda text, name=name: f"{name}: {text}")


def edge_windows(length):
    edges = {1, 2, banded.KEY_ALIGN + 1, CHUNK - 1, CHUNK, CHUNK + 1, length - 1, length, length + 1, 10 * length}
    return sorted(w for w in edges if w >= 1)


@pytest.mark.parametrize("length", [1, 7, CHUNK, CHUNK + 1, 191, 321])
def test_every_edge_window_alone(length):
    inputs = make_inputs(1, 1, 1, length)
    for window in edge_windows(length):
        assert_same(inputs, [window])


@pytest.mark.parametrize("kv_heads", [12, 4, 1])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 65, 191])
def test_mixed_and_shuffled_windows(batch, length, kv_heads):
    inputs = make_inputs(batch, 12, kv_heads, length)
    edges = edge_windows(length)
    windows = [edges[(7 * head + 3) % len(edges)] for head in range(12)]
    assert_same(inputs, windows)
    assert_same(inputs, sorted(windows))


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_full_heads_through_flash(kv_heads, monkeypatch):
    monkeypatch.setattr(banded, "FLASH_MIN_LENGTH", 64)
    calls = []
    flash = banded._flash
    monkeypatch.setattr(banded, "_flash", lambda *args, **kw: calls.append(args[0].shape) or flash(*args, **kw))
    inputs = make_inputs(2, 6, kv_heads, 130)
    for windows, full in (([130] * 6, 6), ([130, 17, 200, 17, 130, 64], 3)):
        calls.clear()
        assert_same(inputs, windows)
        assert sum(samples * heads for samples, heads, *_ in calls) == 2 * full


@pytest.mark.parametrize("length", [130, banded.FLASH_MIN_LENGTH + 1])
def test_gradients_with_zero_strides(length):
    """The gradient of a sum is one number expanded over all strides."""
    q, k, v, _ = make_inputs(1, 2, 2, length, size=8)
    for windows in ([length] * 2, [33, length]):
        reference = window_attention(q, k, v, windows, backend="dense").sum()
        got = window_attention(q, k, v, windows, backend="banded").sum()
        for a, b in zip(torch.autograd.grad(reference, (q, k, v)), torch.autograd.grad(got, (q, k, v)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("length", [130, banded.FLASH_MIN_LENGTH + 1])
def test_any_strides(length):
    windows = [5, length, 70, length]
    q, k, v, grad = (x.detach() for x in make_inputs(2, 4, 2, length, size=8))
    time_first = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k, v, grad)]
    size_first = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v, grad)]
    every_other = [torch.stack([x, x], dim=3).flatten(3)[..., ::2].copy_(x) for x in (q, k, v, grad)]
    for inputs in (time_first, size_first, every_other):
        assert not inputs[0].is_contiguous()
        assert_same([x.requires_grad_() for x in inputs[:3]] + [inputs[3]], windows, tolerance=1e-11)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("flash_min", [64, 10000])
def test_lower_precision_stays_near_fp64(dtype, tolerance, flash_min, monkeypatch):
    monkeypatch.setattr(banded, "FLASH_MIN_LENGTH", flash_min)
    inputs = make_inputs(2, 4, 2, 130, dtype=dtype)
    windows = [3, 65, 130, 64]
    exact = [x.detach().double() for x in inputs]
    reference = run("dense", [x.requires_grad_() for x in exact[:3]] + [exact[3]], windows)
    for expected, got in zip(reference, run("banded", inputs, windows), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_autocast_does_not_lower_the_precision():
    inputs = make_inputs(1, 2, 2, 70, dtype=torch.float32)
    plain = run("banded", inputs, [9, 70])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run("banded", inputs, [9, 70])
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck(dropout_p):
    q, k, v, _ = make_inputs(1, 2, 1, 19, size=2)
    seeds = torch.arange(2).view(1, 2)
    assert torch.autograd.gradcheck(
        lambda q, k, v: window_attention(q, k, v, [5, 19], backend="banded", scale=0.7, dropout_p=dropout_p,
                                         dropout_seeds=seeds),
        (q, k, v))


def test_one_key_more_changes_the_result():
    """A window is W keys, the query's own included: W and W + 1 differ, and only from row W on."""
    q, k, v, _ = make_inputs(1, 1, 1, 130)
    for backend in ("dense", "banded"):
        for window in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 129):
            less, more = (window_attention(q, k, v, [w], backend=backend) for w in (window, window + 1))
            torch.testing.assert_close(less[:, :, :window], more[:, :, :window], rtol=1e-12, atol=1e-12)
            assert ((less - more)[:, :, window:].abs().amax(-1) > 1e-9).all()


def test_window_of_one_returns_v():
    q, k, v, _ = make_inputs(2, 4, 2, 70)
    for backend in ("dense", "banded"):
        out = window_attention(q, k, v, [1] * 4, backend=backend)
        torch.testing.assert_close(out, v.repeat_interleave(2, dim=1), rtol=1e-14, atol=1e-14)


def test_large_scores_give_no_nan():
    q, k, v, grad = make_inputs(1, 2, 2, 130, dtype=torch.float32)
    big = [(x.detach() * 1e4).requires_grad_() for x in (q, k)]
    for result in run("banded", [*big, v, grad], [3, 130]):
        assert result.isfinite().all()


def test_changing_windows_leave_bounded_caches():
    q, k, v, _ = make_inputs(1, 2, 2, 33, size=4)
    for window in range(1, 400):
        window_attention(q, k, v, [window, 400 - window], backend="banded")
    for cache in (banded.plan, banded.chunks, banded._corners):
        info = cache.cache_info()
        assert info.maxsize is not None and info.currsize <= info.maxsize
    assert_same(make_inputs(1, 2, 2, 33), [7, 30])


def test_only_inputs_are_saved():
    """Nothing of T x T size is kept between forward and backward."""
    q, k, v, _ = make_inputs(1, 2, 2, 600, size=8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        window_attention(q, k, v, [50, 600], backend="banded")
    assert sum(saved) == q.numel() + k.numel() + v.numel()


def test_few_heads_at_a_time(monkeypatch):
    """Heads that do not fit the cache together are computed in turns, with the same result."""
    inputs = make_inputs(2, 6, 3, 191)
    together = run("banded", inputs, [65] * 5 + [191])
    monkeypatch.setattr(groups, "CACHE_BYTES", 1)
    groups.plan.cache_clear()
    apart = run("banded", inputs, [65] * 5 + [191])
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_path_of_other_devices_fits_together(dropout_p, monkeypatch):
    """Off the CPU every head takes the chunk loop with out-of-place softmax; the meta device checks its shapes."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kw: contextlib.nullcontext())  # meta has no autocast
    q, k, v = (torch.randn(2, heads, 70, 8, device="meta", requires_grad=True) for heads in (4, 2, 2))
    out = banded.banded_attention(q, k, v, (3, 70, 64, 64), 0.3, dropout_p, draw_seeds(2, 4).to("meta"))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, v.shape]
    assert all(x.device.type == "meta" for x in (out, *grads))
