"""The native backend at the edges of its blocks, its dropout, threads, counter and build."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from aah_dist.attention import native, native_library, window_attention
from aah_dist.attention.dropout import draw_seeds
from aah_dist.config.pairs import pairs

QUERIES, KEYS = 64, 256  # of a block, as in native.cpp


@pytest.fixture
def use():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make_inputs(batch, heads, kv_heads, length, size=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length * 100 + heads)
    shapes = [(batch, heads, length, size), *[(batch, kv_heads, length, size)] * 2, (batch, heads, length, size)]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return [*(x.requires_grad_() for x in (q, k, v)), grad]


def run(backend, inputs, windows, **options):
    """Output and the gradients of q, k, v."""
    *tensors, grad = inputs
    out = window_attention(*tensors, windows, backend=backend, **options)
    return [out, *torch.autograd.grad(out, tensors, grad)]


def assert_same(inputs, windows, tolerance=1e-11, **options):
    found, expected = (run(name, inputs, windows, **options) for name in ("native", "dense"))
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("length", [QUERIES + 1, KEYS, KEYS + 1, 2 * KEYS + QUERIES + 3])
def test_windows_at_the_edges_of_blocks(length):
    edges = [1, 2, QUERIES, KEYS - QUERIES, KEYS - 1, KEYS, KEYS + 1, 2 * KEYS, 2 * KEYS + 1, length - 1]
    assert_same(make_inputs(1, len(edges), 5, length), edges)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("length", [QUERIES - 1, KEYS + QUERIES + 1])
def test_dropout(length, kv_heads):
    inputs, seeds = make_inputs(2, 6, kv_heads, length), draw_seeds(2, 6)
    for dropout_p in (0.25, 0.9):
        assert_same(inputs, [length, 3, 70, 64, 257, 9], dropout_p=dropout_p, dropout_seeds=seeds)
    assert_same(inputs, [length] * 6, dropout_p=0.1, dropout_seeds=seeds.mT.contiguous().mT)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_lower_precision_stays_near_fp64(dtype, tolerance):
    inputs, windows = make_inputs(2, 4, 2, 600, size=32, dtype=dtype), [3, 65, 600, 300]
    *tensors, grad = (x.detach().double() for x in inputs)
    expected = run("dense", [*(x.requires_grad_() for x in tensors), grad], windows)
    for x, y in zip(run("native", inputs, windows), expected, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


def test_exponential_of_fp32_within_few_units():
    """Rows of two keys: the output is a logistic function of their scores' difference."""
    difference = torch.linspace(-80, 80, 2001)
    q = torch.stack([torch.zeros_like(difference), difference], 1).view(-1, 1, 2, 1)
    k = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand_as(q)
    out = window_attention(q, k, k, [2], backend="native", scale=1.0)[:, 0, 1, 0]
    torch.testing.assert_close(out.double(), difference.double().sigmoid(), rtol=5e-7, atol=0)


def test_strides_without_a_copy_and_with_one():
    windows, inputs = [5, 300, 70, 64], make_inputs(2, 4, 2, 300)
    time_first = [x.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in inputs]
    size_first = [x.detach().mT.contiguous().mT for x in inputs]
    one_head = [x.detach()[:, :1].expand_as(x) for x in inputs]
    one_sample = [x.detach()[:1].expand_as(x) for x in inputs]
    one_token = [x.detach()[:, :, :1].expand_as(x) for x in inputs]
    for *tensors, grad in (time_first, size_first, one_head, one_sample, one_token):
        assert_same([*(x.requires_grad_() for x in tensors), grad], windows)
    out = window_attention(*time_first[:3], windows, backend="native")
    assert out.stride() == time_first[0].stride()  # as Megatron's next layer reads it
    far = torch.randn(64).as_strided((1, 4, 1, 8), (0, 8, 2**40, 1))  # a stride that C's int does not hold
    torch.testing.assert_close(window_attention(far, far, far, [3] * 4, backend="native"), far)
    negated = torch._neg_view(inputs[0].detach())
    torch.testing.assert_close(*(window_attention(negated, inputs[1], inputs[2], windows, backend=name)
                                 for name in ("native", "dense")))
    for shape in ((2, 4, 1, 8), (2, 4, 300, 1), (1, 4, 1, 1)):
        assert_same(make_inputs(shape[0], 4, 2, shape[2], size=shape[3]), windows)


def test_gradcheck():
    q, k, v, _ = make_inputs(1, 2, 1, 19, size=2)
    for dropout_p in (0.0, 0.3):
        assert torch.autograd.gradcheck(
            lambda *x, p=dropout_p: window_attention(*x, [5, 19], backend="native", scale=0.7, dropout_p=p,
                                                     dropout_seeds=torch.arange(2).view(1, 2)), (q, k, v))


def test_a_window_one_key_longer_differs_from_its_row_on():
    q, k, v, _ = make_inputs(1, 1, 1, 300)
    for window in (1, 2, QUERIES - 1, QUERIES, KEYS, 299):
        less, more = (window_attention(q, k, v, [w], backend="native") for w in (window, window + 1))
        torch.testing.assert_close(less[:, :, :window], more[:, :, :window], rtol=1e-12, atol=1e-12)
        assert ((less - more)[:, :, window:].abs().amax(-1) > 1e-9).all()


def test_rows_of_one_key_have_gradients_of_zero():
    """Exactly: Adam would make steps of what rounding leaves."""
    q, k, v, grad = make_inputs(1, 2, 2, 300, size=24, dtype=torch.float32)
    for windows, rows in (([1, 1], slice(None)), ([40, 300], 0)):
        assert not run("native", [q, k, v, grad], windows)[1][:, :, rows].any()


def test_changed_seeds_are_noticed():
    inputs, seeds = make_inputs(1, 2, 2, 70), torch.arange(2).view(1, 2)
    out = window_attention(*inputs[:3], [5, 70], backend="native", dropout_p=0.5, dropout_seeds=seeds)
    seeds.fill_(99)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_another_default_device_changes_nothing():
    inputs = make_inputs(1, 2, 2, 71)
    expected = run("native", inputs, [5, 71])
    native._units.cache_clear()
    with torch.device("meta"):
        found = run("native", inputs, [5, 71])
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_nan_in_a_window_reaches_the_output():
    for what in range(3):
        for value in (float("nan"), float("inf")):
            inputs = [x.detach().clone() for x in make_inputs(1, 1, 1, 300, dtype=torch.float32)[:3]]
            inputs[what][0, 0, 200] = value
            assert not window_attention(*inputs, [50], backend="native")[0, 0, 200].isfinite().all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_any_number_of_threads_gives_the_same_bits(use, kv_heads, dropout_p, monkeypatch):
    monkeypatch.setattr(native, "FEW_PRODUCTS", 0)
    inputs, options = make_inputs(2, 6, kv_heads, 191, dtype=torch.float32), {"dropout_p": dropout_p}
    options["dropout_seeds"] = torch.arange(12).view(2, 6)
    results = []
    for count in (1, 2, 3, 20):
        use(count)
        results.append(run("native", inputs, [5, 191, 64, 5, 100, 191], **options))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_windows_skip_what_lies_outside():
    """By the kernels' own counter: at least the pairs inside, at most a block of queries more for each window."""
    def counted(windows, length):
        before = native_library.load().cells()
        out, *_ = run("native", make_inputs(1, len(windows), 1, length), windows)
        assert out.shape[2] == length
        return (native_library.load().cells() - before) / 2  # forward and backward

    for length in (1, 63, 700):
        for window in (1, 7, 64, 300, length):
            inside = pairs(min(window, length), length)
            assert inside <= counted([window], length) <= inside + length * QUERIES
    assert counted([64] * 4, 2000) < counted([2000] * 4, 2000) / 6


def test_only_vectors_are_saved_beside_inputs_and_output():
    q, k, v, _ = make_inputs(1, 2, 2, 600)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        window_attention(q, k, v, [50, 600], backend="native")
    assert sum(saved) == q.numel() * 2 + k.numel() + v.numel() + 2 * 600


def test_caches_are_bounded():
    q, k, v, _ = make_inputs(1, 2, 2, 33)
    for window in range(1, 200):
        window_attention(q, k, v, [window, 200 - window], backend="native")
    assert native._units.cache_info().currsize <= native._units.cache_info().maxsize == 64


def test_denormal_numbers_survive_the_library():
    """Code linked with -ffast-math would flush them to zero in the whole process."""
    assert isinstance(native_library.load(), native_library.Kernels)
    assert torch.tensor(1e-40).mul(1.0) > 0


def test_the_structure_is_that_of_the_source():
    """Field names in their order; a field out of place would be read as another."""
    text = native_library.SOURCE.read_text(encoding="utf-8").split("struct Call {")[1].split("};")[0]
    lines = [line.split("//")[0].strip().rstrip(";") for line in text.splitlines()]
    without_type = [line.replace("const ", "").split(" ", 1)[1] for line in lines if line]
    names = [name.strip(" *") for line in without_type for name in line.split(",")]
    assert names == [name for name, _ in native_library.Call._fields_]
    assert all(ctypes.sizeof(kind) in (8, ctypes.sizeof(native_library.Matrices))
               for _, kind in native_library.Call._fields_)


def listed(folder, **changes):
    """What `python -m aah_dist.attention` prints with an empty cache."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), **changes}
    done = subprocess.run([sys.executable, "-m", "aah_dist.attention"], capture_output=True, text=True, check=True,
                          env=environment)
    return done.stdout, done.stderr


def test_it_is_built_once(tmp_path):
    assert "native (" in listed(tmp_path)[0]
    built = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")}
    assert len(built) == 1
    listed(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")} == built


def test_several_processes_build_at_once(tmp_path):
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    code = "from aah_dist.attention.native import missing; assert missing() is None, missing()"
    runs = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0, 0]
    assert sorted(path.suffix for path in (tmp_path / "aah_dist_attention").iterdir()) == ["", ".so"]


def test_without_a_compiler_or_with_one_that_fails_auto_says_so(tmp_path):
    shown, _ = listed(tmp_path, PATH="/nonexistent", CXX="")
    assert "cpu: cannot run: the native backend needs a C++ compiler, and it finds none (install g++)\n" in shown
    assert "banded (plain torch operators, it skips the work outside each window; not native: " in shown
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho such an error >&2\nexit 1\n")
    broken.chmod(0o755)
    shown, printed = listed(tmp_path, CXX=str(broken))
    assert f"was not built: {broken} ended with code 1, as printed above" in shown and "such an error" in printed
    assert "was not built: /bin/true ended with code 0;" in listed(tmp_path, CXX="/bin/true")[0].replace("\n", ";")
    assert "C++ compiler, and CXX names /no/such, which is not there" in listed(tmp_path, CXX="/no/such -O1")[0]
    occupied = tmp_path / "file"
    occupied.touch()
    assert "the native backend cannot keep its library (" in listed(occupied)[0]


def test_options_in_cxx_are_used_and_make_another_library(tmp_path):
    listed(tmp_path, CXX="")
    assert "native (" in listed(tmp_path, CXX="g++ -DUNUSED")[0]
    assert len(list(tmp_path.rglob("*.so"))) == 2


def test_a_library_that_cannot_be_loaded_is_named(tmp_path):
    listed(tmp_path)
    (library,) = tmp_path.rglob("*.so")
    library.write_bytes(b"")
    assert f"cannot load its library; delete {library}, it is built again (" in listed(tmp_path)[0]
