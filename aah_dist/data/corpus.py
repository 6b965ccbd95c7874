"""Finding text and cutting it into documents.

A `Block` is some 256 KiB of raw bytes of whole documents. The parent process reads blocks in a fixed order and worker
processes turn them into documents, so neither the file system's order nor the number of workers shows in the result.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from aah_dist.config.schema import ConfigError

STDLIB = "stdlib"
BLOCK_BYTES = 1 << 18
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}


@dataclass(frozen=True)
class Block:
    """Raw bytes of whole documents.

    kind: "file" (each part is one document), "line" (each line is one) or "json" (each line is an object
        that holds one).
    parts: (file name, number of the first line, bytes). held_out: given as validation text.
    """

    kind: str
    parts: tuple[tuple[str, int, bytes], ...]
    held_out: bool = False


def find_files(text: list[str]) -> list[Path]:
    """Files named by `text` (files, folders, globs, or "stdlib"), each once, in an order that only names decide.

    Folders are read whole, hidden files left out. Raises ConfigError where an entry matches nothing.
    """
    files: dict[Path, Path] = {}
    for entry in text:
        if entry == STDLIB:
            found = _stdlib_files()
        elif os.path.isdir(entry):
            found = _folder_files(Path(entry))
        elif os.path.lexists(entry):
            found = [Path(entry)]
        else:
            found = sorted((Path(name) for name in glob.glob(entry, recursive=True) if os.path.isfile(name)),
                           key=lambda path: path.parts)
        if not found:
            raise ConfigError(f"text {entry!r} matches no file; give files, folders, quoted globs, or {STDLIB}.")
        for path in found:
            files.setdefault(path.resolve(), path)
    return list(files.values())


def _folder_files(folder: Path) -> list[Path]:
    found = []
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in _folder_files(root)
            if path.suffix == ".py" and not _NOT_STDLIB & set(path.relative_to(root).parts[:-1])]


def read_blocks(files: list[Path], one_document_per: str) -> Iterator[Block]:
    """Read `files` in order. JSONL files hold one document per line; others one per "file" or per "line".

    Raises ConfigError for a file that cannot be read.
    """
    pending: list[tuple[str, int, bytes]] = []
    size = 0
    for path in files:
        kind = _kind(path, one_document_per)
        if kind == "file":
            with _open(path) as stream:
                data = _read(path, stream.read)
            pending.append((str(path), 1, data))
            size += len(data)
        if pending and (kind != "file" or size >= BLOCK_BYTES):
            yield Block("file", tuple(pending))
            pending, size = [], 0
        if kind != "file":
            yield from _line_blocks(path, kind)
    if pending:
        yield Block("file", tuple(pending))


def _line_blocks(path: Path, kind: str) -> Iterator[Block]:
    first_line = 1
    with _open(path) as stream:
        while lines := _read(path, lambda: stream.readlines(BLOCK_BYTES)):
            yield Block(kind, ((str(path), first_line, b"".join(lines)),))
            first_line += len(lines)


def _kind(path: Path, one_document_per: str) -> str:
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return "json" if name.suffix in _JSON_SUFFIXES else one_document_per


def _open(path: Path) -> BinaryIO:
    return _read(path, lambda: io.BufferedReader(gzip.open(path)) if path.suffix == ".gz" else open(path, "rb"))


def _read(path: Path, action):
    try:
        return action()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"text file {path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error


def documents(block: Block, json_key: str) -> list[str]:
    """The documents of a block, in order; those of white space alone are left out.

    Raises ConfigError, naming file and line, for bytes that are not UTF-8 and for lines that are not JSON objects with
    a string under `json_key`.
    """
    found = []
    for name, first_line, data in block.parts:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = first_line + data.count(b"\n", 0, error.start)
            raise ConfigError(f"text file {name} is not valid UTF-8 in line {line}; convert it (iconv -t UTF-8) or "
                              "leave it out with a glob.") from error
        if first_line == 1:
            text = text.removeprefix("\ufeff")
        if block.kind == "file":
            found.append(text)
        elif block.kind == "line":
            found += [line.removesuffix("\r") for line in text.split("\n")]
        else:
            found += [_json_document(line, f"line {first_line + i} of {name}", json_key)
                      for i, line in enumerate(text.split("\n")) if line.strip()]
    return [document for document in found if not document.isspace() and document]


def _json_document(line: str, where: str, json_key: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); a JSONL file holds one object per line.") from error
    if not isinstance(record, dict) or not isinstance(record.get(json_key), str):
        keys = ", ".join(map(repr, record)) if isinstance(record, dict) else "it is no object"
        raise ConfigError(f"{where} has no text under the key {json_key!r} (its keys: {keys}); choose one with "
                          "json_key.")
    text = record[json_key]
    if "\\u" in line and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{where} holds half of a surrogate pair, which is not valid Unicode text; mend that line.")
    return text
