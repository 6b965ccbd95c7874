"""What a run records, and that no service of it can stop the run."""

import json
import struct
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from small_runs import records, small_config

from aah_dist.training.evaluation import perplexity
from aah_dist.training.metrics import Progress, Recorder
from aah_dist.training.run_folder import cut_back

WINDOWS = np.array([[3, 40], [16, 1]])


@pytest.fixture(autouse=True)
def no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("step, kept", [(2, [0, 1, 2]), (3, [0, 1, 2, 3]), (9, [0, 1, 2, 3]), (-1, [])])
@pytest.mark.parametrize("tail", ["", '{"step": 4, "train', '{"step": 4, "x": 1}{', "\x00\x00", "\n"])
def test_cut_back_drops_later_and_half_written_lines(tmp_path: Path, step: int, kept: list[int], tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(4)) + tail)
    cut_back(path, step)
    assert [line["step"] for line in records(path)] == kept
    assert path.read_text() == "" or path.read_text().endswith("\n")


def test_cut_back_completes_a_last_line_without_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    cut_back(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_resumed_records_hold_every_step_and_policy_once(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    first = Recorder(tmp_path, config, 0)
    first.policy(0, {"windows": WINDOWS.tolist()})
    for step in range(6):
        first.metrics(step, {"train/loss": 5.0})
    first.policy(4, {"windows": WINDOWS[::-1].tolist()})
    first.close()
    second = Recorder(tmp_path, config, 3)
    second.policy(3, {"windows": WINDOWS.tolist()})
    for step in range(4, 7):
        second.metrics(step, {"train/loss": 4.0})
    second.policy(5, {"windows": WINDOWS[::-1].tolist()})
    second.policy(6, {"windows": WINDOWS[::-1].tolist()})
    second.close()
    assert [(line["step"], line["train/loss"]) for line in records(tmp_path / "metrics.jsonl")] == [
        (0, 5.0), (1, 5.0), (2, 5.0), (3, 5.0), (4, 4.0), (5, 4.0), (6, 4.0)]
    assert records(tmp_path / "policy.jsonl") == [{"step": 0, "windows": WINDOWS.tolist()},
                                                  {"step": 5, "windows": WINDOWS[::-1].tolist()}]


def test_wandb_is_left_alone_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    recorder = Recorder(tmp_path, small_config(tmp_path), 0)
    recorder.metrics(1, {"train/loss": 5.0})
    recorder.close()
    assert not (tmp_path / "wandb_id.txt").exists()


def log_records(path: Path) -> list[bytes]:
    """The records of a .wandb file: LevelDB's log format, blocks of 32 KiB, behind 7 bytes of its own."""
    content, position, found, parts = path.read_bytes(), 7, [], []
    while position + 7 <= len(content):
        if position % 32768 > 32768 - 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + 7:position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(b"".join(parts))
            parts = []
    return found


def offline_runs(folder: Path) -> list[tuple[str, list[dict]]]:
    """Run id and history rows of each offline W&B file, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        logged = [Record.FromString(data) for data in log_records(path)]
        rows = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                for record in logged if record.HasField("history")]
        axes = {record.metric.glob_name: record.metric.step_metric for record in logged if record.HasField("metric")}
        assert axes.get("*") == "step"
        found.append((next(record.run.run_id for record in logged if record.HasField("run")), rows))
    return found


def test_wandb_offline_keeps_its_id_and_has_an_explicit_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = small_config(tmp_path)
    for start, steps in ((0, (10, 20, 30)), (20, (30, 40))):  # step 30 comes again after the resume
        recorder = Recorder(tmp_path, config, start)
        for step in steps:
            recorder.metrics(step, {"train/loss": 1.0 / step})
        recorder.close()
        time.sleep(1.1)  # W&B names its folders by the second
    first, second = offline_runs(tmp_path)
    assert first[0] == second[0] == (tmp_path / "wandb_id.txt").read_text().strip()
    assert [(row["step"], row["train/loss"]) for row in first[1]] == [(s, 1.0 / s) for s in (10, 20, 30)]
    assert [(row["step"], row["train/loss"]) for row in second[1]] == [(s, 1.0 / s) for s in (30, 40)]
    assert capsys.readouterr() == ("", "")


def fake_wandb(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    module = ModuleType("wandb")
    module.Settings = SimpleNamespace
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_MODE", "online")


def failing(*unused: object, **keywords: object) -> None:
    raise ConnectionError


def test_wandb_that_cannot_start_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture) -> None:
    fake_wandb(monkeypatch, init=failing)
    recorder = Recorder(tmp_path, small_config(tmp_path), 0)
    recorder.metrics(1, {"train/loss": 5.0})
    recorder.close()
    assert [line["step"] for line in records(tmp_path / "metrics.jsonl")] == [1]
    assert capsys.readouterr().out == "W&B cannot be used (ConnectionError); the run goes on without it.\n"


def test_wandb_that_fails_later_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture) -> None:
    run = SimpleNamespace(log=failing, finish=failing, define_metric=lambda *unused, **keywords: None)
    fake_wandb(monkeypatch, init=lambda **keywords: run)
    recorder = Recorder(tmp_path, small_config(tmp_path), 0)
    for step in (1, 2):
        recorder.metrics(step, {"train/loss": 5.0})
    recorder.close()
    assert [line["step"] for line in records(tmp_path / "metrics.jsonl")] == [1, 2]
    assert capsys.readouterr().out == "W&B has failed (ConnectionError); the run goes on without it.\n"


def test_missing_tensorboard_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    recorder = Recorder(tmp_path, small_config(tmp_path, log__tensorboard=True), 0)
    recorder.metrics(1, {"train/loss": 5.0})
    recorder.close()
    assert capsys.readouterr().out == ("log.tensorboard is true, but TensorBoard is not installed (pip install "
                                       "tensorboard); going on without it.\n")


def test_tensorboard_gets_numbers_and_forgets_later_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            calls.append((folder, purge_step))

        def add_scalar(self, key: str, value: float, step: int) -> None:
            calls.append((key, value, step))

        def close(self) -> None:
            calls.append(("closed",))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    recorder = Recorder(tmp_path, small_config(tmp_path, log__tensorboard=True), 20)
    recorder.metrics(21, {"train/loss": 5.0, "run/config_hash": "text"})
    recorder.close()
    assert calls == [(f"{tmp_path}/tensorboard", 21), ("train/loss", 5.0, 21), ("closed",)]


def test_log_line(capsys: pytest.CaptureFixture) -> None:
    values = {"train/loss": 5.25, "train/lr": 1e-3, "train/grad_norm": 1.5, "perf/tok_s": 12345.6, "aah/ACR": 0.469,
              "perf/cpu_rss_mb": 2048.0, "val/loss": 5.0, "val/ppl": 148.4}
    progress = Progress(200, 100, "off")
    progress.advance()
    progress.line(150, values)
    progress.close()
    line = capsys.readouterr().out
    for part in ("step 150/200", " 75.0%", "loss 5.2500", "lr 1.00e-03", "grad 1.500", "12,346 tok/s", "mem 2.00 GiB",
                 "ACR 0.469", "elapsed 0:00:00", "eta 0:00:00", "val loss 5.0000 ppl 148.4"):
        assert part in line
    assert line.count("\n") == 1 and "mfu" not in line


def test_an_infinite_perplexity_is_null_in_the_records(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, small_config(tmp_path), 0)
    recorder.metrics(1, {"val/loss": 1000.0, "val/ppl": perplexity(1000.0)})
    recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "val/loss": 1000.0, "val/ppl": None}
