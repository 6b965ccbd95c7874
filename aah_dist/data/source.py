"""The text of one preparation: read anew for each pass, always in the same order, and what the first pass learns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from aah_dist.config.schema import ConfigError
from aah_dist.data.corpus import Block, documents, find_files, read_blocks
from aah_dist.data.workers import Scan, Tokens


@dataclass(frozen=True)
class Source:
    """Which text, cut into documents how. valid_files: text given for validation, read after the rest."""

    files: list[Path]
    one_document_per: str
    json_key: str
    valid_files: list[Path] = field(default_factory=list)

    @classmethod
    def find(cls, text: list[str], one_document_per: str, json_key: str, valid_text: list[str] | None = None) -> Source:
        """Raises ConfigError where an entry matches nothing or a file is given as both."""
        files, valid_files = find_files(text), find_files(valid_text or [])
        both = {path.resolve() for path in files} & {path.resolve() for path in valid_files}
        if both:
            raise ConfigError(f"{min(both)} is given as training and as validation text; give it as one of them.")
        return cls(files, one_document_per, json_key, valid_files)

    def blocks(self) -> Iterator[Block]:
        yield from read_blocks(self.files, self.one_document_per)
        for block in read_blocks(self.valid_files, self.one_document_per):
            yield replace(block, held_out=True)

    def first_document(self) -> str:
        return next(text for block in self.blocks() for text in documents(block, self.json_key))

    def chosen_documents(self, chosen: np.ndarray, per_block: list[int]) -> Iterator[str]:
        """The documents where `chosen` (bool [documents]) holds; blocks without one are not decoded.

        Text that has changed since per_block was counted is found by `Contents.same_blocks`, not here.
        """
        first = 0
        for block, count in zip(self.blocks(), per_block, strict=False):
            here = chosen[first:first + count]
            if here.any():
                yield from (text for text, wanted in zip(documents(block, self.json_key), here, strict=False)
                           if wanted)
            first += count


@dataclass
class Contents:
    """fingerprint: sha256 over the documents' own sha256, in order. characters (int64) and keys (uint64): per document.
    per_block: documents of each block. held_out: bool, per document: given as validation text."""

    fingerprint: str
    characters: np.ndarray
    keys: np.ndarray
    per_block: list[int]
    held_out: np.ndarray
    _checksums: list[int] = field(repr=False)

    @classmethod
    def collect(cls, scans: Iterable[Scan]) -> Contents:
        """Raises ConfigError where there is no document."""
        whole, checksums, characters, keys, held_out = hashlib.sha256(), [], [], [], []
        for scan in scans:
            whole.update(scan.digests)
            checksums.append(scan.checksum)
            characters.append(scan.characters)
            keys.append(scan.keys)
            held_out.append(np.full(len(scan.keys), scan.held_out))
        if not sum(map(len, keys)):
            raise ConfigError("the text holds no documents: every file or line is empty.")
        return cls(whole.hexdigest(), np.concatenate(characters), np.concatenate(keys), list(map(len, keys)),
                   np.concatenate(held_out), checksums)

    def same_blocks(self, encoded: Iterable[Tokens]) -> Iterator[Tokens]:
        """Pass on the second reading. Raises ConfigError where it differs from the first."""
        read = 0
        for block in encoded:
            if read == len(self._checksums) or block.checksum != self._checksums[read]:
                raise ConfigError("the text changed while it was being prepared; start again when it is complete.")
            read += 1
            yield block
        if read != len(self._checksums):
            raise ConfigError("the text became shorter while it was being prepared; start again when it is complete.")
