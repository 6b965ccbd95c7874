"""A run under the controller that is stopped between two decisions, extended or evaluated decides as if it were not."""

import json
from dataclasses import replace
from pathlib import Path

import controller_resume_worker as worker
import numpy as np
import pytest
import safetensors.numpy
from ranks import REPOSITORY, pretrain, run_ranks, start_ranks, wait_for
from small_runs import FACTS, LAYOUT, OPTIONS, command_line, curve, records
from test_resume import wait_for_step

from aah_dist.config.load import load_config, read_config, save_config
from aah_dist.config.schema import ConfigError, RunConfig
from aah_dist.control.controller import Controller
from aah_dist.control.settings import settings_from_config
from aah_dist.model.context import StepContext
from aah_dist.parallel import device as devices
from aah_dist.training import checkpoint as checkpoints
from aah_dist.training.checkpoint import newest_complete, open_checkpoint
from aah_dist.training.policy import Policy, PolicyState
from aah_dist.training.start import open_run

TP = 2
# Updates fall on 5, 10, 15, 20.  The map of step 0 is what reuse lives on.
REGIMES = {"full_adaptive": 12, "shallow_shuffle_post_select": 13, "shallow_freeze": 8,
           "shallow_resolution_ema_030": 11, "deep_practical_reuse": 2}


@pytest.fixture(scope="module")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder controller_resume_worker left."""
    folder = tmp_path_factory.mktemp("controller-resume")
    job = {"tp": TP, "data": str(tiny_data), "out": str(folder), "regimes": REGIMES}
    (folder / "job.json").write_text(json.dumps(job))
    argv = [str(REPOSITORY / "tests" / "controller_resume_worker.py"), str(folder / "job.json")]
    for code, output in run_ranks(TP, argv, folder, timeout=1200):
        assert code == 0, output[-4000:]
    return folder


def last_state(run: Path, step: int = worker.STEPS) -> tuple[bytes, dict, list]:
    """The controller's arrays and values and the windows in the checkpoint of `step`."""
    path = run / "checkpoints" / f"step_{step:08d}"
    manifest = open_checkpoint(path).manifest
    return (path / "controller.safetensors").read_bytes(), manifest["controller"], manifest["windows"]


def losses(run: Path) -> list[tuple]:
    """Step, loss, gradient norm and learning rate of each line."""
    return [line[:4] for line in curve(records(run / "metrics.jsonl"))]


def assert_same_policy(run: Path, other: Path) -> None:
    assert (run / "policy.jsonl").read_text() == (other / "policy.jsonl").read_text()
    assert last_state(run) == last_state(other)


@pytest.mark.ranks
@pytest.mark.parametrize("regime", REGIMES)
def test_stopped_run_decides_as_the_whole_one(runs: Path, regime: str):
    whole, stopped = runs / regime / "whole", runs / regime / "stopped"
    assert json.loads((runs / "codes.json").read_text())[regime] == [0, 75, 0]
    assert newest_complete(stopped / "checkpoints")[0].step == worker.STEPS
    assert (stopped / "checkpoints" / f"step_{REGIMES[regime]:08d}").is_dir()
    assert [line[0] for line in losses(stopped)] == list(range(worker.STEPS + 1))
    assert losses(stopped) == losses(whole)
    assert_same_policy(stopped, whole)
    steps = [line["step"] for line in records(whole / "policy.jsonl")]
    assert len(steps) >= 3 and any(step > REGIMES[regime] for step in steps), "policies change after the stop"


@pytest.mark.ranks
def test_stop_between_decisions_holds_what_the_next_one_needs(runs: Path):
    arrays, values, windows = last_state(runs / "full_adaptive" / "stopped", REGIMES["full_adaptive"])
    assert values["last_update"] == 10 and values["has_history"] and values["head_blocks"] == TP
    assert (np.array(windows) != worker.BASE["model.seq_length"]).any()
    names = set(safetensors.numpy.load(arrays))
    assert {"choice", "resolution_ema", "0/feature_ema", "2/map", "0/joint/0", "2/independent/3"} <= names
    _, values, windows = last_state(runs / "deep_practical_reuse" / "stopped", REGIMES["deep_practical_reuse"])
    assert values["last_update"] is None and values["has_history"], "in the warm-up"
    assert (np.array(windows) == worker.BASE["model.seq_length"]).all()
    _, values, _ = last_state(runs / "shallow_freeze" / "stopped", REGIMES["shallow_freeze"])
    assert all(len(topology) == 1 and len(topology[0]) == 4 for topology in values["topologies"])


@pytest.mark.ranks
def test_evaluations_and_log_lines_change_no_decision(runs: Path):
    """An evaluation after every step and no log line, against the other way round."""
    often, never = runs / "evaluated", runs / "full_adaptive" / "whole"
    scored = [line["step"] for line in records(often / "metrics.jsonl") if "val/loss" in line]
    assert scored == list(range(1, worker.STEPS + 1))
    assert [line["step"] for line in records(never / "metrics.jsonl") if "val/loss" in line] == [worker.STEPS]
    assert_same_policy(often, never)
    assert losses(often)[-1] == losses(never)[-1]


@pytest.mark.ranks
def test_extended_run_decides_as_one_longer_run(runs: Path):
    extended, whole = runs / "extended", runs / "full_adaptive" / "whole"
    assert json.loads((runs / "codes.json").read_text())["extended"] == [0, 0]
    assert (extended / "checkpoints" / f"step_{worker.SHORTER:08d}").is_dir()
    assert losses(extended) == losses(whole)
    assert_same_policy(extended, whole)


@pytest.mark.ranks
def test_killed_job_resumes_between_decisions_with_its_head_blocks(tiny_data: Path, tmp_path: Path):
    """Two ranks of pretrain.py, killed after a checkpoint at step 12; the resume leaves head_blocks to the run."""
    changes = {"regime": "full_adaptive", "train__steps": 40, "train__eval_interval": 0, "checkpoint__interval": 0,
               "checkpoint__steps": [12], "aah__warmup_steps": 5, "aah__entropy_rows": 7,
               "train__micro_batch_size": 3, "train__global_batch_size": 6}
    whole, run = tmp_path / "whole", tmp_path / "run"
    results = pretrain(TP, command_line(tiny_data, whole, aah__head_blocks=4, **changes), tmp_path)
    assert [code for code, _ in results] == [0, 0], results

    entry = str(REPOSITORY / "aah_dist" / "pretrain.py")
    killed = start_ranks(TP, [entry, *command_line(tiny_data, run, aah__head_blocks=4, **changes)], tmp_path)
    wait_for_step(killed, run, 13)
    for process in killed:
        process.kill()
    wait_for(killed, tmp_path)
    assert newest_complete(run / "checkpoints")[0].step == 12

    (code, output), _ = pretrain(TP, command_line(tiny_data, run, aah__head_blocks="auto", **changes), tmp_path)
    assert code == 0 and f"resuming {run} from step 12" in output, output
    assert read_config(run / "config.yaml").aah.head_blocks == 4
    assert losses(run) == losses(whole)
    policy = records(run / "policy.jsonl")
    assert policy == records(whole / "policy.jsonl") and len(policy) >= 2
    assert last_state(run, 40) == last_state(whole, 40)


def controlled_config(folder: Path, regime: str = "full_adaptive", **changes: object) -> RunConfig:
    return load_config("demo", regime, {**OPTIONS, "output_dir": str(folder), "aah.head_blocks": 2,
                                        **{name.replace("__", "."): value for name, value in changes.items()}})


def saved_controller(config: RunConfig, step: int = 6, facts: dict = FACTS) -> Path:
    """A complete checkpoint of a run whose controller has not decided yet; the tensors are a few bytes."""
    final = Path(config.output_dir) / "checkpoints" / f"step_{step:08d}"
    partial = final.with_name(final.name + ".partial")
    partial.mkdir(parents=True)
    (partial / "state.pt").write_bytes(b"tensors")
    windows = np.full((config.model.num_layers, config.model.num_heads), config.model.seq_length)
    state = PolicyState(windows, *Controller(settings_from_config(config)).state())
    checkpoints._seal(partial, final, step, config, LAYOUT, state, facts)
    save_config(config, Path(config.output_dir) / "config.yaml")
    return final


def make_policy(config: RunConfig, saved: PolicyState | None) -> Policy:
    full = np.full((config.model.num_layers, config.model.num_heads), config.model.seq_length)
    device = devices.select_device("cpu", 0)
    return Policy(config, LAYOUT, StepContext(seed=0, windows=full), 0, device, saved)


def test_head_blocks_auto_resumes_with_the_stored_number(tmp_path: Path):
    saved_controller(controlled_config(tmp_path, aah__head_blocks=4))
    assert open_run(controlled_config(tmp_path, aah__head_blocks="auto"), LAYOUT, FACTS).head_blocks == 4
    with pytest.raises(ConfigError, match=r"aah\.head_blocks was 4 in this run and is 1 now"):
        open_run(controlled_config(tmp_path, aah__head_blocks=1), LAYOUT, FACTS)


def test_controller_file_that_is_missing_cut_or_spoiled(tmp_path: Path):
    path = saved_controller(controlled_config(tmp_path))
    file = path / "controller.safetensors"
    whole = file.read_bytes()
    assert make_policy(controlled_config(tmp_path), open_checkpoint(path).policy()).controller is not None
    file.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    with pytest.raises(ConfigError, match=r"^\S+controller.safetensors is not what was written .*; move that folder"):
        open_checkpoint(path).policy()
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"safetensors is {len(whole) - 1} bytes; {len(whole)} bytes were"):
        open_checkpoint(path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"controller.safetensors is missing; \d+ bytes were written\.$"):
        open_checkpoint(path)


@pytest.mark.parametrize("changes", [
    {"model__num_heads": 8}, {"model__num_layers": 3}, {"aah__head_blocks": 4}, {"aah__windows": [4, 40]},
    {"aah__joint_hidden": 32},
], ids=lambda changes: next(iter(changes)))
def test_controller_state_of_another_shape_is_refused(tmp_path: Path, changes: dict):
    saved = open_checkpoint(saved_controller(controlled_config(tmp_path))).policy()
    with pytest.raises(ConfigError, match=r"^the checkpoint.s controller state is not one of \d .* before it\.$"):
        make_policy(controlled_config(tmp_path, **changes), saved)


@pytest.mark.parametrize("lost", ["1/joint/2", "topologies"])
def test_incomplete_controller_state_is_refused(tmp_path: Path, lost: str):
    config = controlled_config(tmp_path)
    saved = open_checkpoint(saved_controller(config)).policy()
    kept = [{name: value for name, value in part.items() if name != lost} for part in (saved.arrays, saved.values)]
    with pytest.raises(ConfigError, match="the checkpoint's controller state is not one of 2 layers"):
        make_policy(config, PolicyState(saved.windows, *kept))


def test_controller_and_checkpoint_without_one_do_not_meet(tmp_path: Path):
    config = controlled_config(tmp_path)
    saved = open_checkpoint(saved_controller(config)).policy()
    with pytest.raises(ConfigError, match=r"aah\.policy is full_attention, but the checkpoint holds a controller's"):
        make_policy(controlled_config(tmp_path, "full_attention"), saved)
    with pytest.raises(ConfigError, match=r"aah\.policy is adaptive, but the checkpoint holds no controller's"):
        make_policy(config, replace(saved, arrays={}, values={}))
