"""Slow twins and toy vocabularies: what the fast code is measured against. Shipped, so that extensions can test too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.records import END, N_SYMBOLS
from gguf_fusion.vocabulary import Kind, Vocabulary

PathLaw = Callable[[tuple[int, ...]], F64]
"""Maps a token path to float64[n_vocab], the probabilities of the next token."""


def byte_vocabulary() -> Vocabulary:
    """256 single bytes and one END id (256)."""
    pieces = [bytes([b]) for b in range(256)] + [b"</s>"]
    return Vocabulary.from_pieces(pieces, [int(Kind.TEXT)] * 256 + [int(Kind.END)])


def nested_vocabulary() -> Vocabulary:
    """A small vocabulary with nested, overlapping and duplicate pieces over the letters a, b and c, and two END ids."""
    words = [b"a", b"b", b"c", b"ab", b"abc", b"bc", b"ca", b"abca", b"aa", b"cab", b"bb", b"a"]
    kinds = [int(k) for k in [Kind.TEXT] * len(words) + [Kind.CONTROL, Kind.UNUSED, Kind.END, Kind.END]]
    fallback = [False] * 11 + [True] + [False] * 4
    return Vocabulary.from_pieces([*words, b"<c>", b"", b"</s>", b"<e>"], kinds, None, fallback)


def enumerate_next_bytes(vocabulary: Vocabulary, law: PathLaw, path: tuple[int, ...], text: bytes) -> F64:
    """float64[257]: the exact next-symbol law after ``text``, by listing every cover. Exponential; for toys only."""
    text_ids = [int(t) for t in vocabulary.text_ids]
    end_ids = [int(t) for t in vocabulary.end_ids]

    @cache
    def probs(tokens: tuple[int, ...]) -> F64:
        p = np.zeros(vocabulary.n_vocab)
        keep = text_ids + end_ids
        p[keep] = law(tokens)[keep]
        normalised: F64 = p / p.sum()
        return normalised

    joint = np.zeros(N_SYMBOLS)

    def visit(tokens: tuple[int, ...], weight: float, rest: bytes) -> None:
        row = probs(tokens)
        if not rest:
            joint[END] += weight * row[end_ids].sum()
        for token in text_ids:
            piece = vocabulary.piece(token)
            mass = weight * row[token]
            if mass <= 0.0:
                continue
            if len(piece) <= len(rest):
                if rest.startswith(piece):
                    visit((*tokens, _first_of(vocabulary, token)), mass, rest[len(piece) :])
            elif piece.startswith(rest):
                joint[piece[len(rest)]] += mass

    visit(path, 1.0, text)
    law_after: F64 = joint / joint.sum()
    return law_after


def _first_of(vocabulary: Vocabulary, token: int) -> int:
    """The id fed back for a piece: among ids with equal bytes the one that is no byte fallback, then the lowest."""
    same = [int(t) for t in vocabulary.text_ids if vocabulary.piece(int(t)) == vocabulary.piece(token)]
    return min(same, key=lambda t: (bool(vocabulary.byte_fallback[t]), t))
