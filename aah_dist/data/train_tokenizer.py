"""Training a sentencepiece model on a bounded sample of the text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from aah_dist.config.schema import ConfigError

SAMPLE_CHARACTERS = 2_000_000
# No document makes up more than this share of a full sample.
DOCUMENT_CHARACTERS = SAMPLE_CHARACTERS // 20
# sentencepiece passes over sentences longer than 4192 bytes; a character has at most 4.
_SENTENCE_CHARACTERS = 1024
# 256 bytes, unknown, end of document, and some pieces.
_SMALLEST_VOCABULARY = 300
EOD_PIECE = "<|endoftext|>"


def parse_spec(tokenizer: str) -> tuple[str, int] | None:
    """("unigram" or "bpe", vocabulary size) of sentencepiece-unigram:SIZE or sentencepiece-bpe:SIZE; else None.

    Raises ConfigError for a spec of that shape that names no such model.
    """
    if not tokenizer.startswith("sentencepiece-"):
        return None
    match = re.fullmatch(r"sentencepiece-(unigram|bpe):(\d+)", tokenizer)
    if not match or int(match[2]) < _SMALLEST_VOCABULARY:
        raise ConfigError(f"tokenizer {tokenizer!r} is not sentencepiece-unigram:SIZE or sentencepiece-bpe:SIZE with a "
                          f"SIZE of at least {_SMALLEST_VOCABULARY}.")
    return match[1], int(match[2])


def sample_documents(characters: np.ndarray, keys: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """bool [documents]: the allowed documents, by descending key, whose first DOCUMENT_CHARACTERS fill the sample."""
    order = np.argsort(keys, kind="stable")[::-1]
    order = order[allowed[order]]
    filled = np.cumsum(np.minimum(characters[order], DOCUMENT_CHARACTERS))
    chosen = np.zeros(len(keys), dtype=bool)
    chosen[order[:1 + np.searchsorted(filled, SAMPLE_CHARACTERS)]] = True
    return chosen


def train_sentencepiece(documents: Iterable[str], model_type: str, vocab_size: int, path: Path) -> None:
    """Write a lossless (no normalisation, byte fallback) sentencepiece model with an end-of-document control symbol.

    Raises ConfigError where the text cannot fill the vocabulary or needs more.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(documents), model_writer=model, model_type=model_type, vocab_size=vocab_size,
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, allow_whitespace_only_pieces=True, split_digits=True,
            unk_id=0, eos_id=1, eos_piece=EOD_PIECE, bos_id=-1, pad_id=-1,
            num_threads=1,  # the sums of the EM steps, hence the model, depend on the number of threads
            minloglevel=2)
    except RuntimeError as error:
        limit = re.search(r"<= (\d+)", str(error))
        raise ConfigError(f"tokenizer sentencepiece-{model_type}:{vocab_size} does not fit this text; "
                          + (f"the text fills a vocabulary of at most {limit[1]}." if limit else
                             f"sentencepiece says: {str(error).strip().splitlines()[0]}")) from error
    path.write_bytes(model.getvalue())
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = {name: getattr(trained, f"{name}_id")() for name in ("unk", "eos", "bos", "pad")}
    if ids != {"unk": 0, "eos": 1, "bos": -1, "pad": -1} or not trained.is_control(1):
        raise RuntimeError(f"sentencepiece placed its special tokens at {ids}")


def _sentences(documents: Iterable[str]) -> Iterable[str]:
    for document in documents:
        for line in document.split("\n"):
            for start in range(0, len(line), _SENTENCE_CHARACTERS):
                yield line[start:start + _SENTENCE_CHARACTERS]
