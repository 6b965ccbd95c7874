"""The flash backend, with recorders in the libraries' place.

A recorder computes attention from the arguments it is given, under flash-attn's own convention: window_size counts the
keys before and after a query's own, its own excluded, and -1 is no limit.  So a wrong conversion gives a wrong result.
"""

import inspect
import sys
import types
from collections import Counter

import pytest
import torch
from torch.nn.attention import varlen

from aah_dist.attention import flash
from aah_dist.attention.reference import dense_attention

varlen_signature = inspect.signature(varlen.varlen_attn)


def masked(q, k, v, scale, causal, window_size):
    """[B, T, heads, D]; query head h reads key/value head h // share."""
    position = torch.arange(q.shape[1])
    after = position - position[:, None]
    left, right = window_size
    allowed = torch.ones_like(after, dtype=torch.bool)
    if causal:
        allowed &= after <= 0
    if left >= 0:
        allowed &= after >= -left
    if right >= 0:
        allowed &= after <= right
    assert q.shape[2] % k.shape[2] == 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~allowed, float("-inf")).softmax(-1), v)


class FlashAttn:
    """flash_attn.flash_attn_func of flash-attn 2."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                 alibi_slopes=None, deterministic=False, return_attn_probs=False):
        assert dropout_p == 0 and causal
        self.calls.append((tuple(q.shape), k.shape[2], window_size, deterministic))
        return masked(q, k, v, softmax_scale, causal, window_size)


class Varlen:
    """torch.nn.attention.varlen.varlen_attn; causal only by its window_size."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        given = varlen_signature.bind(*args, **kwargs)
        given.apply_defaults()
        a = given.arguments
        q, k, v, starts = a["query"], a["key"], a["value"], a["cu_seq_q"]
        assert torch.equal(starts, a["cu_seq_k"]) and starts.dtype == torch.int32 and starts[-1] == len(q)
        assert a["enable_gqa"] or q.shape[1] == k.shape[1]
        assert a["max_q"] == a["max_k"] == starts.diff().max()
        self.calls.append(((len(starts) - 1, a["max_q"], *q.shape[1:]), k.shape[1], a["window_size"], False))
        outs = [masked(q[None, i:j], k[None, i:j], v[None, i:j], a["scale"], False, a["window_size"])[0]
                for i, j in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
        return torch.cat(outs)


@pytest.fixture(params=["flash-attn", "varlen"])
def recorder(request, monkeypatch):
    recorder = FlashAttn() if request.param == "flash-attn" else Varlen()
    if request.param == "flash-attn":
        package = types.ModuleType("flash_attn")
        package.flash_attn_func, package.__version__ = recorder, "2.8.3"
        monkeypatch.setitem(sys.modules, "flash_attn", package)
    else:
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))  # like flash-attn 4 alone
        monkeypatch.setattr(varlen, "varlen_attn", recorder)
    flash.library.cache_clear()
    assert flash.library()[0] == ("flash-attn 2.8.3" if request.param == "flash-attn" else "torch varlen_attn")
    yield recorder
    flash.library.cache_clear()


def make_inputs(batch, heads, kv_heads, length, size=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length * 100 + heads + kv_heads)
    q, k, v, grad = (torch.randn(batch, h, length, size, generator=generator, dtype=torch.float64).to(dtype)
                     for h in (heads, kv_heads, kv_heads, heads))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def run(function, inputs, windows):
    q, k, v, grad = inputs
    out = function(q, k, v, tuple(windows), 0.3, 0.0, None)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def assert_same(inputs, windows, tolerance=1e-12):
    for name, expected, got in zip(("out", "dq", "dk", "dv"), run(dense_attention, inputs, windows),
                                   run(flash.flash_attention, inputs, windows), strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance,
                                   msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("length", [1, 2, 33])
def test_every_edge_window(recorder, length):
    inputs = make_inputs(1, 2, 2, length)
    for window in sorted({1, 2, max(1, length - 1), length, length + 1, 10 * length}):
        recorder.calls.clear()
        assert_same(inputs, [window] * 2)
        [(shape, kv_heads, size, _)] = recorder.calls
        no_limit = (-1, -1) if isinstance(recorder, FlashAttn) else (-1, 0)
        assert (shape, kv_heads) == ((1, length, 2, 8), 2)
        assert size == (no_limit if window >= length else (window - 1, 0))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("windows", [
    [1, 1, 5, 5, 5, 33, 40, 32, 32, 33, 33, 33],  # neighbours: slices
    [5, 33, 1, 5, 99, 32, 1, 5, 33, 32, 5, 33],  # anywhere: copies
])
def test_one_call_for_each_distinct_window(recorder, batch, windows):
    inputs = make_inputs(batch, 12, 12, 33)
    assert_same(inputs, windows)
    clipped = [min(w, 33) for w in windows]
    assert [call[0] for call in recorder.calls] == [
        (batch, 33, clipped.count(w), 8) for w in sorted(set(clipped))]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("windows", [
    [5] * 4 + [33] * 8,
    [5, 33, 1, 5, 99, 32, 1, 5, 33, 32, 5, 33],
    [5] * 11 + [33],
])
def test_shared_key_value_heads_are_not_expanded(recorder, batch, kv_heads, windows):
    inputs = make_inputs(batch, 12, kv_heads, 33)
    assert_same(inputs, windows)
    # The query heads of each window and key/value head, counted; equally many of one window go into one call.
    share = 12 // kv_heads
    counts = Counter((min(w, 33), head // share) for head, w in enumerate(windows))
    calls = Counter((window, sharers) for (window, _), sharers in counts.items())
    assert [(call[0][2], call[1]) for call in recorder.calls] == [
        (sharers * number, number) for (_, sharers), number in sorted(calls.items())]


def test_key_value_groups_with_one_window_each_take_one_call_a_window(recorder):
    assert_same(make_inputs(2, 12, 6, 33), [5, 5, 33, 33, 5, 5, 9, 9, 33, 33, 9, 9])
    assert len(recorder.calls) == 3


def test_any_strides(recorder):
    q, k, v, grad = (x.detach() for x in make_inputs(2, 4, 2, 33))
    time_first = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k, v, grad)]
    size_first = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v, grad)]
    for inputs in (time_first, size_first):
        assert not inputs[0].is_contiguous()
        for windows in ([9] * 4, [9, 33, 9, 2]):
            assert_same([x.requires_grad_() for x in inputs[:3]] + [inputs[3]], windows)


def test_half_precision(recorder):
    """Gradients of a key/value head that several calls read are summed in fp32."""
    inputs = make_inputs(2, 4, 1, 33, dtype=torch.bfloat16)
    expected = run(dense_attention, [x.detach().double().requires_grad_() for x in inputs], [9, 33, 1, 20])
    for reference, got in zip(expected, run(flash.flash_attention, inputs, [9, 33, 1, 20]), strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), reference, rtol=5e-2, atol=5e-2)


def test_windows_change_from_call_to_call(recorder):
    inputs = make_inputs(1, 4, 2, 17)
    for first in (1, 2, 9, 16, 17, 18):
        assert_same(inputs, [first, 17, 19 - first, 3])
    info = flash._index.cache_info()
    assert info.maxsize is not None and info.currsize <= info.maxsize


def test_evaluation_in_inference_mode_leaves_training_intact(recorder):
    flash._index.cache_clear()
    inputs = make_inputs(1, 4, 4, 17)
    with torch.inference_mode():
        flash.flash_attention(*inputs[:3], (3, 17, 3, 17), 0.3, 0.0, None)
    assert_same(inputs, [3, 17, 3, 17])


def test_deterministic_algorithms_are_passed_on(recorder):
    """To flash-attn; torch's own kernel reads the setting itself."""
    inputs = make_inputs(1, 2, 2, 9)
    torch.use_deterministic_algorithms(True)
    try:
        run(flash.flash_attention, inputs, [3, 3])
    finally:
        torch.use_deterministic_algorithms(False)
    run(flash.flash_attention, inputs, [3, 3])
    assert [call[3] for call in recorder.calls] == [isinstance(recorder, FlashAttn), False]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_real_varlen_attention_takes_the_calls(kv_heads, monkeypatch):
    """On the meta device torch's function checks and differentiates the call without computing it."""
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    flash.library.cache_clear()
    q, k, v = (torch.randn(3, h, 33, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
               for h in (4, kv_heads, kv_heads))
    out = flash.flash_attention(q, k, v, (5, 33, 5, 7), 0.3, 0.0, None)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    flash.library.cache_clear()
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, v.shape]


def test_a_broken_flash_attn_is_not_passed_over(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("import flash_attn_2_cuda_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr("aah_dist.parallel.device.has_gpu", lambda: True)
    flash.library.cache_clear()
    sentence = flash.missing()
    assert "flash_attn_2_cuda_that_is_not_there" in sentence and "reinstall" in sentence and sentence.endswith(".")


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr("aah_dist.parallel.device.has_gpu", lambda: False)
    assert "CUDA device" in flash.missing()
