"""The triton backend in Triton's interpreter; run by test_attention_triton.py, which sets TRITON_INTERPRET first.

Everything is compared with fp64 dense attention.  Tiles are small, as the interpreter takes some 20 ms a tile.
"""

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from aah_dist.attention import triton_attention as module
from aah_dist.attention import triton_kernels
from aah_dist.attention.dropout import draw_seeds, drop_mask, row_keys
from aah_dist.attention.reference import dense_attention
from aah_dist.attention.triton_attention import Launch, triton_attention

BLOCK = 16
KERNELS = ("forward", "backward_q", "backward_kv")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    set_tiles(monkeypatch, BLOCK, BLOCK)


def set_tiles(monkeypatch, block_m, block_n):
    monkeypatch.setattr(module, "launch_of", lambda kernel, dtype, size: Launch(block_m, block_n, 4, 1))


def make_inputs(batch, heads, kv_heads, length, size=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length * 1000 + heads * 10 + kv_heads)
    shapes = [(batch, heads, length, size), *[(batch, kv_heads, length, size)] * 2, (batch, heads, length, size)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(attention, inputs, windows, scale=0.3, dropout_p=0.0, seeds=None):
    """Output and the gradients of q, k, v."""
    *qkv, grad = inputs
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = attention(*qkv, tuple(windows), scale, dropout_p, seeds)
    return [out, *torch.autograd.grad(out, qkv, grad)]


def assert_same(inputs, windows, tolerance=2e-5, attention=triton_attention, **options):
    reference = run(dense_attention, [x.double() for x in inputs], windows, **options)
    results = run(attention, inputs, windows, **options)
    for name, expected, got in zip(("out", "dq", "dk", "dv"), reference, results, strict=True):
        assert got.dtype == inputs[0].dtype and got.shape == expected.shape and got.isfinite().all(), name
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance,
                                   msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("block_m, block_n", [(16, 16), (32, 16), (16, 32)])
def test_every_edge_window(block_m, block_n, monkeypatch):
    """One head for each window, out of order."""
    set_tiles(monkeypatch, block_m, block_n)
    length = 34
    assert_same(make_inputs(1, 9, 9, length), [17, 1, length, length + 1, 2, 10 * length, 15, length - 1, 16])


@pytest.mark.parametrize("length", [1, 7, 16, 31])
def test_lengths(length):
    assert_same(make_inputs(3, 3, 3, length), [5, length, 1])


@pytest.mark.parametrize("length, size", [(65, 64), (130, 128), (200, 64)])
def test_tiles_of_the_launch_table(length, size, monkeypatch):
    monkeypatch.undo()
    assert_same(make_inputs(1, 2, 1, length, size, torch.float16), [length, 64], tolerance=2e-2, scale=size**-0.5)


@pytest.mark.parametrize("batch, heads, kv_heads", [(3, 3, 1), (1, 4, 2), (1, 12, 4)])
def test_shared_key_heads(batch, heads, kv_heads):
    windows = [1, 20, 16, 17, 3, 40, 15, 2, 19, 18, 5, 20]
    assert_same(make_inputs(batch, heads, kv_heads, 20), windows[:heads])


@pytest.mark.parametrize("size", [1, 40, 64, 128])
def test_head_sizes(size):
    assert_same(make_inputs(1, 2, 1, 35, size), [35, 18], scale=size**-0.5)


def test_fp16_stays_near_fp64():
    assert_same(make_inputs(1, 2, 1, 35, size=64, dtype=torch.float16), [35, 18], tolerance=4e-3, scale=0.125)
    seeds = torch.tensor([[1, 2]])
    assert_same(make_inputs(1, 2, 1, 20, dtype=torch.float16), [20, 5], tolerance=4e-3, dropout_p=0.2, seeds=seeds)


def test_bf16_stays_near_fp64(monkeypatch):
    """The interpreter multiplies the bits of bf16 numbers; here, as on a device, it multiplies the numbers."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def widen(builder, x):
        return builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot",
                        lambda self, a, b, *rest: multiply(self, widen(self, a), widen(self, b), *rest))
    inputs, windows = make_inputs(1, 2, 1, 35, size=64, dtype=torch.bfloat16), [35, 18]
    assert_same(inputs, windows, tolerance=3e-2, scale=0.125, attention=module._Attention.apply)


def test_strides():
    inputs = make_inputs(2, 2, 1, 20)
    time_first = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in inputs]
    size_first = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs]
    packed = [torch.cat([x, x], -1)[..., 16:] for x in inputs]
    for strided in (time_first, size_first, packed):
        assert not strided[0].is_contiguous()
        assert_same(strided, [20, 3])
    for result, given in zip(run(triton_attention, time_first, [20, 3]), [time_first[0], *time_first[:3]], strict=True):
        assert result.stride() == given.stride()


def test_gradient_with_zero_strides():
    *qkv, grad = make_inputs(1, 1, 1, 20)
    assert_same([*qkv, torch.ones(()).expand(grad.shape)], [7])


def test_rows_more_than_2_31_elements_apart(monkeypatch):
    """Storage that is never touched between the rows; the interpreter would copy it onto itself."""
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    set_tiles(monkeypatch, 128, 128)
    *_, grad = inputs = make_inputs(3, 1, 1, 264, dtype=torch.float16)
    apart = torch.empty(265 << 23, dtype=torch.float16)
    far_rows = apart.as_strided((1, 1, 264, 16), (1, 1, 1 << 23, 1)).copy_(inputs[0][:1])
    assert module._readable(far_rows) is far_rows
    assert_same([far_rows, far_rows, far_rows, grad[:1]], [2], tolerance=4e-3)
    short = inputs[0][:, :, :20]
    far_samples = apart.as_strided((3, 1, 20, 16), (1 << 30, 1, 16, 1)).copy_(short)
    assert_same([far_samples, far_samples, far_samples, grad[:, :, :20]], [2], tolerance=4e-3)


@pytest.mark.parametrize("dropout_p", [0.1, 0.6])
def test_dropout_equals_dense(dropout_p):
    inputs, seeds = make_inputs(2, 4, 2, 35), draw_seeds(2, 4)
    assert_same(inputs, [35, 1, 17, 20], dropout_p=dropout_p, seeds=seeds)


def test_dropout_mask_bit_by_bit():
    """With the identity as values the output is the probabilities: none of those kept is zero."""
    length = 37
    q = torch.zeros(2, 2, length, length)
    v = torch.eye(length).expand(2, 1, length, length)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    seeds = torch.tensor([[0, -(1 << 63)], [123456789012345, -1]])
    kept = triton_attention(q, q[:, :1], v, (length, length), 1.0, 0.5, seeds) != 0
    assert torch.equal(kept, ~drop_mask(row_keys(seeds, length), 0, length, 0.5) & causal)


@pytest.mark.parametrize("dropout_p", [2**-16, 1 - 2**-16])
def test_extreme_dropout_rates(dropout_p):
    for result in run(triton_attention, make_inputs(1, 1, 1, 20), [20], dropout_p=dropout_p, seeds=torch.tensor([[3]])):
        assert result.isfinite().all()


@pytest.mark.parametrize("scale", [0.01, 1])
def test_any_scale(scale):
    assert_same(make_inputs(1, 1, 1, 20), [9], scale=scale)


def test_large_scores_give_no_nan():
    q, k, v, grad = make_inputs(1, 2, 1, 40)
    for result in run(triton_attention, [q * 1e4, k * 1e4, v, grad], [3, 40]):
        assert result.isfinite().all()


def test_window_of_one_returns_v():
    q, k, v, _ = make_inputs(1, 4, 2, 20)
    assert torch.equal(triton_attention(q, k, v, (1,) * 4, 0.3, 0.0, None), v.repeat_interleave(2, dim=1))


def test_tiles_outside_the_band_are_not_read():
    """NaN there would reach the sums: 0 x NaN is NaN."""
    inputs = make_inputs(1, 1, 1, 64)
    clean = run(triton_attention, inputs, [16])
    q, k, v, grad = (x.clone() for x in inputs)
    k[:, :, :16], v[:, :, :16] = torch.nan, torch.nan
    out, dq, _, _ = run(triton_attention, [q, k, v, grad], [16])
    for name, got, expected in (("out", out, clean[0]), ("dq", dq, clean[1])):
        assert torch.equal(got[:, :, 32:], expected[:, :, 32:]), name
        assert got[:, :, 16].isnan().all(), name
    q, k, v, grad = (x.clone() for x in inputs)
    q[:, :, 32:], grad[:, :, 32:] = torch.nan, torch.nan
    for got, expected in zip(run(triton_attention, [q, k, v, grad], [16])[2:], clean[2:], strict=True):
        assert torch.equal(got[:, :, :16], expected[:, :, :16])


class Recorder:
    """In a kernel's place: notes how it is launched, then launches it."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        def launch(*args, **options):
            fixed = [x for x in args if not isinstance(x, torch.Tensor)]
            self.calls.append((self.kernel.__name__, grid, fixed, options))
            self.kernel[grid](*args, **options)
        return launch


def test_other_windows_cost_one_upload_and_nothing_else(monkeypatch):
    """One launch of each kernel for all heads; the scalars and options, which Triton compiles by, stay the same."""
    calls = []
    for name in KERNELS:
        monkeypatch.setattr(triton_kernels, name, Recorder(getattr(triton_kernels, name), calls))
    module._plan.cache_clear()
    inputs, launches = make_inputs(1, 3, 1, 20), []
    for windows, misses in (([20, 3, 9], 1), ([20, 3, 9], 1), ([1, 16, 17], 2), ([20, 3, 9], 2), ([50, 3, 9], 2)):
        calls.clear()
        assert_same(inputs, windows)
        assert module._plan.cache_info().misses == misses
        assert tuple(name for name, *_ in calls) == KERNELS
        launches.append(list(calls))
    assert all(launch == launches[0] for launch in launches)


def test_only_inputs_and_output_are_kept():
    q, k, v, _ = (x.requires_grad_() for x in make_inputs(1, 2, 1, 20))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        triton_attention(q, k, v, (20, 3), 0.3, 0.5, torch.tensor([[1, 2]]))
    assert sum(saved) == 2 * q.numel() + k.numel() + v.numel() + 2 * 20
