"""DeepSpeed's compiled ops: each built once, by one process, in the project's own cache.

DeepSpeed compiles an op at first use (one to two minutes).  Its lock is a plain file: a build killed half-way leaves it
behind and every later run waits for it in silence.  Here a kernel lock (flock), which dies with its holder, is taken
around every load: whoever holds it knows that a lock file still lying there is stale.

`python -m aah_dist.parallel.ops` builds what CPU ranks need ahead of time.
"""

import fcntl
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from aah_dist.config.schema import ConfigError


@dataclass(frozen=True)
class Op:
    """builder: DeepSpeed's class; name: of the library; words: for the user."""

    builder: str
    name: str
    words: str


COMMUNICATION = Op("ShareMemCommBuilder", "deepspeed_shm_comm", "DeepSpeed's CPU communication op")
CPU_ADAM = Op("CPUAdamBuilder", "cpu_adam", "DeepSpeed's CPU Adam op")


def extensions_dir() -> Path:
    """TORCH_EXTENSIONS_DIR if set, else a folder in the checkout's (or the user's) cache; exported for torch."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        checkout = Path(__file__).resolve().parents[2]
        base = checkout / ".cache" if (checkout / "setup.cfg").exists() and os.access(checkout, os.W_OK) \
            else Path.home() / ".cache" / "aah_dist"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(base / "torch_extensions")
    return Path(os.environ["TORCH_EXTENSIONS_DIR"])


def load(op: Op, log: TextIO | None = sys.stderr) -> None:
    """Build `op` if it is not there yet and load it into this process; says what it waits for on `log`.

    Raises: ConfigError if there is no compiler.
    """
    folder = extensions_dir()
    folder.mkdir(parents=True, exist_ok=True)
    # ninja comes with the environment of this Python, which is not on PATH when the environment is not activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with open(folder / f"{op.name}.flock", "w") as mutex:
        _lock(mutex, op, log)
        build = folder / op.name
        if (build / "lock").exists():
            (build / "lock").unlink()
            _say(log, "cleared the lock of a build that was interrupted")
        if not (build / f"{op.name}.so").exists():
            if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++")):
                raise ConfigError(f"{op.words} needs a C++ compiler and none was found; install g++.")
            _say(log, f"building {op.words}, once (one to two minutes) ...")
        began = time.monotonic()
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder(op.builder).load(verbose=False)
        if time.monotonic() - began > 20:
            _say(log, f"built in {time.monotonic() - began:.0f} s")


def _lock(mutex: TextIO, op: Op, log: TextIO | None) -> None:
    try:
        fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waited_since = time.monotonic()
        announced = False
        while True:
            try:
                fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not announced and time.monotonic() - waited_since > 5:
                    _say(log, f"waiting for another process that builds {op.words} ...")
                    announced = True
                time.sleep(0.2)


def _say(log: TextIO | None, text: str) -> None:
    if log is not None:
        print(text, file=log, flush=True)


if __name__ == "__main__":
    from aah_dist.parallel.device import has_gpu

    try:
        if not has_gpu():  # GPU ranks talk through NCCL
            os.environ["DS_ACCELERATOR"] = "cpu"
            load(COMMUNICATION)
    except ConfigError as error:
        sys.exit(f"error: {error}")
