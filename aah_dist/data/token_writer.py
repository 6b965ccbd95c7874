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
    """PREFIX.bin and PREFIX.idx, through Megatron's own builder; counts what passes.

    token_counts: int64 [vocab_size], how often each token was written.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._prefix = prefix
        self._builder = load_builder()(f"{prefix}.bin", dtype=token_dtype(vocab_size))
        self.documents = 0
        self.token_counts = np.zeros(vocab_size, dtype=np.int64)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: tokens [sum of lengths] one after the other, lengths int64 [documents]."""
        if not len(lengths):
            return
        first = len(self._builder.sequence_lengths)
        self._builder.add_document(tokens, lengths.tolist())
        # The builder took them for one document of many sequences; each is a document.
        self._builder.document_indices[-1:] = range(first + 1, first + 1 + len(lengths))
        self.documents += len(lengths)
        self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))

    def finish(self) -> None:
        self._builder.finalize(f"{self._prefix}.idx")

    @property
    def tokens(self) -> int:
        return int(self.token_counts.sum())

    def unigram_entropy(self) -> float:
        """-sum p ln p in nats, p the written tokens' own distribution."""
        p = self.token_counts[self.token_counts > 0] / self.tokens
        return float(-(p * np.log(p)).sum())
