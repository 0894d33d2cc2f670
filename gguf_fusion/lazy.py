"""Lazy experts: drawing a symbol before the slowest expert has spoken, where its vote cannot change the symbol.

Under a linear pool with weights that are known beforehand, the laws of the other experts leave a share ``slack`` of the
fused law open: f(s) = low(s) + q(s) with q >= 0 and sum q = slack. Greedy: the first symbol wins whatever q is when its
lead exceeds the slack. Sampling: the random number is drawn once and shared; the symbol is decided when the number
falls into the symbol's interval for every q. What was decided is exactly what would have been drawn; the lazy expert
reads the same text later, several tokens in one batch.

Log-linear pools and power means leave nothing decided: one expert that excludes a symbol outvotes all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.sampling import Sampler

_MARGIN = 1e-9
"""Kept clear of rounding: sums here and in the sampler add in different orders."""

MOST = 24
"""Bytes that an expert may lag behind."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """One symbol that was drawn without the lazy expert: what is needed to let it catch up as if nothing was.

    probs  : float64[n_experts, n_symbols], evaluated laws before stand-ins; the lazy expert's row is filled in later
    shares : float64[n_experts], shares of ghosts; weights: float64[n_experts], those that stand-ins are mixed with
    """

    probs: F64
    shares: F64
    weights: F64
    symbol: int


def decided(sampler: Sampler, low: F64, slack: float) -> int | None:
    """The symbol that ``sampler`` will draw from any law low + q, q >= 0, sum q <= slack; None if it depends on q."""
    factors = sampler.factors()
    if factors is None:
        return None
    sure = low * factors
    more = slack * float(factors.max())
    if sampler.params.greedy:
        return _leader(sure, factors, slack)
    return _interval(sure, more, 1.0 / sampler.params.temperature, sampler.params.min_p, sampler.peek())


def _leader(sure: F64, factors: F64, slack: float) -> int | None:
    first = int(np.argmax(sure))
    rivals = sure + slack * factors
    rivals[first] = 0.0
    return first if sure[first] > float(rivals.max()) + _MARGIN else None


def _interval(sure: F64, more: float, power: float, min_p: float, draw: float) -> int | None:
    """The symbol whose interval holds ``draw`` for every way to add ``more`` to ``sure`` (power >= 1).

    x^power is convex, so what is added counts most on the largest symbol of a set; symbols below the min-p threshold
    that it lifts over it count together at most as one symbol of their summed mass (superadditivity).
    """
    mass = sure**power
    top = float(sure.max())
    kept = mass >= min_p * (top + more) ** power
    maybe = mass >= min_p * top**power
    low = np.where(kept, mass, 0.0)
    first = int(np.searchsorted(np.cumsum(low), draw * low.sum(), side="right"))
    if first >= len(sure) or not kept[first]:
        return None
    most = np.where(maybe, mass, 0.0)
    gain = np.where(maybe, (sure + more) ** power - mass, 0.0)
    below = np.where(maybe, 0.0, sure)

    def bounds(part: slice) -> tuple[float, float]:
        if not len(sure[part]):
            return 0.0, 0.0
        lifted = (float(below[part].sum()) + more) ** power
        return float(low[part].sum()), float(most[part].sum()) + float(gain[part].max()) + lifted

    before_low, before_high = bounds(slice(0, first))
    after_low, after_high = bounds(slice(first + 1, len(sure)))
    own = float(mass[first])
    begins = draw * (before_high + own + after_low) >= before_high * (1.0 + _MARGIN)
    ends = draw * (before_low + own + after_high) < (before_low + own) * (1.0 - _MARGIN)
    return first if begins and ends else None
