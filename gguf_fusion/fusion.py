"""Pools: how the experts' laws become one law. Adding a pool is one decorated function; the laws test the registry.

A pool gets log-probabilities float64[n_active, n_symbols] and weights float64[n_active] (all > 0, sum 1) and returns
log f float64[n_symbols] up to a constant: normalising is done once, by ``normalised``. -inf is a probability of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from gguf_fusion.arrays import F64

PoolFunction = Callable[..., F64]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number with a default and the closed interval it must lie in."""

    default: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Pool:
    """A registered pool: its function, formula, parameters and source."""

    name: str
    function: PoolFunction
    formula: str
    source: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


POOLS: dict[str, Pool] = {}


def pool(name: str, formula: str, source: str, **parameters: Parameter) -> Callable[[PoolFunction], PoolFunction]:
    """Register a pool under ``name``."""

    def register(function: PoolFunction) -> PoolFunction:
        POOLS[name] = Pool(name, function, formula, source, parameters)
        return function

    return register


@pool("linear", "log Σ w_i p_i", "opinion pool (Stone 1961)")
def linear(logprobs: F64, weights: F64) -> F64:
    """Weighted mean of the probabilities."""
    return _log_mean(logprobs, weights)


@pool("loglinear", "Σ w_i log p_i − log Z", "logarithmic opinion pool (Bordley 1982)")
def loglinear(logprobs: F64, weights: F64) -> F64:
    """Weighted mean of the log-probabilities: a symbol that one expert excludes is excluded."""
    pooled: F64 = weights @ logprobs
    return pooled


@pool("power", "(1/r) log Σ w_i p_i^r − log Z", "power mean of exponent r", r=Parameter(0.5, -100.0, 100.0))
def power(logprobs: F64, weights: F64, r: float = 0.5) -> F64:
    """Power mean: r = 1 is linear, r → 0 log-linear, r = -1 harmonic."""
    if abs(r) < 1e-4:
        return loglinear(logprobs, weights)
    scaled = logprobs * r
    if r < 0.0:
        zero = np.isneginf(logprobs).any(axis=0)
        mean = np.where(zero, 0.0, _log_mean(np.where(zero, 0.0, scaled), weights) / r)
        return np.where(zero, -np.inf, mean)
    return _log_mean(scaled, weights) / r


def _log_mean(logs: F64, weights: F64) -> F64:
    """ln Σ w_i exp(logs_i) per symbol."""
    top = logs.max(axis=0)
    safe = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        mean: F64 = safe + np.log(weights @ np.exp(logs - safe))
    return mean


def normalised(log_f: F64) -> tuple[F64, float]:
    """(log f with Σ f = 1, log Z). Without any mass the law stays -inf everywhere and log Z is -inf."""
    top = float(log_f.max())
    if top == -np.inf:
        return log_f, -np.inf
    log_z = top + float(np.log(np.exp(log_f - top).sum()))
    return log_f - log_z, log_z


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
