"""Ghosts: boundaries that were not worth a decode, and the laws that stand in for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.kernels.standins import FLOOR, N_KINDS, N_SHARES, Learned, abstain, add_shares
from gguf_fusion.records import END, N_SYMBOLS

__all__ = ["FLOOR", "fill", "nothing_learned"]

_PRIOR_BITS = 2.0
_PRIOR_COUNT = 2.0


def fill(probs: F64, shares: F64, weights: F64, stand_ins: F64, alone: Callable[[int], F64]) -> None:
    """Add to each expert's law, on the share of its ghosts, what the others' evaluated laws say.

    probs : float64[n, n_symbols], evaluated laws (row i sums to 1 - shares[i]); afterwards every row sums to 1
    shares, weights : float64[n]
    stand_ins : float64[n, n_symbols], receives the laws that stood in

    The stand-in law of expert i is sum over j != i of w_j p_j, normalised, with a small uniform floor: the expert
    abstains on this share. Without others, or where they know nothing, ``alone(i)`` (float64[n_symbols]) names one.
    """
    for i in abstain(probs, shares, weights, stand_ins):
        stand_ins[i] = alone(i)
    add_shares(probs, shares, stand_ins)


def nothing_learned(first_start: np.ndarray) -> Learned:
    """What is known of boundaries before any was evaluated.

    First symbols as often as pieces of the vocabulary begin with them (``first_start``: int32[257], of the byte
    tables), and a cautious loss of stand-ins.
    """
    law = np.ones(N_SYMBOLS)
    law[:END] += np.diff(first_start)
    return Learned(
        law / law.sum(),
        np.zeros((N_SYMBOLS, N_SYMBOLS)),
        np.full((N_KINDS, N_SHARES), _PRIOR_BITS * _PRIOR_COUNT),
        np.full((N_KINDS, N_SHARES), _PRIOR_COUNT),
    )
