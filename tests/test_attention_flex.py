"""The flex backend: its blocks against brute force, and one compiled forward pass."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from aah_dist.attention import flex, window_attention
from aah_dist.config.schema import ConfigError

CPU = torch.device("cpu")
BLOCK = 16  # small enough to look at every cell of many lengths


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(flex, "BLOCK", BLOCK)
    flex.block_mask.cache_clear()
    yield
    flex.block_mask.cache_clear()


def band(windows, length):
    """bool [H, T, T]."""
    position = torch.arange(length)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < torch.tensor(windows)[:, None, None])


def chosen(numbers, indices):
    """The (row, column) pairs that an ordered list of blocks names."""
    return {(row, column) for row, number in enumerate(numbers.tolist())
            for column in indices[row, :number].tolist()}


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 77])
def test_blocks_by_looking_at_every_cell(length, small_blocks):
    edges = {1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, length - 1, length, length + 1, 10 * length}
    windows = tuple(sorted(w for w in edges if w >= 1))
    mask = flex.block_mask(windows, length, CPU)
    number = -(-length // BLOCK)
    cells = torch.zeros(len(windows), number * BLOCK, number * BLOCK, dtype=torch.bool)
    cells[:, :length, :length] = band(windows, length)
    counts = cells.view(len(windows), number, BLOCK, number, BLOCK).sum((2, 4))
    for head, count in enumerate(counts):
        partly = {tuple(x) for x in ((count > 0) & (count < BLOCK * BLOCK)).nonzero().tolist()}
        wholly = {tuple(x) for x in (count == BLOCK * BLOCK).nonzero().tolist()}
        assert chosen(mask.kv_num_blocks[0, head], mask.kv_indices[0, head]) == partly
        assert chosen(mask.full_kv_num_blocks[0, head], mask.full_kv_indices[0, head]) == wholly
        # The backward pass walks the same blocks by key.
        assert chosen(mask.q_num_blocks[0, head], mask.q_indices[0, head]) == {(j, i) for i, j in partly}
        assert chosen(mask.full_q_num_blocks[0, head], mask.full_q_indices[0, head]) == {(j, i) for i, j in wholly}
    for head, (i, j) in ((h, (i, j)) for h in range(len(windows)) for i in range(length) for j in range(0, length, 5)):
        at = [torch.tensor(x) for x in (0, head, i, j)]
        assert bool(mask.mask_mod(*at)) == bool(cells[head, i, j])


@pytest.mark.parametrize("length", [2 * flex.BLOCK, 2 * flex.BLOCK + 50])
def test_equal_to_create_block_mask(length):
    windows = (1, flex.BLOCK, flex.BLOCK + 1, length)
    ours = flex.block_mask(windows, length, CPU)
    theirs = create_block_mask(ours.mask_mod, 1, len(windows), length, length, device="cpu", BLOCK_SIZE=flex.BLOCK)
    assert ours.shape == theirs.shape and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
                 "full_q_num_blocks", "full_q_indices"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype


def test_masks_are_kept_and_bounded(small_blocks):
    first = flex.block_mask((3, 40), 40, CPU)
    assert flex.block_mask((3, 40), 40, CPU) is first
    for window in range(1, 200):
        flex.block_mask((window,), 40, CPU)
    info = flex.block_mask.cache_info()
    assert info.maxsize is not None and info.currsize <= info.maxsize
    flex.block_mask.cache_clear()
    with torch.inference_mode():
        kept = flex.block_mask((3, 40), 40, CPU)
    assert not kept.kv_indices.is_inference()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that torch's compiler looks into
def test_compiled_forward_equals_dense_and_new_windows_compile_nothing():
    """GQA, an odd length and the model's layout, through one compilation; the gradient flags do not matter here."""
    batch, heads, length, size = 2, 4, 201, 16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, batch, h, size, generator=generator).permute(1, 2, 0, 3).requires_grad_()
               for h in (heads, 2, 2))
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for windows in ([1, 201, 128, 2], [127, 129, 200, 500], [201] * 4, [1] * 4, [64, 7, 64, 7]):
            got = window_attention(q, k, v, windows, backend="flex", scale=0.3)
            expected = window_attention(q.double(), k.double(), v.double(), windows, backend="dense", scale=0.3)
            assert got.dtype == torch.float32 and got.isfinite().all()
            torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    assert counters["stats"]["unique_graphs"] == before + 1


def test_training_on_cpu_is_refused():
    q = torch.randn(1, 1, 10, 16, requires_grad=True)
    with pytest.raises(ConfigError, match=r"no backward pass on cpu; use backend native\.$"):
        window_attention(q, q, q, [3], backend="flex")


def test_dropout_is_refused():
    q = torch.randn(1, 1, 10, 16)
    with pytest.raises(ConfigError, match=r"no attention dropout \(0\.1\).*use backend native\.$"):
        window_attention(q, q, q, [3], backend="flex", dropout_p=0.1)


def test_a_missing_compiler_is_said(monkeypatch):
    monkeypatch.setattr("aah_dist.parallel.device.has_gpu", lambda: False)
    assert flex.missing() is None
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    assert "a-compiler-that-is-not-there" in flex.missing()
    monkeypatch.setattr("aah_dist.parallel.device.has_gpu", lambda: True)
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert "pip install triton" in flex.missing()
