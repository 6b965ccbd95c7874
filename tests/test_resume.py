"""A run that is stopped in any way goes on as if nothing had happened, or says why it cannot."""

import fcntl
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import REPOSITORY, pretrain, start_ranks, wait_for
from small_runs import FACTS, LAYOUT, command_line, curve, fake_checkpoint, records, small_config

from aah_dist.config.load import read_config
from aah_dist.config.schema import ConfigError
from aah_dist.training import run_folder
from aah_dist.training.checkpoint import newest_complete
from aah_dist.training.start import open_run

STEPS = 30


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["zero0-fp32", "zero1-bf16", "zero2-bf16", "zero3-fp32", "zero3-bf16"])
def test_resumed_curve_equals_the_whole_one(resilience: list[dict], case: str) -> None:
    report = resilience[0][case]
    whole, again = ([json.loads(line) for line in report[name].splitlines()] for name in ("whole", "again"))
    assert report["codes"] == [0, 0]
    assert [line["step"] for line in whole] == list(range(7))
    assert curve(whole) == curve(again)
    assert len({line["train/lr"] for line in whole[2:]}) == 5, "a constant learning rate would hide a shifted schedule"
    assert report["whole_weights"] == report["again_weights"]
    assert [json.loads(line)["step"] for line in report["policy"].splitlines()] == [0]


@pytest.mark.ranks
def test_start_without_a_checkpoint_begins_the_records_anew(resilience: list[dict]) -> None:
    metrics = [json.loads(line) for line in resilience[0]["restarted"]["metrics"].splitlines()]
    assert [line["step"] for line in metrics] == list(range(7))
    assert metrics[1]["train/loss"] < 9 and "run/config_hash" in metrics[0]
    assert resilience[0]["restarted"]["finished"]


def start(options: list[str], cwd: Path) -> list[subprocess.Popen]:
    return start_ranks(2, [str(REPOSITORY / "aah_dist" / "pretrain.py"), *options], cwd, WANDB_MODE="offline")


def wait_for_step(processes: list[subprocess.Popen], folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        metrics = folder / "metrics.jsonl"
        complete = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []
        if complete and json.loads(complete[-1])["step"] >= step:
            return
        time.sleep(0.02)
    for process in processes:
        process.kill()
    pytest.fail(f"step {step} was not reached: {wait_for(processes, folder.parent)}")


@pytest.mark.ranks
def test_run_stopped_killed_and_damaged_equals_an_uninterrupted_one(tiny_data: Path, tmp_path: Path) -> None:
    """TP 2, dropout, cosine, many epochs: SIGUSR1 to one rank, then kill -9, then a truncated checkpoint."""
    changes = {"train__steps": STEPS, "checkpoint__interval": 4, "checkpoint__keep": 3, "train__eval_interval": 10}
    whole, run = tmp_path / "whole", tmp_path / "run"
    options = command_line(tiny_data, run, **changes)
    assert [code for code, _ in pretrain(2, command_line(tiny_data, whole, **changes), tmp_path)] == [0, 0]

    stopped = start(options, tmp_path)
    wait_for_step(stopped, run, 6)
    stopped[1].send_signal(signal.SIGUSR1)
    (code, output), (other_code, other_output) = wait_for(stopped, tmp_path)
    assert (code, other_code) == (75, 75), output + other_output
    saved = newest_complete(run / "checkpoints")[0].step
    assert f"stopped by SIGUSR1 after step {saved};" in output and other_output == ""
    assert saved == records(run / "metrics.jsonl")[-1]["step"] < STEPS

    killed = start(options, tmp_path)
    wait_for_step(killed, run, saved + 6)
    for process in killed:
        process.kill()
    (code, output), _ = wait_for(killed, tmp_path)
    assert code == -signal.SIGKILL and f"resuming {run} from step {saved}" in output
    newest = newest_complete(run / "checkpoints")[0]
    assert saved < newest.step < STEPS

    os.truncate(newest.path / "config.yaml", 10)
    leftover = run / "checkpoints" / "step_00000999.partial"
    leftover.mkdir()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4')
    (code, output), (other_code, other_output) = wait_for(start(options, tmp_path), tmp_path)
    assert (code, other_code) == (0, 0), output + other_output
    assert f"warning: checkpoint file {newest.path}/config.yaml is 10 bytes" in output
    assert not leftover.exists()
    assert curve(records(run / "metrics.jsonl")) == curve(records(whole / "metrics.jsonl"))
    assert [line["step"] for line in records(run / "metrics.jsonl")] == list(range(STEPS + 1))
    assert records(run / "policy.jsonl") == records(whole / "policy.jsonl")
    assert len(records(run / "policy.jsonl")) > 1, "no window was decided in the steps that were repeated"
    # W&B: one folder a start, so rank 0 only; all of the same run.
    services = [path.name for path in (run / "wandb").glob("offline-run-*")]
    assert len(services) == 3 and len({name.rpartition("-")[2] for name in services}) == 1
    assert not (whole / "wandb").exists()

    one_rank = pretrain(1, [*options, "--parallel.tensor_parallel_size", "1"], tmp_path)
    assert one_rank[0][0] == 2
    assert one_rank[0][1].splitlines()[-1].startswith("error: checkpoint ")
    assert "parallel.tensor_parallel_size 2, this run has 1" in one_rank[0][1]


def test_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    fake_checkpoint(config, 8)
    decision = open_run(config, LAYOUT, FACTS)
    assert decision.checkpoint.endswith("step_00000008")
    assert not run_folder.is_unfinished(tmp_path), "killed after the last checkpoint: the run is done all the same"


def test_extension_keeps_the_end_of_the_cosine(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__decay_steps=8)
    fake_checkpoint(config, 8)
    run_folder.mark_finished(tmp_path, {"steps": 8})
    longer = small_config(tmp_path, train__steps=20)
    decision = open_run(longer, LAYOUT, FACTS)
    assert decision.decay_steps == 8 and run_folder.is_unfinished(tmp_path)
    assert read_config(tmp_path / "config.yaml").train.decay_steps == 8
    assert any("Steps 8 to 20 run at train.min_lr" in remark for remark in decision.remarks)
    # and once more, from what the first extension recorded
    assert open_run(small_config(tmp_path, train__steps=30), LAYOUT, FACTS).decay_steps == 8


@pytest.mark.parametrize("changes, sentence", [
    ({"model__num_heads": 8}, "model.num_heads was 4 in this run and is 8 now"),
    ({"model__hidden_size": 96}, "model.hidden_size was 48 in this run and is 96 now"),
    ({"train__seed": 1}, "train.seed was 0 in this run and is 1 now"),
    ({"train__lr": 0.5}, "train.lr was"),
    ({"model__norm": "rmsnorm"}, "model.norm was layernorm in this run and is rmsnorm now"),
    ({"aah__policy": "full_attention"}, "aah.policy was adaptive in this run and is"),
    ({"train__steps": 5}, "train.steps 5 is below step 6 of checkpoint"),
    ({"checkpoint__resume": "none"}, "checkpoint.resume is none, but"),
])
def test_different_run_in_the_same_folder_is_refused(tmp_path: Path, changes: dict, sentence: str) -> None:
    fake_checkpoint(small_config(tmp_path), 6)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=sentence):
        open_run(small_config(tmp_path, **changes), LAYOUT, FACTS)
    assert (tmp_path / "config.yaml").read_text() == before


def test_different_run_is_refused_before_its_first_checkpoint_too(tmp_path: Path) -> None:
    open_run(small_config(tmp_path), LAYOUT, FACTS)
    with pytest.raises(ConfigError, match=r"train.seed was 0 in this run and is 3 now"):
        open_run(small_config(tmp_path, train__seed=3), LAYOUT, FACTS)


@pytest.mark.parametrize("layout, facts, sentence", [
    (replace(LAYOUT, tp=2), {}, "parallel.tensor_parallel_size 1, this run has 2"),
    (replace(LAYOUT, dp=4), {}, "data-parallel size .* 1, this run has 4"),
    (LAYOUT, {"zero_stage": 3}, "ZeRO stage of ds_config 2, this run has 3"),
    (LAYOUT, {"precision": "bf16"}, "precision of ds_config fp32, this run has bf16"),
    (LAYOUT, {"grad_accum_dtype": "bf16"}, "grad_accum_dtype of ds_config fp32, this run has bf16"),
    (LAYOUT, {"vocab_size": 512}, "vocabulary size 300, this run has 512"),
    (LAYOUT, {"text_fingerprint": "other"}, "the text of data.path text, this run has other"),
    (LAYOUT, {"tokenizer_fingerprint": "other"}, "the tokenizer of data.path tokenizer, this run has other"),
])
def test_other_layout_or_data_is_refused(tmp_path: Path, layout: object, facts: dict, sentence: str) -> None:
    fake_checkpoint(small_config(tmp_path), 6)
    with pytest.raises(ConfigError, match=sentence):
        open_run(small_config(tmp_path), layout, {**FACTS, **facts})


def test_resume_from_a_named_checkpoint(tmp_path: Path) -> None:
    old = fake_checkpoint(small_config(tmp_path / "old"), 4)
    new = small_config(tmp_path / "new", checkpoint__resume=str(old))
    decision = open_run(new, LAYOUT, FACTS)
    assert decision.checkpoint == str(old) and decision.folder == str(tmp_path / "new")
    fake_checkpoint(new, 6)
    with pytest.raises(ConfigError, match="already holds the checkpoint of step 6"):
        open_run(new, LAYOUT, FACTS)


@pytest.mark.parametrize("resume", ["nowhere", "empty"])
def test_resume_from_what_is_no_checkpoint(tmp_path: Path, resume: str) -> None:
    (tmp_path / "empty").mkdir()
    config = small_config(tmp_path / "run", checkpoint__resume=str(tmp_path / resume))
    with pytest.raises(ConfigError, match=f"{tmp_path}/{resume} holds no complete checkpoint"):
        open_run(config, LAYOUT, FACTS)
    assert not (tmp_path / "run").exists()


def test_two_jobs_do_not_write_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = small_config(tmp_path / "runs" / "demo")
    fake_checkpoint(named, 4)
    with open(tmp_path / "runs" / "demo" / "run.lock", "w") as other_job:
        fcntl.flock(other_job, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another job is writing to"):
            open_run(named, LAYOUT, FACTS)
        unnamed = replace(named, output_dir=None)
        assert run_folder.choose_output_dir(unnamed) == Path("runs/demo-2")
    assert run_folder.choose_output_dir(unnamed) == Path("runs/demo")
    run_folder.mark_finished(tmp_path / "runs" / "demo", {})
    assert run_folder.choose_output_dir(unnamed) == Path("runs/demo-2"), "a finished run is not overwritten"


def test_records_of_something_else_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"holds a metrics.jsonl but no run's config.yaml"):
        open_run(small_config(tmp_path), LAYOUT, FACTS)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine\n"
