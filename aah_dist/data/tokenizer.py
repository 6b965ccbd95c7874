"""Tokenizers behind one small interface: sentencepiece models and Hugging Face folders."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Protocol

import numpy as np

from aah_dist.config.schema import ConfigError

# What defines a Hugging Face tokenizer; config.json only helps transformers to find its class.
_HF_DEFINING = ("added_tokens.json", "merges.txt", "sentencepiece.bpe.model", "special_tokens_map.json", "spiece.model",
                "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_HF_FILES = (*_HF_DEFINING, "config.json")
_EOD_PIECES = ("<|endoftext|>", "</s>", "<eod>")


class Tokenizer(Protocol):
    """Text to token ids and back. `eod_id` ends every document and is never produced from text."""

    vocab_size: int
    eod_id: int
    eod_piece: str
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def encode_array(self, text: str) -> np.ndarray: ...

    def decode(self, ids: list[int]) -> str: ...


class SentencePieceTokenizer:
    """A sentencepiece .model file."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"tokenizer {path} is not a sentencepiece model ({_first_line(error)}).") from error
        self.vocab_size = self._model.get_piece_size()
        self.fingerprint = tokenizer_fingerprint(path)
        # sentencepiece answers -1 for a special token that the model does not have.
        special = {name: getattr(self._model, f"{name}_id")() for name in ("bos", "eos", "pad", "unk")}
        special = {name: None if token == -1 else token for name, token in special.items()}
        _check_special(path, special, self.vocab_size)
        eod = special["eos"]
        if eod is None:
            ids = [self._model.piece_to_id(piece) for piece in _EOD_PIECES]
            eod = next((token for token in ids if self._model.is_control(token)), None)
        self.eod_id = _require_eod(path, eod)
        self.eod_piece = self._model.id_to_piece(self.eod_id)
        if not self._model.is_control(self.eod_id):
            raise ConfigError(f"tokenizer {path} has {self.eod_piece!r} as its end-of-document token, but text can "
                              "contain that piece; make it a control symbol.")

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_array(self, text: str) -> np.ndarray:
        """int32 [tokens], without the list of Python integers in between."""
        return self._model.encode_as_numpy(text)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer folder, or the two files of GPT-2's BPE (vocab.json, merges.txt)."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer, GPT2TokenizerFast

        names = {entry.name for entry in path.iterdir()}
        bare_gpt2 = {"vocab.json", "merges.txt"} <= names and not names & {"tokenizer.json", "tokenizer_config.json"}
        try:
            if bare_gpt2:
                tokenizer = GPT2TokenizerFast.from_pretrained(str(path), local_files_only=True)
            else:
                tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds for a folder that holds no usable tokenizer
            raise ConfigError(f"tokenizer {path} is not a Hugging Face tokenizer folder "
                              f"({_first_line(error)}).") from error
        self._tokenizer = tokenizer
        self._fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._fast is not None:
            # Text that spells a special token stays text: only prepare may end a document.
            self._fast.encode_special_tokens = True
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.fingerprint = tokenizer_fingerprint(path)
        special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
        _check_special(path, special, self.vocab_size)
        eod = special["eos"]
        if eod is None:
            eod = next((tokenizer.get_vocab()[p] for p in _EOD_PIECES if p in tokenizer.all_special_tokens), None)
        self.eod_id = _require_eod(path, eod)
        self.eod_piece = tokenizer.convert_ids_to_tokens(self.eod_id)

    def encode(self, text: str) -> list[int]:
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_array(self, text: str) -> np.ndarray:
        """int32 [tokens]."""
        return np.array(self.encode(text), dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a sentencepiece .model file or a Hugging Face folder. Raises ConfigError for anything else."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"tokenizer {path} does not exist; give a .model file, a Hugging Face tokenizer folder, "
                          "sentencepiece-unigram:SIZE or sentencepiece-bpe:SIZE.")
    return HuggingFaceTokenizer(path) if path.is_dir() else SentencePieceTokenizer(path)


def tokenizer_fingerprint(path: Path) -> str:
    """sha256 (hex) of a .model file, or of the files that define a Hugging Face tokenizer."""
    path = Path(path)
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    whole = hashlib.sha256()
    for name in _HF_DEFINING:
        if (path / name).is_file():
            whole.update(f"{name} {hashlib.sha256((path / name).read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def copy_tokenizer(path: Path, folder: Path) -> Path:
    """Copy the tokenizer into a prepared folder, as tokenizer.model or tokenizer/; return its new place."""
    if not path.is_dir():
        return Path(shutil.copyfile(path, folder / "tokenizer.model"))
    copy = folder / "tokenizer"
    copy.mkdir()
    for name in _HF_FILES:
        if (path / name).is_file():
            shutil.copyfile(path / name, copy / name)
    return copy


def _check_special(path: Path, special: dict[str, int | None], vocab_size: int) -> None:
    for name, token in special.items():
        if token is not None and not 0 <= token < vocab_size:
            raise ConfigError(f"tokenizer {path} gives its {name} token the id {token}; it must lie in "
                              f"0..{vocab_size - 1}.")


def _require_eod(path: Path, eod: int | None) -> int:
    if eod is None:
        raise ConfigError(f"tokenizer {path} has no end-of-document token; it needs an eos token, or one of "
                          f"{', '.join(_EOD_PIECES)} as a special token.")
    return eod


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
