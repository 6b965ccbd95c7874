"""The attention benchmark measures what its table says."""

import subprocess
import sys

import pytest
import torch

from aah_dist.attention import banded, groups
from aah_dist.bench import attention as bench
from aah_dist.config.pairs import exact_pair_ratio


@pytest.mark.parametrize("backend", ["native", "banded"])
def test_table(backend):
    command = [sys.executable, "-m", "aah_dist.bench.attention", "--lengths", "128", "--sizes", "8", "--rounds", "1",
               "--backend", backend]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for word in ("commit", "versions", "hardware", f"method    backend {backend}", "T 128, D 8"):
        assert word in run.stdout
    lines = [(line[:10].strip(), line[10:].split()) for line in run.stdout.splitlines()]
    rows = {name: row for name, row in lines if name in bench.COUNTS}
    assert set(rows) == set(bench.COUNTS)
    for mix, row in rows.items():
        floor, cells, *ratios = map(float, row)
        assert floor == pytest.approx(exact_pair_ratio(bench.windows_of(mix, 128), 128), abs=1e-3)
        assert cells > 1 and len(ratios) == 5 and min(ratios[:4]) > 0


@pytest.mark.parametrize("wrong, text", [
    (["--lengths", "0"], "0 is not a whole number of at least 1"), (["--sizes", "-1"], "-1 is not a whole number"),
    (["--rounds", "0"], "0 is not a whole number"), (["--lengths", "7"], "--lengths 7 has no window of T/8"),
    (["--all", "--sizes", "64"], "--all has its own lengths and sizes"),
])
def test_wrong_options_are_refused(wrong, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention", *wrong])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_mixes():
    assert bench.windows_of("6/2/2/2", 4096) == (512,) * 6 + (1024,) * 2 + (2048,) * 2 + (4096,) * 2
    shuffled = bench.windows_of("shuffled", 4096)
    assert sorted(shuffled) == list(bench.windows_of("6/2/2/2", 4096)) != list(shuffled)
    assert bench.windows_of("all T/8", 1024) == (128,) * 12


@pytest.mark.parametrize("mix", ["6/2/2/2", "all T/8"])
def test_cells_are_those_that_are_computed(mix, monkeypatch):
    length, size, computed = 200, 8, []
    probabilities = banded._Band.probabilities
    monkeypatch.setattr(banded._Band, "probabilities", lambda self, s, q, k: computed.append(s.p.numel()) or
                        probabilities(self, s, q, k))
    inputs, _ = bench.make(length, size)
    with torch.no_grad():
        bench.attention(mix, "banded", inputs)
    assert sum(computed) == bench.cells(mix, "banded", length, size)


def test_cells_of_the_causal_flash_blocks():
    """1.125, 1.249 and 1.498 of the exact pairs were measured for the library's kernel at these lengths."""
    for length, ratio in ((4096, 1.125), (2048, 1.249), (1024, 1.498)):
        slabs = groups.plan((length,), 1, 1, length, 64, 4, 1024)
        assert slabs[0].cells / (length * (length + 1) / 2) == pytest.approx(ratio, abs=1e-3)
