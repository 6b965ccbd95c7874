"""Whatever happens while a checkpoint is written or deleted, the newest complete one is found."""

import json
import os
import shutil
from pathlib import Path

import pytest
from ranks import REPOSITORY, run_ranks
from small_runs import FACTS, LAYOUT, command_line, fake_checkpoint, small_config

from aah_dist.config.schema import ConfigError
from aah_dist.training import checkpoint as checkpoints
from aah_dist.training.start import open_run


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_????????"))


class Killed(BaseException):
    """Stands for the end of the process at this very call."""


def kill_at(monkeypatch: pytest.MonkeyPatch, module: object, name: str, call: int) -> None:
    original, calls = getattr(module, name), []

    def dying(*arguments: object, **keywords: object) -> object:
        calls.append(arguments)
        if len(calls) == call:
            raise Killed
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, name, dying)


@pytest.mark.parametrize("module, name, call", [
    (os, "fsync", 1), (os, "fsync", 2), (os, "fsync", 3), (os, "fsync", 4), (os, "replace", 1), (os, "rename", 1),
    (checkpoints, "save_config", 1)])
def test_kill_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str,
                           call: int) -> None:
    config = small_config(tmp_path)
    fake_checkpoint(config, 2)
    with monkeypatch.context() as patch:
        kill_at(patch, module, name, call)
        with pytest.raises(Killed):
            fake_checkpoint(config, 4)
    decision = open_run(config, LAYOUT, FACTS)
    assert decision.checkpoint.endswith("step_00000002")
    assert not any("warning" in remark for remark in decision.remarks), "a save cut short is no damage"
    assert steps_in(tmp_path) == [2] and not list((tmp_path / "checkpoints").glob("*.partial"))
    fake_checkpoint(config, 4)
    assert open_run(config, LAYOUT, FACTS).checkpoint.endswith("step_00000004")


def test_kill_after_the_rename_leaves_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path)
    fake_checkpoint(config, 2)
    kill_at(monkeypatch, os, "fsync", 5)  # two files, the manifest, its folder; the fifth is the folder above
    with pytest.raises(Killed):
        fake_checkpoint(config, 4)
    assert checkpoints.newest_complete(tmp_path / "checkpoints")[0].step == 4


@pytest.mark.parametrize("module, name, call", [(os, "rename", 1), (shutil, "rmtree", 2), (os, "unlink", 1),
                                                (os, "unlink", 2)])
def test_kill_while_deleting_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str,
                                      call: int) -> None:
    config = small_config(tmp_path)
    for step in (2, 4, 6):
        fake_checkpoint(config, step)
    with monkeypatch.context() as patch:
        kill_at(patch, module, name, call)
        with pytest.raises(Killed):
            checkpoints.prune(tmp_path / "checkpoints", keep=1, always=[])
    newest, problems = checkpoints.newest_complete(tmp_path / "checkpoints")
    assert newest.step == 6 and problems == []
    shutil.rmtree(newest.path)
    newest, problems = checkpoints.newest_complete(tmp_path / "checkpoints")
    assert newest.step == 4 and problems == [], "what was half deleted is out of sight"


def test_prune_keeps_the_last_and_the_listed(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    for step in (2, 4, 6, 8, 10):
        fake_checkpoint(config, step)
    checkpoints.prune(tmp_path / "checkpoints", keep=2, always=[4, 10])
    assert steps_in(tmp_path) == [4, 6, 8, 10]
    checkpoints.prune(tmp_path / "checkpoints", keep=1, always=[])
    assert steps_in(tmp_path) == [10]


def test_damaged_checkpoints_do_not_push_out_good_ones(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    paths = {step: fake_checkpoint(config, step) for step in (2, 4, 6, 8)}
    for step in (4, 8):
        (paths[step] / "state.pt").unlink()
    checkpoints.prune(tmp_path / "checkpoints", keep=2, always=[])
    assert steps_in(tmp_path) == [2, 6, 8], "4 is passed and useless; 8 will be written again"
    fake_checkpoint(config, 8)
    assert checkpoints.newest_complete(tmp_path / "checkpoints")[0].step == 8


def truncate(path: Path) -> None:
    os.truncate(path / "state.pt", 3)


def remove(path: Path) -> None:
    (path / "state.pt").unlink()


def remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def empty_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 0)


def strip_manifest(path: Path) -> None:
    (path / "manifest.json").write_text(json.dumps({"format": checkpoints.FORMAT, "files": {}}))


DAMAGE = [(truncate, "is 3 bytes; 7 bytes were written"), (remove, "is missing; 7 bytes were written"),
          (remove_manifest, "has no manifest.json"), (empty_manifest, "cannot be read"),
          (strip_manifest, "manifest.json lacks controller, dp, grad_accum_dtype, offload")]


@pytest.mark.parametrize("damage, sentence", DAMAGE)
def test_damaged_newest_is_passed_over_with_a_warning(tmp_path: Path, damage: object, sentence: str) -> None:
    config = small_config(tmp_path)
    fake_checkpoint(config, 2)
    damage(fake_checkpoint(config, 4))
    decision = open_run(config, LAYOUT, FACTS)
    assert decision.checkpoint.endswith("step_00000002")
    assert "warning: " in decision.remarks[0] and sentence in decision.remarks[0]
    assert decision.remarks[1] == f"resuming {tmp_path} from step 2"


def test_all_damaged_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    for step in (2, 4):
        truncate(fake_checkpoint(config, step))
    with pytest.raises(ConfigError, match=r"no checkpoint of .* is complete: checkpoint file .*step_00000004/state.pt"):
        open_run(config, LAYOUT, FACTS)
    assert steps_in(tmp_path) == [2, 4], "nothing is deleted"


def test_partial_folder_is_no_checkpoint(tmp_path: Path) -> None:
    path = fake_checkpoint(small_config(tmp_path), 2)
    path = path.rename(path.with_name(path.name + ".partial"))
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        checkpoints.find(path)


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["zero0-fp32", "zero1-bf16", "zero2-bf16", "zero3-fp32", "zero3-bf16"])
def test_code_in_a_checkpoint_is_refused_not_run(resilience: list[dict], case: str) -> None:
    for report in resilience:
        found = report[f"exploit {case}"]
        assert "holds more than tensors and plain values" in found["problem"]
        assert not found["executed"]


@pytest.mark.ranks
def test_full_disk_on_one_rank_ends_the_run_and_spoils_nothing(tiny_data: Path, tmp_path: Path) -> None:
    options = command_line(tiny_data, tmp_path / "run")
    worker = str(REPOSITORY / "tests" / "entry_worker.py")
    outputs = run_ranks(2, [worker, *options], tmp_path, FAULT="full-disk-at-second-save", FAULT_RANK="1")
    assert [code for code, _ in outputs] == [1, 1], outputs
    lines = outputs[1][1].splitlines()
    assert len(lines) == 1, outputs[1][1]
    assert lines[0].startswith("error: rank 1: the checkpoint of step 4 cannot be written to ")
    assert lines[0].endswith("start again: the run continues from step 2.")
    assert outputs[0][1].splitlines()[-1].startswith("rank 0: stopped, because another rank ended")
    newest, problems = checkpoints.newest_complete(tmp_path / "run" / "checkpoints")
    assert newest.step == 2 and problems == []
