"""Attention dropout: the mask is a function of (seed, query, key) and of nothing else."""

import math

import pytest
import torch

from aah_dist.attention import groups, window_attention
from aah_dist.attention.dropout import draw_seeds, drop_mask, rounded_rate, row_keys

MASK = (1 << 64) - 1


def mix_64(x):
    """The splitmix64 finaliser in Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def is_dropped(seed, query, key, dropout_p):
    """The definition of the mask, one cell at a time."""
    row = mix_64((mix_64(seed & MASK) + (query + 1) * 0x9E3779B97F4A7C15) & MASK)
    word = ((row & 0xFFFFFFFF) + key // 2 * 0x9E3779B9) & 0xFFFFFFFF
    word = (word ^ (word >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    word ^= row >> 32
    word = (word ^ (word >> 15)) * 0xC2B2AE35 & 0xFFFFFFFF
    word ^= word >> 16
    half = word >> 16 if key % 2 else word & 0xFFFF
    signed_half = half - 65536 if half >= 32768 else half
    return signed_half < round(dropout_p * 65536) - 32768


def test_mask_equals_the_definition():
    seeds = torch.tensor([[0, 1], [-(1 << 63), 123456789012345]])
    got = drop_mask(row_keys(seeds, 9), 4, 5, 0.4)
    assert got.shape == (2, 2, 9, 5)
    for b in range(2):
        for h in range(2):
            for i in range(9):
                expected = [is_dropped(int(seeds[b, h]), i, j, 0.4) for j in range(4, 9)]
                assert got[b, h, i].tolist() == expected


@pytest.mark.parametrize("backend", ["dense", "banded", "native"])
def test_output_equals_a_loop_over_cells(backend):
    batch, heads, length, size, dropout_p = 2, 2, 9, 3, 0.4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64) for _ in range(3))
    seeds, windows = torch.tensor([[5, -6], [7, 8]]), [3, 20]
    out = window_attention(q, k, v, windows, backend=backend, dropout_p=dropout_p, dropout_seeds=seeds)
    for b in range(batch):
        for h, window in enumerate(windows):
            for i in range(length):
                keys = range(max(0, i - window + 1), i + 1)
                weights = [math.exp(float(q[b, h, i] @ k[b, h, j]) / math.sqrt(size)) for j in keys]
                expected = torch.zeros(size, dtype=torch.float64)
                for j, weight in zip(keys, weights, strict=True):
                    if not is_dropped(int(seeds[b, h]), i, j, dropout_p):
                        expected += weight / sum(weights) / (1 - rounded_rate(dropout_p)) * v[b, h, j]
                torch.testing.assert_close(out[b, h, i], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("length", [1, 65, 191])
@pytest.mark.parametrize("tested", ["banded", "native"])
def test_equal_to_dense(tested, length, kv_heads):
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(3, heads, length, 8, generator=generator, dtype=torch.float64)
                     for heads in (6, kv_heads, kv_heads, 6))
    for x in (q, k, v):
        x.requires_grad_()
    seeds = draw_seeds(3, 6)
    results = []
    for backend in ("dense", tested):
        out = window_attention(q, k, v, [200, 17, 64, 1, 17, 65], backend=backend, dropout_p=0.25, dropout_seeds=seeds)
        results.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_mask_depends_on_neither_chunks_nor_batch_arrangement(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(4, 3, 150, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    seeds, windows, options = draw_seeds(4, 3), [150, 20, 70], {"backend": "banded", "dropout_p": 0.1}
    whole = window_attention(q, k, v, windows, dropout_seeds=seeds, **options)
    order = [2, 0, 3, 1]
    shuffled = window_attention(q[order], k[order], v[order], windows, dropout_seeds=seeds[order], **options)
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-12, atol=1e-12)
    for sample in range(4):
        at = slice(sample, sample + 1)
        alone = window_attention(q[at], k[at], v[at], windows, dropout_seeds=seeds[at], **options)
        torch.testing.assert_close(alone, whole[at], rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(groups, "chunk_length", lambda window, share: 32)
    for cache in (groups.plan, groups.chunks):
        cache.cache_clear()
    rechunked = window_attention(q, k, v, windows, dropout_seeds=seeds, **options)
    torch.testing.assert_close(rechunked, whole, rtol=1e-12, atol=1e-12)
    groups.plan.cache_clear()
    groups.chunks.cache_clear()


@pytest.mark.parametrize("backend", ["dense", "banded", "native"])
@pytest.mark.parametrize("dropout_p", [0.1, 0.9, 0.99999])
def test_kept_probabilities_are_scaled_by_the_rate_that_drops(backend, dropout_p):
    ones = torch.ones(1, 1, 1, 1)
    scaled = 1 / (1 - round(dropout_p * 65536) / 65536)
    kept = next(seed for seed in range(10**6) if not is_dropped(seed, 0, 0, dropout_p))
    out = window_attention(ones, ones, ones, [1], backend=backend, dropout_p=dropout_p,
                           dropout_seeds=torch.tensor([[kept]]))
    assert float(out) == pytest.approx(scaled, rel=1e-6)


def test_part_of_the_mask_equals_the_mask_of_a_part():
    keys = row_keys(draw_seeds(2, 3), 100)
    whole = drop_mask(keys, 0, 101, 0.3)
    assert torch.equal(drop_mask(keys[:, :, :, 40:60], 16, 33, 0.3), whole[:, :, 40:60, 16:49])
    assert torch.equal(row_keys(torch.tensor([5]), 100)[..., :10], row_keys(torch.tensor([5]), 10))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_drop_rate(dropout_p):
    """Over 2^20 cells of sequential seeds the rate is within 5 sigma, per row, column and seed within 6."""
    dropped = drop_mask(row_keys(torch.arange(16), 256), 0, 256, dropout_p).double()
    sigma = math.sqrt(dropout_p * (1 - dropout_p))
    assert abs(dropped.mean() - dropout_p) < 5 * sigma / 1024
    for dims in ((0, 1), (0, 2), (1, 2)):
        mean = dropped.mean(dims)
        assert (mean - dropout_p).abs().max() < 6 * sigma / math.sqrt(dropped.numel() / mean.numel())


def test_cells_are_uncorrelated():
    """Neighbouring keys, queries and seeds, and cells one tile apart, are dropped independently."""
    x = drop_mask(row_keys(torch.arange(16), 256), 0, 256, 0.5).double() * 2 - 1
    for shift in [(0, 0, 1), (0, 0, 2), (0, 1, 0), (1, 0, 0), (0, 1, 1), (0, 0, 64), (0, 64, 0), (1, 1, 1)]:
        shifted = torch.roll(x, shift, dims=(0, 1, 2))
        assert abs((x * shifted).mean()) < 5 / 1024, shift


def test_expectation_is_attention_without_dropout():
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 40, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    many = [x.expand(4000, 1, 40, 4) for x in (q, k, v)]
    seeds = torch.arange(4000).view(4000, 1)
    mean = window_attention(*many, [12], dropout_p=0.2, dropout_seeds=seeds).mean(0)
    torch.testing.assert_close(mean, window_attention(q, k, v, [12])[0], rtol=0, atol=0.05)


def test_seeds_come_from_the_default_generator():
    q = torch.randn(1, 2, 30, 4, generator=torch.Generator().manual_seed(4))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(window_attention(q, q, q, [30, 7], dropout_p=0.5))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_extreme_rates():
    q = torch.randn(1, 1, 30, 4, generator=torch.Generator().manual_seed(5))
    for dropout_p in (1e-9, 1 - 2**-16):
        assert window_attention(q, q, q, [30], dropout_p=dropout_p).isfinite().all()
