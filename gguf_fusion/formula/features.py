"""What a gate may look at before a symbol comes: the experts' laws and the symbol before."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gguf_fusion.arrays import F64, I64


@dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive steps of one text.

    laws   : float64[n_steps, n_experts, n_symbols], natural logs, each row normalised
    before : int64[n_steps], the symbol before each step (n_symbols - 1 where there is none)
    came   : int64[n_steps], the symbol that came at each step; None for one step that is still open
    partial: only the symbol that came is known: laws is float64[n_steps, n_experts, 1]
    """

    laws: F64
    before: I64
    came: I64 | None
    partial: bool = False


def _entropies(steps: Steps) -> F64:
    """float64[m, n_experts] in bits."""
    finite = np.where(np.isneginf(steps.laws), 0.0, steps.laws)
    bits: F64 = -(np.exp(steps.laws) * finite).sum(axis=2) / math.log(2.0)
    return bits


def _divergence(steps: Steps) -> F64:
    """Jensen-Shannon divergence of the experts with equal weights, in bits."""
    mean = np.exp(steps.laws).mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -np.where(mean > 0.0, mean * np.log2(mean), 0.0).sum(axis=1)
    gap: F64 = bits - _entropies(steps).mean(axis=1)
    return gap


def _inside_word(steps: Steps) -> F64:
    """1 where the byte before is a letter, a digit or part of a longer character, else 0."""
    before = steps.before
    letter = ((before | 32) >= ord("a")) & ((before | 32) <= ord("z")) & (before < 128)
    digit = (before >= ord("0")) & (before <= ord("9"))
    longer = (before >= 128) & (before < steps.laws.shape[2] - 1)
    inside: F64 = (letter | digit | longer).astype(np.float64)
    return inside


FEATURES: dict[str, Callable[[Steps], F64]] = {
    "entropy": lambda steps: _entropies(steps).mean(axis=1),
    "confidence": lambda steps: np.exp(steps.laws.max(axis=(1, 2))),
    "divergence": _divergence,
    "inside_word": _inside_word,
}
"""float64[n_steps] of what is known before a symbol: mean entropy in bits, largest probability, disagreement, place."""
