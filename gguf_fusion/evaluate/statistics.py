"""Statistics over documents, the unit that is independent: intervals, tests, and how well a law knows itself.

Everywhere ``ours`` and ``theirs`` are float64[n_documents], bits of two ways to predict the same documents, in the same
order; ``n_bytes`` float64[n_documents] their scored bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gguf_fusion.arrays import F32, F64, Bool

N_RESAMPLES = 10_000
_N_BINS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How much fewer bits we need: relative to theirs, and in bits per byte, with 95 % intervals."""

    relative: float
    relative_low: float
    relative_high: float
    bits_per_byte: float
    bits_per_byte_low: float
    bits_per_byte_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """``ece``: mean |accuracy - confidence| over bins of equal mass; ``brier``: mean Σ_s (f(s) - 1[s = x])²."""

    ece: float
    brier: float
    accuracy: float


def bootstrap_gain(
    ours: F64,
    theirs: F64,
    n_bytes: F64,
    domains: Sequence[str] | None = None,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Gain:
    """Paired bootstrap over documents, stratified by domain, of 1 - Σ ours / Σ theirs and Σ (theirs - ours) / Σ bytes.

    Each resample draws as many documents of every domain as there are; percentile interval. Where a domain has one
    document only, which would be drawn every time as if it were certain, documents are drawn regardless of domains.
    With fewer than two documents there is no interval (NaN).
    """
    columns = np.stack([ours, theirs, n_bytes]).astype(np.float64)
    if len(ours) == 0:
        raise ValueError("expected at least one document, got none")
    sums = columns.sum(axis=1)
    if len(ours) < 2:
        low = high = np.full(2, np.nan)
    else:
        rng = np.random.default_rng(seed)
        drawn = np.zeros((n_resamples, 3))
        groups = np.array(domains if domains is not None else [""] * len(ours))
        if np.unique(groups, return_counts=True)[1].min() < 2:
            groups = np.full(len(ours), "")
        for domain in dict.fromkeys(groups.tolist()):
            mine = columns[:, groups == domain]
            n = mine.shape[1]
            # How often each document is drawn: one multinomial row per resample.
            drawn += rng.multinomial(n, np.full(n, 1.0 / n), size=n_resamples) @ mine.T
        low, high = np.percentile(_gains(drawn.T), [2.5, 97.5], axis=1)
    relative, bits_per_byte = _gains(sums)
    return Gain(
        relative=float(relative),
        relative_low=float(low[0]),
        relative_high=float(high[0]),
        bits_per_byte=float(bits_per_byte),
        bits_per_byte_low=float(low[1]),
        bits_per_byte_high=float(high[1]),
    )


def _gains(sums: F64) -> F64:
    """(relative gain, gain in bits per byte) from sums (ours, theirs, bytes) along the first axis."""
    ours, theirs, n_bytes = sums
    gains: F64 = np.stack([1.0 - ours / theirs, (theirs - ours) / n_bytes])
    return gains


def sign_flip(ours: F64, theirs: F64, *, n_resamples: int = N_RESAMPLES, seed: int = 0) -> float:
    """Two-sided p of Σ (theirs - ours) when each document's difference might as well have the other sign.

    p = (1 + number of flips at least as extreme) / (1 + number of flips).
    """
    differences = np.asarray(theirs, np.float64) - np.asarray(ours, np.float64)
    observed = abs(float(differences.sum()))
    rng = np.random.default_rng(seed)
    extreme, left = 0, n_resamples
    while left:
        n = min(left, 1000)
        signs = rng.integers(0, 2, size=(n, len(differences))) * 2.0 - 1.0
        # A flip that only reorders the sum is as extreme as what was seen, whatever the last bit says.
        extreme += int(np.count_nonzero(np.abs(signs @ differences) >= observed * (1.0 - 1e-12)))
        left -= n
    return (1.0 + extreme) / (1.0 + n_resamples)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of several comparisons (Holm 1979), in the given order."""
    m = len(p_values)
    adjusted = [0.0] * m
    worst = 0.0
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted


def win_rate(ours: F64, theirs: F64) -> tuple[float, float]:
    """(share of documents where we need fewer bits, share of ties)."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return float(np.mean(ours < theirs)), float(np.mean(ours == theirs))


def regret(ours: F64, experts: F64) -> F64:
    """float64[n_documents]: our bits minus those of the best of ``experts``, float64[n_experts, n_documents]."""
    bits: F64 = np.asarray(ours, np.float64) - np.asarray(experts, np.float64).min(axis=0)
    return bits


def calibration(confidence: F32, correct: Bool, brier: F32) -> Calibration:
    """From the largest probability of each law, whether that symbol came, and each law's Brier score; equal bins."""
    n = len(confidence)
    if not n:
        return Calibration(ece=float("nan"), brier=float("nan"), accuracy=float("nan"))
    sure, right, sizes = reliability(confidence, correct)
    ece = float((sizes / n * np.abs(right - sure)).sum())
    return Calibration(ece=ece, brier=float(brier.mean(dtype=np.float64)), accuracy=float(correct.mean()))


def reliability(confidence: F32, correct: Bool) -> tuple[F64, F64, F64]:
    """(mean confidence, share correct, number of symbols), float64[n_bins] each: at most 15 bins of equal mass."""
    order = np.argsort(confidence, kind="stable")
    bins = np.array_split(order, min(_N_BINS, max(1, len(order))))
    sure = np.array([confidence[members].mean(dtype=np.float64) for members in bins])
    right = np.array([correct[members].mean(dtype=np.float64) for members in bins])
    return sure, right, np.array([len(members) for members in bins], np.float64)
