"""Worker processes: blocks in, scans and tokens out, in the order of the blocks."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from aah_dist.config.schema import ConfigError
from aah_dist.data.corpus import Block, documents
from aah_dist.data.tokenizer import load_tokenizer

Result = TypeVar("Result")


@dataclass(frozen=True)
class Scan:
    """What is known of a block's documents before they are encoded: their sha256 digests one after the other, their
    characters (int64 [documents]) and keys drawn from (seed, content) (uint64 [documents]). held_out, checksum: of the
    block."""

    digests: bytes
    characters: np.ndarray
    keys: np.ndarray
    held_out: bool
    checksum: int


@dataclass(frozen=True)
class Tokens:
    """A block's documents as tokens [sum of lengths], each ending with the end-of-document token; lengths are theirs.
    checksum: of the block, as in Scan."""

    checksum: int
    tokens: np.ndarray
    lengths: np.ndarray


def scan_block(json_key: str, seed: int, block: Block) -> Scan:
    found = documents(block, json_key)
    digests = [hashlib.sha256(text.encode()).digest() for text in found]
    salt = b"%d " % seed
    keys = b"".join(hashlib.sha256(salt + digest).digest()[:8] for digest in digests)
    characters = np.array([len(text) for text in found], dtype=np.int64)
    return Scan(b"".join(digests), characters, np.frombuffer(keys, dtype="<u8"), block.held_out,
                _checksum(block))


def _checksum(block: Block) -> int:
    """CRC-32 of the block's bytes: enough to notice that a file changed between the two passes, and cheap."""
    value = 0
    for _, _, data in block.parts:
        value = zlib.crc32(data, value)
    return value


def encode_block(json_key: str, tokenizer: Path, dtype: type, block: Block) -> Tokens:
    encoder = _tokenizer(tokenizer)
    eod = np.array([encoder.eod_id], dtype=np.int32)
    pieces, lengths = [], []
    for text in documents(block, json_key):
        ids = encoder.encode_array(text)
        pieces += [ids, eod]
        lengths.append(len(ids) + 1)
    tokens = np.concatenate(pieces).astype(dtype) if pieces else np.zeros(0, dtype=dtype)
    return Tokens(_checksum(block), tokens, np.array(lengths, dtype=np.int64))


@lru_cache(maxsize=1)
def _tokenizer(path: Path):
    return load_tokenizer(path)


def _warm_up(tokenizer: Path) -> None:
    _tokenizer(tokenizer)
    time.sleep(0.05)  # so that no process takes all of these


class Workers:
    """A pool of `count` processes; use as a context manager."""

    def __init__(self, count: int) -> None:
        self._count = count
        # Forked, not spawned: a spawned worker would import the main script, which may load all of torch.
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("fork"), initializer=_start_worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def warm_up(self, tokenizer: Path) -> None:
        """Start the processes and have each load the tokenizer."""
        wait([self._pool.submit(_warm_up, tokenizer) for _ in range(4 * self._count)])

    def scan(self, blocks: Iterable[Block], json_key: str, seed: int) -> Iterator[Scan]:
        return self._ordered(partial(scan_block, json_key, seed), blocks)

    def encode(self, blocks: Iterable[Block], json_key: str, tokenizer: Path, dtype: type) -> Iterator[Tokens]:
        return self._ordered(partial(encode_block, json_key, tokenizer, dtype), blocks)

    def _ordered(self, work: Callable[[Block], Result], blocks: Iterable[Block]) -> Iterator[Result]:
        """Results in the order of `blocks`; only a few blocks are in memory at once."""
        running = deque()
        try:
            for block in blocks:
                running.append(self._pool.submit(work, block))
                if len(running) > 3 * self._count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool as error:
            raise ConfigError("a worker process was killed, most likely for want of memory; "
                              f"use fewer workers than {self._count}.") from error


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)
