"""What can be said about one step: the likeliest symbols, disagreement, entropies, who was responsible."""

from __future__ import annotations

import numpy as np

from gguf_fusion.arrays import F64

_LN2 = float(np.log(2.0))


def best(log_f: F64, n: int) -> tuple[tuple[int, float], ...]:
    """The ``n`` most probable symbols of float64[n_symbols] with their ln f, best first; of equals the lower first."""
    if n <= 0:
        return ()
    n = min(n, len(log_f))
    least = np.partition(log_f, -n)[-n]
    candidates = np.flatnonzero(log_f >= least)
    order = candidates[np.argsort(-log_f[candidates], kind="stable")][:n]
    return tuple(zip(order.tolist(), log_f[order].tolist(), strict=True))


def divergence(probs: F64, weights: F64) -> float:
    """Jensen-Shannon divergence Σ w_i KL(p_i || Σ w_j p_j) of float64[n, n_symbols] laws, in nats (Lin 1991).

    0 where all laws with weight are the same, at most the entropy of the weights.
    """
    return max(0.0, _entropy(weights @ probs) - float(weights @ [_entropy(row) for row in probs]))


def _entropy(law: F64) -> float:
    mass = law[law > 0.0]
    return -float(mass @ np.log(mass))
