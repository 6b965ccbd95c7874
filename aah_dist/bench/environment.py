"""What a benchmark's table says above its figures: commit, versions, hardware."""

import argparse
import os
import platform
from importlib.metadata import version
from pathlib import Path

from aah_dist.training.run_folder import git_commit


def positive(text: str) -> int:
    """The type of an option that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def describe(*packages: str) -> str:
    """Three lines; `packages` are distribution names whose versions matter."""
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    return "\n".join([
        f"commit    {git_commit()}",
        f"versions  Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in packages),
        f"hardware  {cpu}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"])
