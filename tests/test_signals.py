"""How a job ends: asked to stop, misused, or because one of its ranks failed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import REPOSITORY, environment, pretrain, run_ranks
from small_runs import command_line

from aah_dist.config.schema import RankError
from aah_dist.parallel import device as devices
from aah_dist.parallel.launch import free_port
from aah_dist.training.checkpoint import newest_complete
from aah_dist.training.signals import StopRequest

WORKER = str(REPOSITORY / "tests" / "entry_worker.py")
TRACEBACK = "Traceback (most recent call last)"


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signal_to_one_rank_saves_and_stops_all(resilience: list[dict], name: str) -> None:
    for report in resilience:
        assert report[name] == {"code": 75, "step": 2, "handlers_restored": True, "logged": [0, 1, 2]}


def test_second_interrupt_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same key press, passed on by a launcher as well
        assert request.signal == signal.SIGINT
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_other_signals_do_not_interrupt_and_the_first_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with StopRequest() as request:
        signal.raise_signal(signal.SIGUSR1)
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert request.signal == signal.SIGUSR1
    assert before == {number: signal.getsignal(number) for number in before}


@pytest.mark.ranks
def test_fault_of_one_rank_is_shown_once_and_ends_the_others(tiny_data: Path, tmp_path: Path) -> None:
    options = command_line(tiny_data, tmp_path / "run", checkpoint__interval=1)
    outputs = run_ranks(2, [WORKER, *options], tmp_path, timeout=120, FAULT="raise", FAULT_RANK="1")
    assert [code for code, _ in outputs] == [1, 1], outputs
    assert outputs[1][1].startswith("error: rank 1 failed:\n" + TRACEBACK)
    assert outputs[1][1].rstrip().endswith("ZeroDivisionError: an unforeseen fault")
    assert TRACEBACK not in outputs[0][1]
    last = outputs[0][1].splitlines()[-1]
    assert last.startswith("rank 0: stopped, because another rank ended or did not answer (") and last.endswith(")")
    assert newest_complete(tmp_path / "run" / "checkpoints")[0].step == 1


@pytest.mark.ranks
def test_rank_that_dies_while_starting_ends_the_job_under_the_launcher(tiny_data: Path, tmp_path: Path) -> None:
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--log_level", "error", "--num_accelerators", "2",
                "--master_port", str(free_port()), WORKER]
    ended = subprocess.run([*launcher, *command_line(tiny_data, tmp_path / "run")], cwd=REPOSITORY, timeout=120,
                           env=environment(FAULT="raise-while-starting", FAULT_RANK="1", PYTHONWARNINGS="ignore"),
                           capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.count(TRACEBACK) == 1 and "error: rank 1 failed:" in ended.stderr


@pytest.mark.ranks
def test_busy_port_is_one_sentence(tiny_data: Path, tmp_path: Path) -> None:
    with socket.socket() as other_program:
        other_program.bind(("127.0.0.1", 0))
        other_program.listen()
        port = str(other_program.getsockname()[1])
        ended = subprocess.run([sys.executable, REPOSITORY / "aah_dist" / "pretrain.py",
                                *command_line(tiny_data, tmp_path / "run")], cwd=tmp_path, text=True, timeout=120,
                               env=environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                                               MASTER_PORT=port), capture_output=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: port {port} of 127.0.0.1 (MASTER_PORT) is in use by another program")
    assert len(ended.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()


def test_ranks_that_the_layout_does_not_divide(tiny_data: Path, tmp_path: Path) -> None:
    options = command_line(tiny_data, tmp_path / "run", parallel__tensor_parallel_size=2)
    outputs = pretrain(3, options, tmp_path)
    assert [code for code, _ in outputs] == [2, 2, 2]
    assert outputs[0][1] == ("error: parallel.tensor_parallel_size 2 does not divide the 3 ranks of this job; start a "
                             "multiple of 2 ranks or choose from 1, 3.\n")
    assert outputs[1][1] == outputs[2][1] == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_absent_gpu_is_one_sentence(tiny_data: Path, tmp_path: Path) -> None:
    code, output = pretrain(1, command_line(tiny_data, tmp_path / "run", parallel__device="cuda"), tmp_path)[0]
    assert (code, len(output.splitlines())) == (2, 2) and output.startswith("starting 1 rank ...\n")
    assert output.splitlines()[1].startswith("error: parallel.device is cuda, but this machine has no usable GPU")


def test_rank_without_a_gpu_of_its_own_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RankError, match="rank 2 of this machine has no GPU: 2 found"):
        devices.select_device("auto", 2)


@pytest.mark.parametrize("error, shown", [("ConfigError", ""), ("RankError", "error: only here\n")])
def test_misuse_that_one_rank_sees_is_shown_by_that_rank(error: str, shown: str) -> None:
    program = ("from aah_dist.config import schema\nfrom aah_dist.training.entry import run_main\n"
               f"def main():\n    raise schema.{error}('only here')\nrun_main(main)")
    ended = subprocess.run([sys.executable, "-c", program], env=environment(RANK="1"), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr, ended.stdout) == (2, shown, "")


def test_full_disk_outside_of_a_checkpoint_is_one_sentence() -> None:
    program = ("import errno\nfrom aah_dist.training.entry import run_main\n"
               "def main():\n    raise OSError(errno.ENOSPC, 'No space left on device')\nrun_main(main)")
    ended = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: rank 0: [Errno 28] No space left on device; free space")
