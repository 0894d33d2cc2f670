"""How two vocabularies relate: the same, in part the same, or only the same bytes; and what that means for a bridge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gguf_fusion.arrays import I32, I64
from gguf_fusion.vocabulary import Kind, Vocabulary


class Tokenizing(Protocol):
    """What is asked of an expert: its vocabulary and its tokenizer."""

    name: str
    vocabulary: Vocabulary

    def tokenize(self, text: bytes) -> I32: ...


@dataclass(frozen=True, slots=True)
class Classes:
    """Pieces of one vocabulary seen from another, for a bridge from token to token.

    exact : the other has a piece of the same bytes;  approx : it has a piece that begins it (the first piece stands for
    the whole);  unmatched : not even that
    """

    exact: int
    approx: int
    unmatched: int


@dataclass(frozen=True, slots=True)
class OnText:
    """Two tokenizations of one text. straddling : tokens of each with a border of the other strictly inside them."""

    n_bytes: int
    n_tokens: tuple[int, int]
    shared_borders: int
    straddling: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Report:
    """Two vocabularies. pieces : different text pieces of each;  shared : in both, byte for byte."""

    names: tuple[str, str]
    identical: bool
    same_ids: int
    n_vocab: tuple[int, int]
    pieces: tuple[int, int]
    shared: int
    forth: Classes
    back: Classes
    text: OnText | None

    @property
    def bridge(self) -> str:
        """Which bridge an ensemble of the two uses."""
        return "token" if self.identical else "byte"


def compare(a: Tokenizing, b: Tokenizing, text: bytes = b"") -> Report:
    """Relate two vocabularies, and their tokenizations of a text if one is given."""
    pieces_a, pieces_b = _pieces(a.vocabulary), _pieces(b.vocabulary)
    return Report(
        names=(a.name, b.name),
        identical=a.vocabulary.fingerprint == b.vocabulary.fingerprint,
        same_ids=_same_ids(a.vocabulary, b.vocabulary),
        n_vocab=(a.vocabulary.n_vocab, b.vocabulary.n_vocab),
        pieces=(len(pieces_a), len(pieces_b)),
        shared=len(pieces_a & pieces_b),
        forth=_classes(pieces_a, pieces_b),
        back=_classes(pieces_b, pieces_a),
        text=_on_text(a, b, text) if text else None,
    )


def _pieces(vocabulary: Vocabulary) -> set[bytes]:
    return {vocabulary.piece(int(token)) for token in vocabulary.text_ids}


def _same_ids(a: Vocabulary, b: Vocabulary) -> int:
    """Ids that mean the same in both: same kind, same bytes."""
    n = min(a.n_vocab, b.n_vocab)
    return sum(
        bool(a.kinds[i] == b.kinds[i]) and a.piece(i) == b.piece(i) for i in range(n) if a.kinds[i] != Kind.UNUSED
    )


def _classes(pieces: set[bytes], others: set[bytes]) -> Classes:
    exact = pieces & others
    n_approx = sum(any(piece[:n] in others for n in range(len(piece) - 1, 0, -1)) for piece in pieces - exact)
    return Classes(len(exact), n_approx, len(pieces) - len(exact) - n_approx)


def _on_text(a: Tokenizing, b: Tokenizing, text: bytes) -> OnText:
    ends = [_ends(expert, text) for expert in (a, b)]
    return OnText(
        n_bytes=len(text),
        n_tokens=(len(ends[0]), len(ends[1])),
        shared_borders=len(np.intersect1d(ends[0], ends[1])),
        straddling=(_straddling(ends[0], ends[1]), _straddling(ends[1], ends[0])),
    )


def _ends(expert: Tokenizing, text: bytes) -> I64:
    ids = expert.tokenize(text)
    starts = expert.vocabulary.piece_start
    ends: I64 = np.cumsum(starts[ids + 1] - starts[ids], dtype=np.int64)
    return ends


def _straddling(ends: I64, others: I64) -> int:
    """Tokens (by their ends) with a border of the other tokenization strictly inside."""
    starts = np.concatenate([[0], ends[:-1]])
    first_inside = np.searchsorted(others, starts, side="right")
    inside = first_inside < len(others)
    return int((others[np.minimum(first_inside, len(others) - 1)] < ends)[inside].sum())


def pairs(experts: Sequence[Tokenizing]) -> list[tuple[Tokenizing, Tokenizing]]:
    """Every two of them, in order."""
    return [(one, other) for i, one in enumerate(experts) for other in experts[i + 1 :]]
