"""The folder of a run: its configuration, its records, its checkpoints.

    config.yaml      the resolved configuration
    metrics.jsonl    one line a logged step        policy.jsonl   one line a change of windows
    checkpoints/     see training/checkpoint.py
"""

import json
import os
import subprocess
from pathlib import Path

from aah_dist.config.load import read_config
from aah_dist.config.schema import ConfigError, RunConfig
from aah_dist.config.validate import check_resume

_FINISHED = "finished.json"


def choose_output_dir(config: RunConfig) -> Path:
    """`output_dir`, or the first of runs/PRESET, runs/PRESET-2, ... that is new or an unfinished run of this very
    configuration; a finished run is never overwritten."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    base = Path("runs") / Path(config.preset).stem
    number = 1
    while True:
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not (folder / "config.yaml").exists() or (is_unfinished(folder) and _is_same_run(folder, config)):
            return folder
        number += 1


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
