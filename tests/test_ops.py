"""Loading DeepSpeed's compiled ops: one process at a time, and no lock outlives its holder."""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import environment

from aah_dist.config.schema import ConfigError
from aah_dist.parallel import ops


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replaces the compiler; notes at each load whether a lock file lay there."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found: list[bool] = []
    folder = tmp_path / "deepspeed_shm_comm"

    def build(verbose: bool) -> None:
        found.append((folder / "lock").exists())
        folder.mkdir(exist_ok=True)
        (folder / "deepspeed_shm_comm.so").touch()

    accelerator = SimpleNamespace(create_op_builder=lambda name: SimpleNamespace(load=build))
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    return found


def test_first_load_builds_and_says_so(builds: list[bool]) -> None:
    log = io.StringIO()
    ops.load(ops.COMMUNICATION, log)
    ops.load(ops.COMMUNICATION, log)
    assert builds == [False, False]
    assert log.getvalue() == "building DeepSpeed's CPU communication op, once (one to two minutes) ...\n"


def test_lock_of_a_killed_build_is_cleared(builds: list[bool], tmp_path: Path) -> None:
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm" / "lock").touch()
    log = io.StringIO()
    ops.load(ops.COMMUNICATION, log)
    assert builds == [False]
    assert log.getvalue().startswith("cleared the lock of a build that was interrupted\n")


def test_second_process_waits_for_the_first_and_outlives_its_death(builds: list[bool], tmp_path: Path) -> None:
    program = ("import fcntl, sys, time\nfile = open(sys.argv[1], 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
               "print('held', flush=True)\ntime.sleep(600)")
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "deepspeed_shm_comm.flock")],
                              stdout=subprocess.PIPE, text=True, env=environment())
    assert holder.stdout.readline() == "held\n"
    waiting = threading.Thread(target=ops.load, args=(ops.COMMUNICATION, None))
    waiting.start()
    waiting.join(timeout=1)
    assert waiting.is_alive() and builds == []
    holder.kill()
    holder.wait()
    waiting.join(timeout=30)
    assert not waiting.is_alive() and builds == [False]


def test_missing_compiler_is_one_sentence(builds: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match=r"op needs a C\+\+ compiler and none was found; install g\+\+"):
        ops.load(ops.COMMUNICATION, None)
    assert builds == []
