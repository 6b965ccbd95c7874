"""A folder that appears whole or not at all, built by one job at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `folder` (a file beside it; the system frees it when the holder dies).

    `waiting` is called once if another job holds it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def appearing_whole(folder: Path) -> Iterator[Path]:
    """Yield a hidden sibling to write into; on success it is synced to disk and renamed to `folder`.

    Call it under `exclusive`: a sibling that is already there was left by a killed job and is removed.
    """
    partial = folder.parent / f".{folder.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        yield partial
        for directory, _, names in os.walk(partial, topdown=False):
            for name in names:
                sync(Path(directory, name))
            sync(Path(directory))
        os.rename(partial, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
