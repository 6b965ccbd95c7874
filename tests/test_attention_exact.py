"""Every backend that can run on this machine's CPU against fp64 attention over a mask: output, dq, dk, dv."""

import pytest
import torch

from aah_dist.attention import window_attention
from aah_dist.attention.backends import BACKENDS, Inputs

BLOCK = 64
CPU = torch.device("cpu")


def trains(name, dtype, length=BLOCK, size=16):
    return BACKENDS[name].obstacle(Inputs(CPU, dtype, length, size, 0.0, True)) is None


RUNNABLE = [name for name in BACKENDS if trains(name, torch.float32)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 2e-2}


def dtype_of(name):
    return torch.float64 if trains(name, torch.float64) else torch.float32


def make(batch, heads, kv_heads, length, dtype, size=16):
    generator = torch.Generator().manual_seed(length * 1000 + heads * 10 + kv_heads)
    shapes = [(batch, h, length, size) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def masked(q, k, v, windows):
    """The definition, one query at a time, in no code that a backend shares."""
    share, size = q.shape[1] // k.shape[1], q.shape[3]
    heads = []
    for head, window in enumerate(windows):
        rows = []
        for i in range(q.shape[2]):
            keys = slice(max(0, i - window + 1), i + 1)
            weights = torch.softmax(q[:, head, i, None] @ k[:, head // share, keys].mT * size**-0.5, -1)
            rows.append(weights @ v[:, head // share, keys])
        heads.append(torch.cat(rows, 1))
    return torch.stack(heads, 1)


def assert_exact(name, inputs, windows):
    *tensors, grad = inputs
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = masked(*exact, windows)
    expected = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    given = [x.requires_grad_() for x in tensors]
    out = window_attention(*given, windows, backend=name)
    found = [out, *torch.autograd.grad(out, given, grad)]
    tolerance = TOLERANCE[out.dtype]
    for what, a, b in zip(("out", "dq", "dk", "dv"), expected, found, strict=True):
        assert b.isfinite().all(), what
        torch.testing.assert_close(b.double(), a, rtol=tolerance, atol=tolerance,
                                   msg=lambda text, what=what: f"{what} under windows {windows}: {text}")


def edges(length):
    return [w for w in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, length - 1, length, length + 1, 5 * length) if w >= 1]


def test_reference_and_cpu_backend_are_among_them():
    assert {"dense", "banded"} <= set(RUNNABLE)


@pytest.mark.parametrize("length", [1, 37, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("name", RUNNABLE)
def test_edge_windows_alone(name, length):
    for window in edges(length):
        assert_exact(name, make(1, 1, 1, length, dtype_of(name)), (window,))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (3, 1), (12, 12), (12, 4), (12, 1)])
@pytest.mark.parametrize("name", RUNNABLE)
def test_mixed_and_shuffled_windows(name, heads, kv_heads, batch):
    """Sorted, then an order in which no two neighbours share a window; then windows that are the same within and
    across groups of query heads."""
    length = 2 * BLOCK + 3
    inputs, of = make(batch, heads, kv_heads, length, dtype_of(name)), edges(length)
    windows = [of[(4 * head + 1) % len(of)] for head in range(heads)]
    for order in (sorted(windows), windows, [(9, length)[head % 2] for head in range(heads)]):
        assert_exact(name, inputs, tuple(order))


@pytest.mark.parametrize("name", RUNNABLE)
def test_windows_that_change_from_call_to_call(name):
    inputs = make(1, 3, 3, 99, dtype_of(name))
    for windows in ((99, 5, 64), (5, 99, 64), (1, 1, 1), (99, 5, 64)):
        assert_exact(name, inputs, windows)


@pytest.mark.parametrize("name", RUNNABLE)
def test_strides(name):
    """Time first as Megatron has them, one slice of a fused projection, size first."""
    def fused(x):
        return torch.cat([x, x, x], 3).permute(2, 0, 1, 3).contiguous()[..., : x.shape[3]].permute(1, 2, 0, 3)

    def time_first(x):
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    def size_first(x):
        return x.mT.contiguous().mT

    for change in (time_first, fused, size_first):
        inputs = [change(x) for x in make(3, 4, 2, 99, dtype_of(name))]
        assert not inputs[0].is_contiguous()
        assert_exact(name, inputs, (7, 99, 64, 7))


@pytest.mark.parametrize("name", RUNNABLE)
def test_bf16(name):
    assert_exact(name, make(1, 3, 1, 99, torch.bfloat16), (7, 99, 64))


@pytest.mark.parametrize("name", RUNNABLE)
def test_rows_never_become_nan(name):
    """Scores so large that all but one key of a row underflow, and equal scores."""
    for factor in (1e3, 0.0):
        q, k, v, grad = make(1, 2, 2, 99, torch.float32)
        q, k, v = ((x * s).requires_grad_() for x, s in ((q, factor), (k, factor), (v, 1.0)))
        out = window_attention(q, k, v, [3, 99], backend=name)
        for x in (out, *torch.autograd.grad(out, (q, k, v), grad)):
            assert x.isfinite().all()


@pytest.mark.parametrize("name", [name for name in RUNNABLE if trains(name, torch.float64)])
def test_gradcheck(name):
    q, k, v, _ = (x.requires_grad_() for x in make(1, 2, 1, 21, torch.float64, size=3))
    assert torch.autograd.gradcheck(lambda *x: window_attention(*x, [5, 21], backend=name), (q, k, v))
