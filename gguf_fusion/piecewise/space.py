"""The pieces of several vocabularies in one list: what laws over a next piece are written on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from gguf_fusion.arrays import F32, F64, I32, I64
from gguf_fusion.errors import ExpertFailedError
from gguf_fusion.vocabulary import Kind, Vocabulary


class Speller(Protocol):
    """What is asked of an expert here: its vocabulary and its tokenizer."""

    name: str
    vocabulary: Vocabulary

    def tokenize(self, text: bytes) -> I32: ...


class PieceSpace:
    """All different pieces of some experts, and END as the last entry.

    pieces : the bytes of each entry but END, in the order of the bytes
    of     : per expert int64[n_vocab], the entry of every id; ``dropped`` for ids that are neither text nor END
    """

    def __init__(self, experts: Sequence[Speller]) -> None:
        texts = [
            {int(token): expert.vocabulary.piece(int(token)) for token in expert.vocabulary.text_ids}
            for expert in experts
        ]
        self.experts = list(experts)
        self.pieces = sorted(set().union(*(text.values() for text in texts)))
        self.entry = {piece: i for i, piece in enumerate(self.pieces)}
        self.end = len(self.pieces)
        self.n = self.end + 1
        self.dropped = self.n
        self.of = [self._entries(expert.vocabulary, text) for expert, text in zip(experts, texts, strict=True)]

    def _entries(self, vocabulary: Vocabulary, text: dict[int, bytes]) -> I64:
        found = np.full(vocabulary.n_vocab, self.dropped, np.int64)
        found[vocabulary.end_ids] = self.end
        for token, piece in text.items():
            found[token] = self.entry[piece]
        return found

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.pieces))

    def agreeing(self, rest: bytes) -> list[int]:
        """Entries that may come next if ``rest`` is what the text still has to say: beginnings of it, or beyond it."""
        return [*self._beginnings(rest), *self._beyond(rest)]

    def _beginnings(self, rest: bytes) -> Iterator[int]:
        for n in range(1, min(self._longest, len(rest)) + 1):
            entry = self.entry.get(rest[:n])
            if entry is not None:
                yield entry

    def _beyond(self, rest: bytes) -> Iterator[int]:
        if len(rest) < self._longest:
            for i in range(bisect_right(self.pieces, rest), self.end):
                if not self.pieces[i].startswith(rest):
                    return
                yield i

    def collected(self, i: int, masses: F64, to: I64 | None = None) -> F64:
        """float64[n], sum 1: masses of the ids of expert ``i`` by entry (``to``: another map); the dropped are lost."""
        law: F64 = np.bincount(self.of[i] if to is None else to, masses, self.n + 1)[: self.n].astype(np.float64)
        law /= float(law.sum())
        return law


def token_masses(expert: Speller, logits: F32) -> F64:
    """float64[n_vocab], sum 1: softmax over text and END ids, 0 elsewhere.

    Raises ExpertFailedError for NaN or infinite logits.
    """
    kinds = expert.vocabulary.kinds
    row = np.where((kinds == Kind.TEXT) | (kinds == Kind.END), logits.astype(np.float64), -np.inf)
    top = float(row.max())
    if not np.isfinite(top):
        raise ExpertFailedError(expert.name, "expected finite logits, got NaN or infinite ones")
    masses: F64 = np.exp(row - top)
    return masses / float(masses.sum())
