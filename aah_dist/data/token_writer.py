"""Writing a split in Megatron's IndexedDataset format."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np


def token_dtype(vocab_size: int) -> type:
    """The integer type Megatron's readers expect for a vocabulary of this size."""
    return np.uint16 if vocab_size < 65500 else np.int32


def load_builder() -> type:
    """Megatron's IndexedDatasetBuilder; the first call imports megatron.core and torch, several seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron reports optional packages that writing tokens does not need
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    return IndexedDatasetBuilder


class TokenWriter:
    """PREFIX.bin and PREFIX.idx, through Megatron's own builder.

    documents, tokens: how many were written. vocab_size: of the tokens, for their type and their distribution.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._prefix = prefix
        self._builder = load_builder()(f"{prefix}.bin", dtype=token_dtype(vocab_size))
        self._vocab_size = vocab_size
        self.documents = self.tokens = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: tokens [sum of lengths] one after the other, lengths int64 [documents]."""
        if not len(lengths):
            return
        first = len(self._builder.sequence_lengths)
        self._builder.add_document(tokens, lengths.tolist())
        # The builder took them for one document of many sequences; each is a document.
        self._builder.document_indices[-1:] = range(first + 1, first + 1 + len(lengths))
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def finish(self) -> None:
        self._builder.finalize(f"{self._prefix}.idx")

    def unigram_entropy(self) -> float:
        """-sum p ln p in nats, p the written tokens' own distribution; after finish."""
        written = np.memmap(f"{self._prefix}.bin", dtype=token_dtype(self._vocab_size), mode="r")
        counts = np.bincount(written, minlength=self._vocab_size)
        p = counts[counts > 0] / self.tokens
        return float(-(p * np.log(p)).sum())
