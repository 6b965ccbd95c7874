"""Executed floating-point operations of marked ranges, by valgrind's callgrind.

callgrind runs the program on a simulated processor and counts every executed instruction; instructions.py says what
each one computes.  Ranges are marked in the program by a small library (callgrind_marks.c) that is compiled here.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aah_dist.bench import instructions
from aah_dist.config.errors import ConfigError

LEAST_DECODED = 0.9
"""Share of the executed instructions below which a count would be a guess."""

_TRIGGER = "desc: Trigger: Client Request: "


@dataclass(frozen=True)
class Count:
    """What one range executed."""

    flops: int
    instructions: int
    decoded: int

    @property
    def share(self) -> float:
        """Decoded share of the executed instructions."""
        return self.decoded / self.instructions if self.instructions else 0.0


class Marks:
    """The compiled library, inside the program that is counted; ranges are no-ops outside valgrind."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.library.range_begin()
        yield
        self.library.range_end(name.encode())


def missing() -> str | None:
    """Why nothing can be counted here, one sentence that says what to install, or None."""
    for tool, package in (("valgrind", "valgrind"), ("cc", "gcc")):
        if shutil.which(tool) is None:
            return f"{tool} was not found; counting instructions needs it (apt-get install {package})."
    return instructions.missing()


def require() -> None:
    reason = missing()
    if reason:
        raise ConfigError(reason)


def compile_marks(folder: Path) -> Path:
    """The marks as a shared library in `folder`."""
    library = folder / "marks.so"
    source = Path(__file__).with_name("callgrind_marks.c")
    made = subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], capture_output=True,
                          text=True, check=False)
    if made.returncode:
        raise ConfigError(f"{source.name} did not compile ({made.stderr.strip().splitlines()[0]}); install valgrind "
                          "with its headers (apt-get install valgrind gcc).")
    return library


def run(command: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    """Run `command` under callgrind, with one thread; dumps go to `folder`.  Returns its standard output."""
    options = ["--tool=callgrind", "--quiet", "--instr-atstart=no", "--dump-instr=yes", "--dump-line=no",
               "--compress-strings=no", "--compress-pos=no", f"--callgrind-out-file={folder}/dump"]
    done = subprocess.run(["valgrind", *options, *command], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    if done.returncode:
        raise ConfigError(f"valgrind ended with code {done.returncode}: {' '.join(done.stderr.split())[-600:]}")
    return done.stdout


def counts(folder: Path) -> dict[str, Count]:
    """The count of every range that was dumped to `folder`.

    Raises ConfigError when a dump cannot be read or less than LEAST_DECODED of a range's instructions was decoded.
    """
    ranges: dict[str, Counter] = {}
    for path in sorted(folder.glob("dump*")):
        name, executed = parse_dump(path.read_text(errors="replace"), path.name)
        if name is not None:
            ranges.setdefault(name, Counter()).update(executed)
    decoded = instructions.decode({address for executed in ranges.values() for address in executed})
    weight = {address: instructions.flops(text) for address, text in decoded.items()}
    return {name: checked(name, count(executed, weight)) for name, executed in ranges.items()}


def count(executed: Counter, weight: dict[tuple[str, int], int]) -> Count:
    """executed: times each (object, address) ran; weight: FLOPs of those that could be decoded."""
    known = {address: times for address, times in executed.items() if address in weight}
    return Count(sum(times * weight[address] for address, times in known.items()), executed.total(),
                 sum(known.values()))


def checked(name: str, found: Count) -> Count:
    if found.share < LEAST_DECODED:
        raise ConfigError(f"range {name}: {found.share:.1%} of {found.instructions:,} executed instructions could be "
                          f"decoded; below {LEAST_DECODED:.0%} its FLOPs would be a guess, so none are given.")
    return found


def parse_dump(text: str, file: str) -> tuple[str | None, Counter]:
    """A callgrind dump's range name (None for the dump at the program's end) and, by (object, address), how often
    each instruction ran.  Raises ConfigError unless the dump is whole and has instruction addresses."""
    name, place, called, total = None, "", False, None
    executed: Counter = Counter()
    lines = text.splitlines()
    if "positions: instr" not in lines or "events: Ir" not in lines:
        raise ConfigError(f"callgrind dump {file} has no instruction addresses; it needs --dump-instr=yes "
                          "--dump-line=no --compress-pos=no.")
    for line in lines:
        if line.startswith("0x"):
            if called:  # the cost of what was called: counted there
                called = False
                continue
            address, times = line.split()
            executed[place, int(address, 16)] += int(times)
        elif line.startswith("ob="):
            place = line[3:]
        elif line.startswith("calls="):
            called = True
        elif line.startswith(_TRIGGER):
            name = line.removeprefix(_TRIGGER)
        elif line.startswith("totals: "):
            total = int(line.removeprefix("totals: "))
    if total is None or total != executed.total():
        raise ConfigError(f"callgrind dump {file} lists {executed.total():,} instructions and says it has "
                          f"{total if total is None else format(total, ',')}; it is cut short or of another format.")
    return name, executed


def describe() -> str:
    """valgrind's version."""
    done = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True)
    return f"{done.stdout.strip()} on {platform.machine()}"
