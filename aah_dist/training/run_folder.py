"""The folder of a run: its configuration, its records, its checkpoints.

    config.yaml      the resolved configuration
    metrics.jsonl    one line a logged step        policy.jsonl   one line a change of windows
    checkpoints/     see training/checkpoint.py
    run.lock         locked while a job writes here
"""

import errno
import fcntl
import json
import os
import subprocess
from pathlib import Path
from typing import TextIO

from aah_dist.config.load import read_config
from aah_dist.config.schema import ConfigError, RunConfig
from aah_dist.config.validate import check_resume

_FINISHED = "finished.json"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some shared file systems have none
_claimed: dict[Path, TextIO] = {}


def choose_output_dir(config: RunConfig) -> Path:
    """`output_dir`, or the first of runs/PRESET, runs/PRESET-2, ... that is new or an unfinished run of this very
    configuration which no other job is writing; a finished run is never overwritten."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    base = Path("runs") / Path(config.preset).stem
    number = 1
    while True:
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not (folder / "config.yaml").exists():
            return folder
        if is_unfinished(folder) and _is_same_run(folder, config) and not _is_busy(folder):
            return folder
        number += 1


def claim(folder: Path) -> None:
    """Keep other jobs from writing `folder` as long as this process lives; the lock dies with it, however it ends.

    Raises: ConfigError if another process holds it.
    """
    if folder.resolve() in _claimed:
        return
    file = open(folder / "run.lock", "w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another job is writing to {folder}; wait for its end, or choose another "
                          "--output_dir.") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    _claimed[folder.resolve()] = file


def _is_busy(folder: Path) -> bool:
    if not (folder / "run.lock").exists() or folder.resolve() in _claimed:
        return False
    with open(folder / "run.lock", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
    return False


def is_unfinished(folder: Path) -> bool:
    return not (folder / _FINISHED).exists()


def _is_same_run(folder: Path, config: RunConfig) -> bool:
    try:
        check_resume(read_config(folder / "config.yaml"), config)
    except ConfigError:
        return False
    return True


def mark_finished(folder: Path, summary: dict) -> None:
    write_atomically(folder / _FINISHED, json.dumps(summary, indent=2) + "\n")


def mark_running(folder: Path) -> None:
    (folder / _FINISHED).unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """The file holds either its old or its new text, whatever happens in between."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def cut_back(path: Path, step: int) -> None:
    """Drop the lines of a .jsonl file after `step`, and a last line that was not written whole."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["step"] <= step:
            kept.append(line)
    write_atomically(path, "".join(line + "\n" for line in kept))


def git_commit() -> str:
    """Commit of the checkout this package runs from, `-dirty` if it has changes; unknown outside of one."""
    here = Path(__file__).resolve().parent
    try:
        describe = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], cwd=here,
                                  capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return describe.stdout.strip()
