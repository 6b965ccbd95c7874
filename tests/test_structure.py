"""Rules of the code base that a reader relies on."""

import ast
from pathlib import Path

import pytest
from ranks import REPOSITORY

PACKAGE = REPOSITORY / "aah_dist"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# A room may import the rooms before it; entry scripts stand above all.
ROOMS = ["config", "data", "parallel", "attention", "control", "model", "training", "bench"]


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_only_one_file_speaks_of_cuda():
    speaking = {path.relative_to(PACKAGE).as_posix() for path in SOURCES if "torch.cuda" in path.read_text()}
    assert speaking == {"parallel/device.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_run_one_way(path: Path):
    room = path.relative_to(PACKAGE).parts[0]
    if room not in ROOMS:
        return
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "aah_dist" and parts[1] in ROOMS:
            assert ROOMS.index(parts[1]) <= ROOMS.index(room), f"{path} imports {name}"


@pytest.mark.parametrize("room", ["control", "attention"])
def test_a_policy_and_statistics_are_all_that_passes(room: str):
    """The controller knows no attention code, and attention no controller."""
    other = {"control": "attention", "attention": "control"}[room]
    for path in (PACKAGE / room).glob("*.py"):
        assert not [name for name in imported(path) if name.startswith(f"aah_dist.{other}")], path


def test_files_stay_readable():
    assert max(len(path.read_text().splitlines()) for path in SOURCES) < 400
