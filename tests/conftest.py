"""Prepared data that the training tests share."""

import json
import random
import shutil
from pathlib import Path

import pytest
from ranks import REPOSITORY, run_ranks

from aah_dist.config import load
from aah_dist.data.prepare import prepare

WORDS = "attention head window key query value layer rank step loss token text model data shard row norm".split()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder: a few thousand tokens of word soup, vocabulary 300."""
    folder = tmp_path_factory.mktemp("tiny")
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(3, 40))) + "." for _ in range(60)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return prepare([str(folder / "text.txt")], "sentencepiece-bpe:300", folder / "prepared", valid_fraction=0.1,
                   workers=1, one_document_per="line", progress=False)


@pytest.fixture
def frozen_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A demo preset whose figures the configuration tests may name: the real one is tuned now and then."""
    folder = tmp_path / "package"
    shutil.copytree(load.FOLDER / "presets", folder / "presets")
    shutil.copytree(load.FOLDER / "regimes", folder / "regimes")
    shutil.copy(REPOSITORY / "tests" / "config" / "demo.yaml", folder / "presets" / "demo.yaml")
    monkeypatch.setattr(load, "FOLDER", folder)


@pytest.fixture(scope="session")
def resilience(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of two data-parallel ranks reports of tests/resilience_worker.py."""
    folder = tmp_path_factory.mktemp("resilience")
    (folder / "job.json").write_text(json.dumps({"data": str(tiny_data), "out": str(folder)}))
    worker = str(REPOSITORY / "tests" / "resilience_worker.py")
    for code, output in run_ranks(2, [worker, str(folder / "job.json")], folder):
        assert code == 0, output[-4000:]
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]
