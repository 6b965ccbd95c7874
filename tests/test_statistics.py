"""Per-head statistics: against a dense reference, and unchanged by recomputation, accumulation, TP and DP."""

import numpy as np
import pytest
import statistics_worker as worker
import torch
from ranks import REPOSITORY, run_ranks

from aah_dist.attention import statistics
from aah_dist.attention.statistics import RowSample, measure, sample_rows
from aah_dist.config.statistics import COLUMNS
from aah_dist.parallel import launch
from aah_dist.training.statistics import StatisticsBuffer

COUNTS = [COLUMNS.index(name) for name in ("rows", "values")]
ENTROPY = COLUMNS.index("entropy")


@pytest.fixture(scope="module")
def one_rank():
    from megatron.core import parallel_state

    launch._export(0, 1, 0, 1, "127.0.0.1", launch.free_port())
    worker.start(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def inputs(batch=3, heads=4, kv_heads=4, length=13, size=6, dtype=torch.float32, seed=0):
    """q, k, v, out in Megatron's memory order: [T, B, heads, q | k | v of a head], seen as [B, heads, T, D]."""
    generator = torch.Generator().manual_seed(seed)

    def draw(number):
        return torch.randn(length, batch, number, size, generator=generator, dtype=torch.float64) * 1.5 + 0.1

    q, out = draw(heads), draw(heads)
    k, v = torch.cat([draw(kv_heads), draw(kv_heads)], -1).split(size, -1)
    return [x.to(dtype).permute(1, 2, 0, 3) for x in (q, k, v, out)]


def dense(q, k, v, out, windows, scale, sample):
    """The same columns by T x T probabilities in fp64."""
    q, k, v, out = (x.double() for x in (q, k, v, out))
    batch, heads, length, size = q.shape
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = torch.stack([(j <= i) & (j > i - int(window)) for window in windows])
    a = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf).softmax(-1)
    entropy = -(a * (a + 1e-9).log()).sum(-1)[..., sample.rows] * torch.from_numpy(sample.weights)
    columns = {"rows": [batch * length] * heads, "values": [batch * length * size] * heads,
               "entropy": entropy.sum((0, 2)), "norm": out.norm(dim=-1).sum((0, 2)), "last_mass": a[..., -1, -1].sum(0)}
    for name, x in (("q", q), ("k", k), ("v", v)):
        columns |= {f"{name}_sum": x.sum((0, 2, 3)), f"{name}_square": x.square().sum((0, 2, 3)),
                    f"{name}_abs": x.abs().sum((0, 2, 3))}
    return torch.stack([torch.as_tensor(columns[name], dtype=torch.float64) for name in COLUMNS], -1)


def assert_near(found, expected, rtol, atol):
    """Plain sums are compared at the size of their terms, which cancel."""
    size = np.abs(expected)
    for part in "qkv":
        size[..., COLUMNS.index(f"{part}_sum")] = size[..., COLUMNS.index(f"{part}_abs")]
    excess = np.abs(found - expected) / (rtol * size + atol)
    assert excess.max() <= 1, dict(zip(COLUMNS, excess.reshape(-1, len(COLUMNS)).max(0).round(2), strict=True))


SHAPES = {
    "mha": (dict(), [1, 13, 3, 40]),
    "gqa": (dict(heads=6, kv_heads=2), [13, 2, 13, 7, 7, 1]),
    "mqa": (dict(heads=3, kv_heads=1, batch=2), [5, 13, 1]),
    "one-token": (dict(length=1), [1, 1, 2, 9]),
    "one-head": (dict(heads=1, kv_heads=1, batch=1, length=67), [10]),
}


@pytest.mark.parametrize("block", [1, 200, statistics.CPU_BLOCK])
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_equal_to_the_dense_reference(name, dtype, rows, block, monkeypatch):
    monkeypatch.setattr(statistics, "CPU_BLOCK", block)
    shape, windows = SHAPES[name]
    tensors = inputs(dtype=dtype, **shape)
    copies = [x.clone() for x in tensors]
    sample = sample_rows(tensors[0].shape[2], rows, 1, 2, 3)
    found = measure(*tensors, windows, 0.37, sample)
    expected = dense(*tensors, windows, 0.37, sample)
    assert found.shape == (len(windows), len(COLUMNS)) and found.dtype == torch.float64
    assert torch.equal(found[:, COUNTS], expected[:, COUNTS])
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert_near(found.numpy(), expected.numpy(), tolerance, tolerance)
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True)), "an input was changed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_memory_order_changes_no_input_and_no_sum(dtype):
    tensors = inputs(dtype=dtype, heads=6, kv_heads=2)
    contiguous = [x.contiguous() for x in tensors]
    copies = [x.clone() for x in contiguous]
    sample = sample_rows(13, 4, 0, 0, 0)
    windows = [1, 2, 13, 13, 4, 5]
    torch.testing.assert_close(measure(*contiguous, windows, 0.4, sample), measure(*tensors, windows, 0.4, sample),
                               rtol=1e-6, atol=1e-6)
    assert all(torch.equal(x, copy) for x, copy in zip(contiguous, copies, strict=True))


def test_autocast_does_not_lower_the_precision():
    tensors, sample = inputs(), sample_rows(13, 0, 0, 0, 0)
    expected = measure(*tensors, [13, 5, 2, 1], 0.4, sample)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(measure(*tensors, [13, 5, 2, 1], 0.4, sample), expected)


def test_windows_of_one_have_no_entropy_and_all_the_mass():
    found = measure(*inputs(), [1] * 4, 0.4, sample_rows(13, 0, 0, 0, 0))
    assert (found[:, COLUMNS.index("last_mass")] == 3).all() and found[:, ENTROPY].abs().max() < 1e-5


@pytest.mark.parametrize("length, count", [(4096, 64), (37, 8), (37, 36), (5, 4), (1000, 1), (7, 5)])
def test_one_row_in_each_stratum(length, count):
    sample = sample_rows(length, count, 3, 4, 5)
    assert sample.rows.dtype == np.int64 and sample.weights.dtype == np.float64
    assert sample.weights.sum() == length and set(sample.weights) <= {length // count, -(-length // count)}
    ends = np.cumsum(sample.weights)
    assert len(sample.rows) == count and (ends - sample.weights <= sample.rows).all() and (sample.rows < ends).all()


@pytest.mark.parametrize("count", [0, 9, 10])
def test_all_rows_once(count):
    sample = sample_rows(9, count, 3, 4, 5)
    assert sample.rows.tolist() == list(range(9)) and sample.weights.tolist() == [1.0] * 9


def test_rows_depend_on_seed_step_and_layer():
    np.random.seed(0)
    torch.manual_seed(0)
    first = sample_rows(4096, 64, 3, 4, 5).rows
    np.random.seed(1)
    torch.manual_seed(1)
    assert np.array_equal(sample_rows(4096, 64, 3, 4, 5).rows, first)
    others = [sample_rows(4096, 64, *key).rows for key in ((2, 4, 5), (3, 5, 5), (3, 4, 6), (5, 4, 3))]
    assert not any(np.array_equal(rows, first) for rows in others)


def test_every_row_is_drawn_as_often_as_it_should_be():
    draws = np.concatenate([sample_rows(11, 3, 0, step, 0).rows for step in range(3000)])
    expected = 3000 / np.array([3] * 3 + [4] * 8)
    # 6 standard deviations of a binomial count.
    assert (abs(np.bincount(draws, minlength=11) - expected) < 6 * np.sqrt(expected)).all()


def test_sampled_entropy_is_unbiased():
    """The mean of 600 draws lies within 4 standard errors of the exact sum, and that is less than 2 % of it."""
    tensors, windows = inputs(length=37), [37, 37, 12, 3]
    exact = measure(*tensors, windows, 0.4, sample_rows(37, 0, 0, 0, 0))
    draws = torch.stack([measure(*tensors, windows, 0.4, sample_rows(37, 8, 0, step, 1)) for step in range(600)])
    others = [column for column in range(len(COLUMNS)) if column != ENTROPY]
    assert torch.equal(draws[0][:, others], draws[1][:, others])
    torch.testing.assert_close(draws[0][:, others], exact[:, others], rtol=1e-6, atol=1e-6)
    draws, exact = draws[..., ENTROPY], exact[:, ENTROPY]
    standard_error = draws.std(0) / len(draws)**0.5
    assert (4 * standard_error < 0.02 * exact).all()
    assert ((draws.mean(0) - exact).abs() < 4 * standard_error).all()


def test_nothing_is_differentiated():
    tensors = [x.requires_grad_() for x in inputs()]
    assert not measure(*tensors, [3] * 4, 0.4, sample_rows(13, 4, 0, 0, 0)).requires_grad


class Rewriting(StatisticsBuffer):
    """Fills a slot every time."""

    def write(self, layer, *args):
        self.writes = getattr(self, "writes", 0) + 1
        self.written[self.micro, layer] = False
        super().write(layer, *args)


def gradients(gpt):
    return {name: p.grad for name, p in gpt.named_parameters()}


ONE_BATCH = [[0, 1, 2, 3]]


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
def test_training_is_bitwise_the_same_with_a_sink(recompute, one_rank):
    found = []
    for sink in (None, worker.buffer()):
        gpt, context = worker.model(recompute=recompute)
        worker.run_step(gpt, context, sink, ONE_BATCH)
        found.append(gradients(gpt))
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


def test_recomputation_leaves_the_same_sums(one_rank):
    sums = []
    for recompute, kind in ((False, StatisticsBuffer), (True, StatisticsBuffer), (True, Rewriting)):
        gpt, context = worker.model(recompute=recompute)
        sink = worker.buffer(kind=kind)
        worker.run_step(gpt, context, sink, ONE_BATCH)
        sums.append(sink.reduce())
    assert sink.writes == 2 * worker.MODEL.num_layers, "the layers were not recomputed"
    assert np.array_equal(sums[1], sums[0]) and np.array_equal(sums[2], sums[0])


def test_a_new_step_opens_the_slots(one_rank):
    gpt, context = worker.model()
    sink = worker.buffer()
    worker.run_step(gpt, context, sink, [[0, 1]], backward=False)
    first = sink.reduce()
    worker.run_step(gpt, context, sink, [[2, 3]], backward=False)
    second = sink.reduce()
    fresh = worker.buffer()
    worker.run_step(gpt, context, fresh, [[2, 3]], backward=False)
    assert np.array_equal(second, fresh.reduce()) and not np.allclose(second, first)


def test_accumulation_leaves_the_same_sums(one_rank):
    gpt, context = worker.model()
    sums = []
    for micro_batches in (ONE_BATCH, [[0], [1], [2], [3]]):
        sink = worker.buffer(len(micro_batches))
        worker.run_step(gpt, context, sink, micro_batches, backward=False)
        sums.append(sink.reduce())
    np.testing.assert_allclose(sums[1][..., COUNTS], sums[0][..., COUNTS], rtol=1e-12)
    assert_near(sums[1], sums[0], 1e-6, 1e-6)
    assert (sums[0][..., COUNTS] == [4 * 12, 4 * 12 * 6]).all()


def test_missing_slots_are_named(one_rank):
    gpt, context = worker.model()
    sink = worker.buffer(2)
    with pytest.raises(RuntimeError, match="layer 0 wrote no statistics in micro batch 0 of step 0"):
        sink.reduce()
    worker.run_step(gpt.train(), context, sink, [[0, 1]], backward=False)
    with pytest.raises(RuntimeError, match="layer 0 wrote no statistics in micro batch 1 of step 6"):
        sink.reduce()


def test_the_executed_windows_and_dropped_outputs_are_measured(one_rank):
    """Through the model: window 1 has no entropy; the norm is that of the output with dropout, the entropy without."""
    gpt, context = worker.model()
    sums = {}
    for p in (0.2, 0.0):
        for layer in gpt.decoder.layers:
            layer.self_attention.core_attention.p = p
        sink = worker.buffer()
        worker.run_step(gpt, context, sink, ONE_BATCH, backward=False)
        sums[p] = sink.reduce()
    entropy, norm = ENTROPY, COLUMNS.index("norm")
    narrow = worker.WINDOWS == 1
    assert sums[0.2][narrow, entropy].max() < 1e-4 < 1 < sums[0.2][~narrow, entropy].min()
    np.testing.assert_allclose(sums[0.2][0, :, entropy], sums[0.0][0, :, entropy], rtol=1e-6, atol=1e-6)
    assert (abs(sums[0.2][0, :, norm] / sums[0.0][0, :, norm] - 1) > 1e-3).all()


def test_one_small_all_reduce_for_a_model(one_rank):
    sink = StatisticsBuffer(16, 12, slice(0, 12), 1, worker.CPU, seed=0, entropy_rows=2, length=5)
    sink.begin(0)
    for layer in range(16):
        sink.write(layer, *inputs(heads=12, kv_heads=12, length=5), [5] * 12, 0.4)
    sums, counted = worker.reduce_counted(sink)
    assert sums.shape == (16, 12, len(COLUMNS)) and sums.dtype == np.float64
    assert len(counted) == sink.reductions == 1 and counted[0] == sink.bytes_reduced <= 64 * 1024


@pytest.mark.ranks
@pytest.mark.parametrize("tp", [1, 2], ids=["dp2", "tp2"])
def test_two_ranks_reduce_to_the_sums_of_one(tp, one_rank, tmp_path):
    for code, output in run_ranks(2, [str(REPOSITORY / "tests" / "statistics_worker.py"), str(tp), str(tmp_path)],
                                  tmp_path):
        assert code == 0, output[-4000:]
    gpt, context = worker.model()
    sink = worker.buffer()
    worker.run_step(gpt, context, sink, ONE_BATCH)
    expected = sink.reduce()
    ranks = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(2)]
    assert np.array_equal(ranks[0]["sums"], ranks[1]["sums"])
    assert all(len(rank["bytes"]) == 1 for rank in ranks)
    np.testing.assert_allclose(ranks[0]["sums"][..., COUNTS], expected[..., COUNTS], rtol=1e-12)
    assert_near(ranks[0]["sums"], expected, 1e-6, 1e-6)


def test_a_row_sample_may_repeat_the_last_row():
    tensors = inputs()
    sample = RowSample(np.array([2, 12]), np.array([6.0, 7.0]))
    torch.testing.assert_close(measure(*tensors, [4] * 4, 0.4, sample), dense(*tensors, [4] * 4, 0.4, sample),
                               rtol=1e-5, atol=1e-5)
