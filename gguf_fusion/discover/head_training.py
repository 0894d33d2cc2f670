"""Training a head: W, c and λ by Adam on the log-loss of the fused law, with early stopping on dev documents.

Loss per byte (Xiong et al., arXiv 2601.05106, for frozen experts)::

    −ln f(x) + ⅓ · [experts' first choices differ] · (−Σ_i ω_i ln π_i(x)),   f ∝ π_router^λ · Π π_i^ω_i
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_fusion.arrays import F64, I64
from gguf_fusion.router.head import softmax

EXPERT_LOSS = 1.0 / 3.0
FLOOR = -25.0
"""Natural log below which a law counts as this: one symbol that an expert rules out must not be the whole loss."""

_BATCH = 256
_RATES = (3e-3, 1e-2, 3e-2)
"""Steps of W, c and λ; the last is one number that every byte has a say in."""
_PATIENCE = 5
_BETA1, _BETA2, _SMALL = 0.9, 0.999, 1e-8


@dataclass(frozen=True, slots=True)
class Examples:
    """Bytes to learn from.

    features : float64[n, n_features], raw;  laws : float32[n, n_experts, n_symbols], natural logs
    router   : float32[n, n_symbols], the router's own law;  came : int64[n], the bytes that came
    """

    features: NDArray[np.floating]
    laws: NDArray[np.float32]
    router: NDArray[np.float32]
    came: I64


@dataclass(slots=True)
class Fit:
    """Parameters while they are trained; see ``head.Head``."""

    w: F64
    c: F64
    lam: float

    def copy(self) -> Fit:
        """An independent copy."""
        return Fit(self.w.copy(), self.c.copy(), self.lam)


def standardise(features: NDArray[np.floating]) -> tuple[F64, F64]:
    """(mean, scale) of float[n, n_features]; features that never change keep scale 1."""
    mean = np.asarray(features.mean(axis=0), np.float64)
    scale = np.asarray(features.std(axis=0), np.float64)
    return mean, np.where(scale > 1e-9, scale, 1.0)


def loss_and_gradient(fit: Fit, x: F64, examples: Examples, rows: I64) -> tuple[float, Fit]:
    """(mean loss in nats, gradient) over some rows; ``x``: float64[len(rows), n_features], standardised."""
    laws = np.maximum(examples.laws[rows].astype(np.float64), FLOOR)
    router = np.maximum(examples.router[rows].astype(np.float64), FLOOR)
    came = examples.came[rows]
    at = np.arange(len(rows))
    omega = softmax(x @ fit.w.T + fit.c)
    logs = np.einsum("ni,nis->ns", omega, laws) + fit.lam * router
    top = logs.max(axis=1)
    probs = np.exp(logs - top[:, None])
    total = probs.sum(axis=1)
    probs /= total[:, None]
    given = laws[at, :, came]
    loss = top + np.log(total) - logs[at, came]
    by_omega = np.einsum("ns,nis->ni", probs, laws) - given
    by_lam = (probs * router).sum(axis=1) - router[at, came]
    first = laws.argmax(axis=2)
    differ = (first != first[:, :1]).any(axis=1)
    loss = loss - EXPERT_LOSS * differ * (omega * given).sum(axis=1)
    by_omega = by_omega - EXPERT_LOSS * differ[:, None] * given
    by_logit = omega * (by_omega - (omega * by_omega).sum(axis=1, keepdims=True))
    n = len(rows)
    return float(loss.mean()), Fit(by_logit.T @ x / n, by_logit.mean(axis=0), float(by_lam.mean()))


def dev_loss(fit: Fit, mean: F64, scale: F64, examples: Examples) -> float:
    """Mean −ln f(x) in nats (without the expert loss), soft form."""
    total = 0.0
    for first in range(0, len(examples.came), 1024):
        rows = np.arange(first, min(first + 1024, len(examples.came)))
        x = (np.asarray(examples.features[rows], np.float64) - mean) / scale
        laws = np.maximum(examples.laws[rows].astype(np.float64), FLOOR)
        logs = np.einsum("ni,nis->ns", softmax(x @ fit.w.T + fit.c), laws)
        logs += fit.lam * np.maximum(examples.router[rows], FLOOR)
        top = logs.max(axis=1)
        total += float(
            (top + np.log(np.exp(logs - top[:, None]).sum(axis=1)) - logs[rows - first, examples.came[rows]]).sum()
        )
    return total / len(examples.came)


class Adam:
    """Steps against a gradient, each parameter by its own history (Kingma & Ba 2015); λ stays at or above 0."""

    def __init__(self, fit: Fit) -> None:
        self._means: list[Any] = [np.zeros_like(fit.w), np.zeros_like(fit.c), np.zeros(())]
        self._squares = [mean.copy() for mean in self._means]
        self._n = 0

    def step(self, fit: Fit, gradient: Fit) -> None:
        """Move ``fit``."""
        self._n += 1
        moves = []
        for k, slope in enumerate((gradient.w, gradient.c, np.asarray(gradient.lam))):
            self._means[k] = _BETA1 * self._means[k] + (1.0 - _BETA1) * slope
            self._squares[k] = _BETA2 * self._squares[k] + (1.0 - _BETA2) * slope**2
            size = np.sqrt(self._squares[k] / (1.0 - _BETA2**self._n)) + _SMALL
            moves.append(_RATES[k] * self._means[k] / (1.0 - _BETA1**self._n) / size)
        fit.w -= moves[0]
        fit.c -= moves[1]
        fit.lam = max(0.0, fit.lam - float(moves[2]))


def batches(n: int, random: np.random.Generator) -> Iterator[I64]:
    """Row numbers of one epoch, shuffled, some hundred at a time."""
    order = random.permutation(n)
    for first in range(0, n, _BATCH):
        yield np.sort(order[first : first + _BATCH])


def train(
    fit_on: Examples,
    dev: Examples,
    *,
    seed: int = 0,
    epochs: int = 30,
    decay: float = 1e-3,
    complementary: bool = True,
    tell: Callable[[int, float], None] = lambda epoch, loss: None,
) -> tuple[Fit, F64, F64]:
    """(parameters of the best epoch on dev, mean, scale). ``complementary`` = False keeps λ at 0.

    ``tell`` hears of every epoch and its dev loss in nats per byte. Deterministic for a seed.
    """
    mean, scale = standardise(fit_on.features)
    n_experts = fit_on.laws.shape[1]
    fit = Fit(np.zeros((n_experts, len(mean))), np.zeros(n_experts), 0.0)
    best, best_loss = fit.copy(), dev_loss(fit, mean, scale, dev)
    adam, random = Adam(fit), np.random.default_rng(seed)
    waited = 0
    for epoch in range(epochs):
        for rows in batches(len(fit_on.came), random):
            x = (np.asarray(fit_on.features[rows], np.float64) - mean) / scale
            _, gradient = loss_and_gradient(fit, x, fit_on, rows)
            adam.step(fit, Fit(gradient.w + decay * fit.w, gradient.c, gradient.lam if complementary else 0.0))
        loss = dev_loss(fit, mean, scale, dev)
        tell(epoch, loss)
        waited += 1
        if loss < best_loss - 1e-6:
            best, best_loss, waited = fit.copy(), loss, 0
        if waited >= _PATIENCE:
            break
    return best, mean, scale
