"""Ghosts: boundaries that were not worth a decode, and the law that stands in for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.records import END, N_SYMBOLS

_PRIOR = 1.0
"""Weight of the general word-start law in each per-byte law, in evaluated boundaries."""

_LN2 = 0.6931471805599453
_N_KINDS = 6
_N_SHARES = 7
_PRIOR_BITS = 2.0
_PRIOR_COUNT = 2.0

FLOOR = 1e-3
"""Share of the uniform law in a stand-in: no symbol is ever impossible."""


def fill(probs: F64, shares: F64, weights: F64, stand_ins: F64, alone: Callable[[int], F64]) -> None:
    """Add to each expert's law, on the share of its ghosts, what the others' evaluated laws say.

    probs : float64[n, n_symbols], evaluated laws (row i sums to 1 - shares[i]); afterwards every row sums to 1
    shares, weights : float64[n]
    stand_ins : float64[n, n_symbols], receives the laws that stood in

    The stand-in law of expert i is sum over j != i of w_j p_j, normalised, with a small uniform floor: the expert
    abstains on this share. Without others, or where they know nothing, ``alone(i)`` (float64[n_symbols]) names one.
    """
    np.matmul((1.0 - np.eye(len(weights))) * weights, probs, out=stand_ins)
    masses = stand_ins.sum(axis=1)
    for i, mass in enumerate(masses):
        if mass > FLOOR:
            stand_ins[i] *= (1.0 - FLOOR) / mass
            stand_ins[i] += FLOOR / probs.shape[1]
        else:
            stand_ins[i] = alone(i)
    probs += shares[:, None] * stand_ins


class WordStarts:
    """What an expert expects first at a fresh boundary, learned from the boundaries it did evaluate.

    One running mean of first-symbol laws per last byte of the text, backed by a general one. Each evaluated boundary
    contributes a whole law, so a few dozen are enough to say that a blank follows a word.
    """

    __slots__ = ("_by_byte", "_general")

    def __init__(self, start: F64) -> None:
        """``start``: float64[257], sum 1, the law before anything was seen (piece starts of the vocabulary)."""
        self._general = start.copy()
        self._by_byte = np.zeros((N_SYMBOLS, N_SYMBOLS))

    def learn(self, last: int, law: F64) -> None:
        """Add the first-symbol law (float64[257], sum 1) of a boundary after byte ``last`` (END: nothing before)."""
        self._general += law
        self._by_byte[last] += law

    def expect(self, last: int) -> F64:
        """float64[257], sum 1: the expected first-symbol law after byte ``last``."""
        law: F64 = self._by_byte[last] + self._general * (_PRIOR / self._general.sum())
        law *= (1.0 - FLOOR) / law.sum()
        law += FLOOR / N_SYMBOLS
        return law

    def copy(self) -> WordStarts:
        """An independent copy."""
        twin = WordStarts(self._general)
        twin._by_byte = self._by_byte.copy()
        return twin


class Surprise:
    """How many bits a stand-in usually loses at a fresh boundary, by kind of last byte and by the boundary's share.

    Where a word ends (a large share, a letter before) the first byte is easily foreseen; where a word might have
    been cut (a small share) it is not. Running means of KL(true law || stand-in), started at a cautious value.
    """

    __slots__ = ("_count", "_total")

    def __init__(self) -> None:
        self._total = np.full((_N_KINDS, _N_SHARES), _PRIOR_BITS * _PRIOR_COUNT)
        self._count = np.full((_N_KINDS, _N_SHARES), _PRIOR_COUNT)

    def learn(self, last: int, log_share: float, law: F64, stand_in: F64) -> None:
        """Add one evaluated boundary with its true first-symbol law and the stand-in it would have had."""
        key = _kind(last), _bucket(log_share)
        mass = law > 0.0
        self._total[key] += float(np.sum(law[mass] * np.log2(law[mass] / stand_in[mass])))
        self._count[key] += 1.0

    def expect(self, last: int, log_share: float) -> float:
        """Expected loss in bits of leaving a boundary after byte ``last`` with this share to its stand-in."""
        key = _kind(last), _bucket(log_share)
        return float(self._total[key] / self._count[key])

    def copy(self) -> Surprise:
        """An independent copy."""
        twin = Surprise()
        twin._total, twin._count = self._total.copy(), self._count.copy()
        return twin


def _kind(byte: int) -> int:
    """Blank, line end, digit, letter, part of a longer character, other sign (or nothing at all)."""
    if byte == 0x20:
        return 0
    if byte < END and byte in b"\t\n\r":
        return 1
    if byte < END and byte in b"0123456789":
        return 2
    if 0x80 <= byte < END:
        return 4
    return 3 if byte < END and chr(byte).isalpha() else 5


def _bucket(log_share: float) -> int:
    """Number of halvings of the share, at most the last bucket."""
    return min(_N_SHARES - 1, max(0, int(-log_share / _LN2)))


def piece_starts(first_start: np.ndarray) -> F64:
    """float64[257]: how many pieces start with each byte, normalised: what to expect before any evaluation."""
    law = np.zeros(N_SYMBOLS)
    law[:END] = np.diff(first_start)
    law += 1.0
    normalised: F64 = law / law.sum()
    return normalised
