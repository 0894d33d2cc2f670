"""What can be said about one step: the likeliest symbols, disagreement, entropies, who was responsible."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Insight:
    """What one step, or several, tell about the experts; means over the steps, in bits where not said otherwise.

    kl         : float64[n, n], KL(p_i || p_j); infinite where j rules out what i allows
    jsd        : Jensen-Shannon divergence under the step's weights
    entropies  : float64[n] of the experts;  entropy : of the fused law, untruncated
    gain       : log2 f(x) - log2 p_lead(x) of the symbol that came, lead = the expert of largest base weight
    agreement  : share of steps at which all experts have the same first choice
    route      : the expert that carried most;  n : number of steps
    """

    kl: F64
    jsd: float
    entropies: F64
    entropy: float
    gain: float
    agreement: float
    route: int
    n: int = 1


def of_step(logprobs: F64, log_f: F64, weights: F64, responsibility: F64, symbol: int, lead: int) -> Insight:
    """Insight of one step. logprobs : float64[n, n_symbols];  log_f : float64[n_symbols], both natural logs."""
    probs = np.exp(logprobs)
    first = logprobs.argmax(axis=1)
    with np.errstate(invalid="ignore"):
        gain = float((log_f[symbol] - logprobs[lead, symbol]) / _LN2)
    return Insight(
        kl=_kl_pairs(probs, logprobs),
        jsd=divergence(probs, weights) / _LN2,
        entropies=np.array([_entropy(row) for row in probs]) / _LN2,
        entropy=_entropy(np.exp(log_f)) / _LN2,
        gain=gain,
        agreement=float((first == first[0]).all()),
        route=int(responsibility.argmax()),
    )


def mean(parts: list[Insight]) -> Insight | None:
    """The mean of several steps; ``gain`` is their sum, ``route`` whoever carried most of them."""
    if not parts:
        return None
    routes = [part.route for part in parts]
    return Insight(
        kl=np.mean([part.kl for part in parts], axis=0),
        jsd=float(np.mean([part.jsd for part in parts])),
        entropies=np.mean([part.entropies for part in parts], axis=0),
        entropy=float(np.mean([part.entropy for part in parts])),
        gain=float(np.sum([part.gain for part in parts])),
        agreement=float(np.mean([part.agreement for part in parts])),
        route=max(sorted(set(routes)), key=routes.count),
        n=len(parts),
    )


def _kl_pairs(probs: F64, logprobs: F64) -> F64:
    n = len(probs)
    pairs = np.zeros((n, n))
    for i in range(n):
        mass = probs[i] > 0.0
        for j in range(n):
            if i != j:
                pairs[i, j] = float(probs[i, mass] @ (logprobs[i, mass] - logprobs[j, mass])) / _LN2
    return np.maximum(pairs, 0.0)
