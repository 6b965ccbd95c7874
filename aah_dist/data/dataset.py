"""Opening prepared data: checks, and rows of tokens straight from the memory map."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from aah_dist.config.schema import ConfigError
from aah_dist.data.tokenizer import tokenizer_fingerprint

FORMAT = 1
METADATA = "metadata.json"
SPLITS = ("train", "valid")
# Megatron's IndexedDataset: magic, version, dtype code, number of sequences, number of document boundaries.
_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEADER = struct.Struct("<9sQBQQ")
_IDX_DTYPES = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}


class PreparedData:
    """A folder written by prepare_data.py. Raises ConfigError where anything in it is missing or does not fit."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.meta = read_metadata(self.path)
        try:
            self.vocab_size = int(self.meta["tokenizer"]["vocab_size"])
            self.eod_id = int(self.meta["tokenizer"]["eod_id"])
            fingerprint = self.meta["tokenizer"]["fingerprint"]
            tokens = {name: int(self.meta["splits"][name]["tokens"]) for name in SPLITS}
            self.valid_unigram_entropy = float(self.meta["valid_unigram_entropy"])
        except (KeyError, TypeError, ValueError) as error:
            raise _broken(self.path / METADATA, f"lacks a usable {error}") from error
        if not self.tokenizer_path.exists():
            raise _broken(self.tokenizer_path, "is missing")
        if tokenizer_fingerprint(self.tokenizer_path) != fingerprint:
            raise _broken(self.tokenizer_path, "is not the tokenizer that the data was made with")
        self._tokens = {name: _open_tokens(self.path / name, tokens[name]) for name in SPLITS}

    @property
    def tokenizer_path(self) -> Path:
        """The data's own copy of its tokenizer, for load_tokenizer."""
        model = self.path / "tokenizer.model"
        return model if model.exists() else self.path / "tokenizer"

    def split(self, name: str, seq_length: int) -> TokenRows:
        """Rows of split "train" or "valid"."""
        return TokenRows(self._tokens[name], seq_length, f"{self.path / name}.bin")


class TokenRows:
    """Rows of T+1 tokens out of one stream of documents; neighbours share one, so each token is predicted once."""

    def __init__(self, tokens: np.ndarray, seq_length: int, name: str) -> None:
        self._tokens = tokens
        self._seq_length = seq_length
        if len(self) < 1:
            raise ConfigError(f"model.seq_length {seq_length} is above what {name} holds; its {len(tokens)} tokens "
                              f"make rows of at most {len(tokens) - 1}.")

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_length

    def __getitem__(self, row: int) -> np.ndarray:
        """int64 [T+1]: tokens row*T .. row*T + T of the stream."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        start = row * self._seq_length
        return self._tokens[start:start + self._seq_length + 1].astype(np.int64)


def check_tokenizer(prepared: PreparedData, path: str | Path) -> None:
    """Raise ConfigError unless the tokenizer file or folder `path` is the one that `prepared` was made with."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"data.tokenizer {path} does not exist; leave it unset to use the data's own.")
    theirs, ours = tokenizer_fingerprint(path), tokenizer_fingerprint(prepared.tokenizer_path)
    if theirs != ours:
        raise ConfigError(f"data.tokenizer {path} (sha256 {theirs[:12]}) is not the tokenizer that {prepared.path} was "
                          f"made with (sha256 {ours[:12]}); leave it unset, or prepare the text again with it.")


def read_metadata(folder: Path) -> dict:
    """metadata.json of a prepared folder. Raises ConfigError where there is none or it cannot be read."""
    path = folder / METADATA
    if not folder.is_dir():
        raise ConfigError(f"data.path {folder} is not a folder of prepared data; make it with python "
                          "aah_dist/prepare_data.py.")
    if not path.is_file():
        raise ConfigError(f"data.path {folder} holds no {METADATA}; give a folder written by prepare_data.py.")
    try:
        meta = json.loads(path.read_text())
    except ValueError as error:
        raise _broken(path, f"is not JSON ({error})") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise _broken(path, f"is not of format {FORMAT}")
    return meta


def _open_tokens(prefix: Path, expected: int) -> np.ndarray:
    """The memory map [tokens] of PREFIX.bin, its size checked against PREFIX.idx and the metadata."""
    bin_path, idx_path = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise _broken(path, "is missing")
        if path.stat().st_size == 0:
            raise _broken(path, "is empty")
    with open(idx_path, "rb") as stream:
        header = stream.read(_IDX_HEADER.size)
    size = idx_path.stat().st_size
    if len(header) < _IDX_HEADER.size:
        raise _broken(idx_path, f"is cut off after {size} bytes")
    magic, version, code, sequences, boundaries = _IDX_HEADER.unpack(header)
    if magic != _IDX_MAGIC or version != 1 or code not in _IDX_DTYPES:
        raise _broken(idx_path, "is not a Megatron index of uint16 or int32 tokens")
    # int32 length and int64 offset per sequence, int64 per document boundary
    wanted = _IDX_HEADER.size + 12 * sequences + 8 * boundaries
    if size != wanted:
        raise _broken(idx_path, f"has {size} bytes where its header says {wanted}")
    if sequences < 1:
        raise _broken(idx_path, "holds no documents")
    lengths = np.memmap(idx_path, dtype=np.int32, mode="r", offset=_IDX_HEADER.size, shape=(sequences,))
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens != expected:
        raise _broken(idx_path, f"counts {tokens} tokens where {METADATA} says {expected}")
    dtype = _IDX_DTYPES[code]
    if bin_path.stat().st_size != tokens * dtype.itemsize:
        raise _broken(bin_path, f"has {bin_path.stat().st_size} bytes where its index says {tokens * dtype.itemsize}")
    return np.memmap(bin_path, dtype=dtype, mode="r")


def _broken(path: Path, what: str) -> ConfigError:
    return ConfigError(f"prepared data: {path} {what}; delete that folder and make it again with prepare_data.py.")
