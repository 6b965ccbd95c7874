"""Independent pieces of CPU work over Python threads, each with one intra-op thread.

Splitting every small operator over threads, as torch does by default, makes each wait for the slowest of its threads,
thousands of times a call; where other jobs share the cores that can cost more than it gains.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

_Item, _Result = TypeVar("_Item"), TypeVar("_Result")


class _Workers:
    """A pool of as many threads as torch uses for one operator, made when first needed and kept."""

    def __init__(self) -> None:
        self.lock, self.pool, self.size = threading.Lock(), None, 0

    def get(self) -> ThreadPoolExecutor:
        size = torch.get_num_threads()
        with self.lock:
            if self.pool is None or self.size != size:
                self.pool, self.size = ThreadPoolExecutor(size, "attention"), size
                everyone = threading.Barrier(size)  # so that each thread takes one of the calls
                for done in [self.pool.submit(_use_one_thread, everyone) for _ in range(size)]:
                    done.result()
                torch.set_num_threads(size)  # a thread's own setting is also the default of threads yet to start
            return self.pool


def _use_one_thread(everyone: threading.Barrier) -> None:
    torch.get_num_threads()  # takes the process-wide default, which would later replace what is set here
    torch.set_num_threads(1)
    everyone.wait()


_workers = _Workers()
os.register_at_fork(after_in_child=_workers.__init__)  # threads do not survive a fork


def for_each(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """[function(item) for item in items], on as many threads as torch.get_num_threads(); the first item starts first.

    Autograd records nothing.  An exception in one piece is raised when its turn in the list comes.
    """
    if min(torch.get_num_threads(), len(items)) < 2:
        with torch.no_grad():
            return [function(item) for item in items]
    inference = torch.is_inference_mode_enabled()

    def call(item: _Item) -> _Result:
        with torch.inference_mode(inference), torch.no_grad():  # both are settings of a thread
            return function(item)

    pool = _workers.get()
    pieces = [pool.submit(call, item) for item in items]
    try:
        return [piece.result() for piece in pieces]
    finally:  # an exception, a signal's for example, leaves once no piece is at work any more
        for piece in pieces:
            piece.cancel()
        wait(pieces)
