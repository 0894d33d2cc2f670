"""Pools: how the experts' laws become one law. Adding a pool is one decorated function; the laws test the registry.

A pool gets natural logs float64[n_experts, ..., n_symbols] and weights float64[n_experts, ...] (>= 0, sum 1 over the
experts) and returns log f float64[..., n_symbols] up to a constant: normalising is done once, by ``normalised``. The
middle axes are steps: one step, or a whole block of them. -inf is a probability of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.parameters import Name, Number, Numbers, Parameter, Word, position

PoolFunction = Callable[..., F64]


@dataclass(frozen=True, slots=True)
class Pool:
    """A registered pool. ``needs_names``: the function also takes ``names`` and ``base`` (weights as given)."""

    name: str
    function: PoolFunction
    formula: str
    source: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    needs_names: bool = False


POOLS: dict[str, Pool] = {}


def pool(
    name: str, formula: str, source: str, *, needs_names: bool = False, **parameters: Parameter
) -> Callable[[PoolFunction], PoolFunction]:
    """Register a pool under ``name``."""

    def register(function: PoolFunction) -> PoolFunction:
        POOLS[name] = Pool(name, function, formula, source, parameters, needs_names)
        return function

    return register


@pool("linear", "log Σ w_i p_i", "linear opinion pool (Stone 1961)")
def linear(logprobs: F64, weights: F64) -> F64:
    """Weighted mean of the probabilities."""
    return _log_mean(logprobs, weights)


@pool(
    "loglinear",
    "Σ a_i log p_i − log Z, a = w·scale unless given",
    "logarithmic opinion pool (Genest & Zidek 1986)",
    a=Numbers(0.0, 100.0),
    scale=Number(1.0, 0.0, 100.0),
)
def loglinear(logprobs: F64, weights: F64, a: Sequence[float] = (), scale: float = 1.0) -> F64:
    """Weighted sum of the log-probabilities: a symbol that one expert excludes is excluded.

    The exponents ``a`` need not sum to 1: more sharpens, less flattens. ``scale`` = 0 stands for the number of experts.
    """
    if len(a):
        if len(a) != len(logprobs):
            raise ValueError(f"loglinear: expected {len(logprobs)} exponents a, got {len(a)}")
        exponents = np.broadcast_to(_column(np.array(a, np.float64), weights.ndim), weights.shape)
    else:
        exponents = weights * (scale or len(weights))
    if not (exponents > 0.0).all():  # 0 · (-inf) counts as 0: an expert without weight takes no part
        logprobs = np.where(exponents[..., None] > 0.0, logprobs, 0.0)
    return _weighted_sum(logprobs, exponents)


@pool(
    "affine",
    "Σ a_i log p_i − log Z, a = max(0, b + M w)",
    "logarithmic pool; exponents affine in the weights, so that fitting b and M on dev is convex",
    b=Numbers(-100.0, 100.0),
    m=Numbers(-100.0, 100.0),
)
def affine(logprobs: F64, weights: F64, b: Sequence[float] = (), m: Sequence[float] = ()) -> F64:
    """Log-linear pool whose exponents follow the weights as far as dev documents say.

    ``b`` holds one number per expert, ``m`` the rows of the matrix one after the other; without ``m`` the weights are
    taken as they are, without both it is the log-linear pool. ``score --baselines`` fits them.
    """
    n = len(logprobs)
    if len(m) not in (0, n * n) or len(b) not in (0, n):
        raise ValueError(f"affine: expected {n} numbers b and {n * n} numbers m, got {len(b)} and {len(m)}")
    exponents = weights if not len(m) else np.einsum("ij,j...->i...", np.array(m, np.float64).reshape(n, n), weights)
    if len(b):
        exponents = exponents + _column(np.array(b, np.float64), weights.ndim)
    exponents = np.maximum(exponents, 0.0)
    if not (exponents > 0.0).all():
        logprobs = np.where(exponents[..., None] > 0.0, logprobs, 0.0)
    return _weighted_sum(logprobs, exponents)


@pool(
    "power",
    "(1/r) log Σ w_i p_i^r − log Z",
    "power mean of exponent r (Hardy, Littlewood & Pólya 1934)",
    r=Number(0.5, -np.inf, np.inf, always=True),
)
def power(logprobs: F64, weights: F64, r: float = 0.5) -> F64:
    """Power mean: r = 1 linear, r → 0 log-linear, −1 harmonic, −∞ the smallest and +∞ the largest probability."""
    if abs(r) < 1e-4:
        return loglinear(logprobs, weights)
    if np.isinf(r):
        absent = weights[..., None] <= 0.0
        kept = np.where(absent, -r, logprobs)
        extreme: F64 = kept.max(axis=0) if r > 0 else kept.min(axis=0)
        return extreme
    if r > 0.0:
        return _log_mean(logprobs * r, weights) / r
    if logprobs.min() > -np.inf:
        return _log_mean(logprobs * r, weights) / r
    present = weights[..., None] > 0.0
    zero = (np.isneginf(logprobs) & present).any(axis=0)
    scaled = np.where(np.isneginf(logprobs), 0.0, logprobs * r)
    return np.where(zero, -np.inf, _log_mean(scaled, weights) / r)


@pool("sphere", "2 log μ, μ = Karcher mean of √p_i under w", "spherical mean (Buss & Fillmore 2001; slerp for two)")
def sphere(logprobs: F64, weights: F64) -> F64:
    """Mean on the sphere of square roots of probabilities, by repeated log and exp maps.

    The mean is a combination Σ c_i √p_i, so the iteration needs the roots' inner products only.
    """
    roots = np.exp(0.5 * logprobs)
    n = len(roots)
    inner = np.empty((n, n, *weights.shape[1:]))
    for i in range(n):
        for j in range(i + 1):
            inner[i, j] = inner[j, i] = np.einsum("...s,...s->...", roots[i], roots[j])
    lengths = np.sqrt(np.einsum("ii...->i...", inner))
    inner = inner / (lengths[:, None] * lengths)
    c = _on_sphere(weights, inner)
    for _ in range(_KARCHER_STEPS):
        cosine = np.clip(np.einsum("ij...,j...->i...", inner, c), -1.0, 1.0)
        sine = np.sqrt(np.maximum(1.0 - cosine**2, 0.0))
        stretch = np.divide(np.arccos(cosine), sine, out=np.ones_like(sine), where=sine > 1e-12)
        pull = weights * stretch
        tangent = pull - (pull * cosine).sum(axis=0) * c
        length = _length(tangent, inner)
        c = _on_sphere(np.cos(length) * c + np.sinc(length / np.pi) * tangent, inner)
        if float(np.abs(tangent).max()) < _KARCHER_TOLERANCE:
            break
    with np.errstate(divide="ignore"):
        doubled: F64 = 2.0 * np.log(np.maximum(_weighted_sum(roots, c / lengths), 0.0))
    return doubled


def _length(c: F64, inner: F64) -> F64:
    """float64[...]: length of Σ c_i √p_i, from float64[n, n, ...] inner products."""
    length: F64 = np.sqrt(np.maximum(np.einsum("i...,ij...,j...->...", c, inner, c), 0.0))
    return length


def _on_sphere(c: F64, inner: F64) -> F64:
    unit: F64 = c / _length(c, inner)
    return unit


_KARCHER_STEPS = 50
_KARCHER_TOLERANCE = 1e-10


@pool("route", "log p_k, k = argmax w", "hard selection")
def route(logprobs: F64, weights: F64) -> F64:
    """The law of the expert with the largest weight (of equals the first)."""
    return _of(logprobs, weights.argmax(axis=0))


@pool(
    "contrast",
    "(1+β) log p_e − β log p_a where p_e ≥ α max p_e, else 0",
    "contrastive decoding (Li et al. 2023; O'Brien & Lewis 2023)",
    needs_names=True,
    expert=Name(),
    amateur=Name(),
    alpha=Number(0.1, 0.0, 1.0),
    beta=Number(0.5, 0.0, 10.0),
)
def contrast(
    logprobs: F64, weights: F64, expert: str = "", amateur: str = "", alpha: float = 0.1, beta: float = 0.5,
    *, names: Sequence[str], base: F64,
) -> F64:  # fmt: skip
    """What the expert likes more than the amateur, among what the expert finds plausible.

    By default the expert has the largest base weight and the amateur the smallest. Scoring needs ``smooth`` > 0.
    """
    if len(logprobs) == 1:
        return _of(logprobs, np.zeros(logprobs.shape[1:-1], np.int64))
    e = position("contrast", "expert", expert, names) if expert else int(np.argmax(base))
    others = [i for i in range(len(names)) if i != e]
    a = position("contrast", "amateur", amateur, names) if amateur else min(others, key=lambda i: (base[i], -i))
    strong, weak = logprobs[e], np.maximum(logprobs[a], _LOWEST)
    plausible = strong >= strong.max(axis=-1, keepdims=True) + np.log(max(alpha, 1e-300))
    return np.where(plausible, (1.0 + beta) * strong - beta * weak, -np.inf)


@pool(
    "proxy",
    "log p_base + α (log p_plus − log p_minus) − log Z",
    "proxy tuning (Liu et al. 2024)",
    needs_names=True,
    target=Name(),
    plus=Name(),
    minus=Name(),
    alpha=Number(1.0, -10.0, 10.0),
)
def proxy(
    logprobs: F64, weights: F64, target: str = "", plus: str = "", minus: str = "", alpha: float = 1.0,
    *, names: Sequence[str], base: F64,
) -> F64:  # fmt: skip
    """The target expert moved by what a small tuned expert has learned over its untuned twin.

    By default the three experts of largest base weight, in this order; of two, the second is both.
    """
    order = sorted(range(len(names)), key=lambda i: (-base[i], i))
    t = position("proxy", "target", target, names) if target else order[0]
    p = position("proxy", "plus", plus, names) if plus else order[min(1, len(order) - 1)]
    m = position("proxy", "minus", minus, names) if minus else order[-1]
    tuned: F64 = logprobs[t] + alpha * (np.maximum(logprobs[p], _LOWEST) - np.maximum(logprobs[m], _LOWEST))
    return tuned


@pool(
    "consensus",
    "log Σ v_i c_i p_i − log Z, c_i = exp(−β|p_i − p̄|), v_i ∝ w_i Σ p̄ c_i / (H_i + 0.1), lead at least ½",
    "CoRE (arXiv 2510.13855), for N experts",
    beta=Number(2.0, 0.0, 100.0),
)
def consensus(logprobs: F64, weights: F64, beta: float = 2.0) -> F64:
    """Experts count as far as they agree with the mean and are sure; the one of largest weight has at least half."""
    probs = np.exp(logprobs)
    mean = _weighted_sum(probs, weights)
    near = probs - mean
    np.exp(np.multiply(np.abs(near, out=near), -beta, out=near), out=near)
    v = weights * np.einsum("...s,i...s->i...", mean, near) / (entropies(logprobs, probs) + 0.1)
    v = v / v.sum(axis=0)
    lead = weights.argmax(axis=0)
    at_lead = np.take_along_axis(v, lead[None], axis=0)
    rest = np.maximum(1.0 - at_lead, 1e-300)
    raised = np.maximum(at_lead, 0.5)
    v = v * np.where(at_lead < 0.5, 0.5 / rest, 1.0)
    np.put_along_axis(v, lead[None], raised, axis=0)
    with np.errstate(divide="ignore"):
        law: F64 = np.log(_weighted_sum(np.multiply(near, probs, out=near), v))
    return law


@pool(
    "gate",
    "log p_lead where all first choices agree or p̄(lead's) > c, else the inner pool",
    "SAFE (arXiv 2510.15346)",
    c=Number(0.5, 0.0, 1.0),
    inner=Word("linear", ("linear", "loglinear")),
)
def gate(logprobs: F64, weights: F64, c: float = 0.5, inner: str = "linear") -> F64:
    """The expert of largest weight speaks alone where the others would say the same; elsewhere all speak."""
    lead = _of(logprobs, weights.argmax(axis=0))
    first = logprobs.argmax(axis=-1)
    absent = weights <= 0.0
    chosen = lead.argmax(axis=-1)
    agree = ((first == chosen) | absent).all(axis=0)
    at_chosen = np.take_along_axis(logprobs, np.broadcast_to(chosen, weights.shape)[..., None], axis=-1)[..., 0]
    mean = (weights * np.exp(at_chosen)).sum(axis=0)
    apart = ~(agree | (mean > c))
    law = lead.copy()
    if apart.any():
        inner_pool = linear if inner == "linear" else loglinear
        law[apart] = normalised(inner_pool(logprobs[:, apart], weights[:, apart]))[0]
    return law


_LOWEST = -700.0
"""ln of about the smallest float64: what a subtracted expert says of a symbol it rules out."""


def entropies(logprobs: F64, probs: F64 | None = None) -> F64:
    """float64[...] in bits, of float64[..., n_symbols] natural logs; ``probs``: their exp, where it is known."""
    finite = logprobs if logprobs.min() > -np.inf else np.maximum(logprobs, _LOWEST)
    bits: F64 = np.einsum("...s,...s->...", np.exp(logprobs) if probs is None else probs, finite) / -np.log(2.0)
    return bits


def normalised(log_f: F64) -> tuple[F64, F64]:
    """(log f with Σ f = 1, log Z float64[...]) over the last axis. A law without any mass stays -inf, log Z too."""
    top = log_f.max(axis=-1, keepdims=True)
    safe = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        shifted = log_f - safe
        log_z = safe + np.log(np.exp(shifted, out=shifted).sum(axis=-1, keepdims=True))
    law = np.subtract(log_f, np.where(np.isneginf(log_z), 0.0, log_z), out=shifted)
    return law, log_z[..., 0]


def _log_mean(logs: F64, weights: F64) -> F64:
    """ln Σ w_i exp(logs_i) per symbol."""
    if not (weights > 0.0).all():  # an expert without weight neither counts nor overflows
        if (weights.max(axis=0) == 1.0).all():  # one expert per step
            return _of(logs, weights.argmax(axis=0)).copy()
        logs = np.where(weights[..., None] > 0.0, logs, -np.inf)
    top = logs.max(axis=0)
    top[np.isneginf(top)] = 0.0
    terms = logs - top
    mean = _weighted_sum(np.exp(terms, out=terms), weights)
    with np.errstate(divide="ignore"):
        np.log(mean, out=mean)
    mean += top
    return mean


def _weighted_sum(terms: F64, weights: F64) -> F64:
    """Σ w_i terms_i over the experts, without temporaries."""
    total: F64 = np.einsum("i...,i...s->...s", weights, terms)
    return total


def _of(logprobs: F64, chosen: np.ndarray) -> F64:
    """float64[..., n_symbols]: the law of the chosen expert at every step."""
    law: F64 = np.take_along_axis(logprobs, chosen[None, ..., None], axis=0)[0]
    return law


def _column(values: F64, n_axes: int) -> F64:
    return values.reshape(-1, *(1,) * (n_axes - 1))
