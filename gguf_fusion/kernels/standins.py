"""What is expected at a boundary that was not evaluated, learned from those that were."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gguf_fusion.arrays import F64, U8, check_array
from gguf_fusion.kernels._jit import kernel

N = 257
"""Symbols: 256 bytes and END; as a last byte END means that nothing comes before."""

FLOOR = 1e-3
"""Share of the uniform law in a stand-in: no symbol is ever impossible."""

_PRIOR = 1.0
"""Weight of the general word-start law in each per-byte law, in evaluated boundaries."""

N_KINDS, N_SHARES = 6, 7
_LN2 = 0.6931471805599453


class Learned(NamedTuple):
    """What evaluated boundaries of one text taught.

    general : float64[257], sum of first-symbol laws;  by_byte : float64[257, 257], the same per last byte
    bits, times : float64[6, 7], what a stand-in lost in all, and how often, by kind of last byte and halvings of the
    boundary's share. Where a word ends (a large share, a letter before) the first byte is easily foreseen; where a word
    might have been cut (a small share) it is not.
    """

    general: F64
    by_byte: F64
    bits: F64
    times: F64


@kernel
def last_byte(text: U8, position: int) -> int:
    """The byte before ``position``, or END."""
    return int(text[position - 1]) if position else N - 1


@kernel
def _kind(byte: int) -> int:
    """Blank, line end, digit, letter, part of a longer character, other sign (or nothing at all)."""
    if byte == 0x20:
        return 0
    if byte in (0x09, 0x0A, 0x0D):
        return 1
    if 0x30 <= byte <= 0x39:
        return 2
    if 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A:
        return 3
    return 4 if 0x80 <= byte < N - 1 else 5


@kernel
def _halvings(log_share: float) -> int:
    return min(N_SHARES - 1, max(0, int(min(-log_share, 99.0) / _LN2)))


@kernel
def expected_bits(learned: Learned, last: int, log_share: float) -> float:
    """Expected loss in bits of leaving a boundary after byte ``last`` with this share to its stand-in."""
    kind, share = _kind(last), _halvings(log_share)
    return float(learned.bits[kind, share] / learned.times[kind, share])


@kernel
def expect(learned: Learned, last: int, out: F64) -> None:
    """Write to float64[257], sum 1, the expected first-symbol law after byte ``last``.

    One running mean of first-symbol laws per last byte, backed by the general one. Each evaluated boundary contributes
    a whole law, so a few dozen are enough to say that a blank follows a word.
    """
    out[:] = learned.by_byte[last] + learned.general * (_PRIOR / learned.general.sum())
    out *= (1.0 - FLOOR) / out.sum()
    out += FLOOR / N


@kernel
def learn(learned: Learned, last: int, log_share: float, law: F64) -> None:
    """Remember a boundary's first-symbol law (float64[257], sum 1) after ``last``, and how well it was foreseen."""
    stand_in = np.empty(N)
    expect(learned, last, stand_in)
    lost = 0.0
    for symbol in range(N):
        if law[symbol] > 0.0:
            lost += law[symbol] * np.log2(law[symbol] / stand_in[symbol])
    kind, share = _kind(last), _halvings(log_share)
    learned.bits[kind, share] += lost
    learned.times[kind, share] += 1.0
    learned.general[:] += law
    learned.by_byte[last] += law


@kernel
def stand_in_alone(learned: Learned, last: int, probs: F64, out: F64) -> None:
    """Write to float64[257], sum 1: half what usually follows a fresh boundary, half what the evaluated covers say.

    The first is right where a word ends, the second where a word goes on in another segmentation; flattened, since
    another segmentation is the likelier the less the evaluated ones foresee.
    """
    expect(learned, last, out)
    mass = np.sqrt(probs).sum()
    if mass > 0.0:
        out *= 0.5
        out += np.sqrt(probs) * (0.5 / mass)


@kernel
def _abstain(probs: F64, shares: F64, weights: F64, stand_ins: F64) -> int:
    """Stand-ins from the others; returns a bit mask of the experts whose others know nothing."""
    n, n_symbols = probs.shape
    lacking = 0
    for i in range(n):
        row = stand_ins[i]
        row[:] = 0.0
        for j in range(n):
            if j != i and weights[j] > 0.0:
                row += weights[j] * probs[j]
        mass = row.sum()
        if mass > FLOOR:
            row *= (1.0 - FLOOR) / mass
            row += FLOOR / n_symbols
        else:
            lacking |= 1 << i
    return lacking


@kernel
def _add_shares(probs: F64, shares: F64, stand_ins: F64) -> None:
    for i in range(len(probs)):
        probs[i] += shares[i] * stand_ins[i]


def abstain(probs: F64, shares: F64, weights: F64, stand_ins: F64) -> list[int]:
    """Write to each row of ``stand_ins`` what the others' evaluated laws say; returns the rows where they say nothing.

    probs, stand_ins : float64[n, n_symbols];  shares, weights : float64[n]
    """
    n = len(probs)
    check_array("probs", probs, np.float64, (n, None))
    check_array("stand_ins", stand_ins, np.float64, probs.shape)
    check_array("shares", shares, np.float64, (n,))
    check_array("weights", weights, np.float64, (n,))
    lacking = _abstain(probs, shares, weights, stand_ins)
    return [i for i in range(n) if lacking >> i & 1] if lacking else []


def add_shares(probs: F64, shares: F64, stand_ins: F64) -> None:
    """probs[i] += shares[i] · stand_ins[i], in place; arrays as in ``abstain``."""
    _add_shares(probs, shares, stand_ins)
