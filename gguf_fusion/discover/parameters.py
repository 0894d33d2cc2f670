"""Tier 1: the best parameters of every family of strategies, on the fit documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.discover.candidates import Evaluator, Scored
from gguf_fusion.discover.corpus import Corpus, Doc

_EM_TOLERANCE = 1e-6
_EM_ROUNDS = 500
_EXPONENT_BYTES = 8192
"""Bytes on which log-linear exponents are fitted; three numbers need no more."""

_LEAST_WEIGHT = 1e-3


def starting_points(corpus: Corpus) -> list[str]:
    """Formulae without anything tuned: every expert, the plain pools, the package's default."""
    equal = ", ".join(f'1*"{name}"' for name in corpus.names)
    pools = ("linear(", "geometric(", "power(r=0.5, ", "power(r=-1, ")
    moving = ("eta=1, gamma=1, ", "eta=0.1, gamma=0.99, ")
    return [
        *(f'formula("{name}")' for name in corpus.names),
        *(f"formula({pool}{equal}))" for pool in pools),
        *(f"formula({pool}{rule}{equal}))" for pool in pools[:2] for rule in moving),
    ]


def em_weights(given: F64) -> F64:
    """float64[n_experts], sum 1: the linear weights with the fewest bits on float64[n, n_experts] of ln p_i(x).

    Expectation maximisation: w_i ← mean_t w_i p_i(x_t) / f(x_t), until no weight wants to grow by more than 1e-6.
    """
    probs = np.exp(given - given.max(axis=1, keepdims=True))
    weights = np.full(probs.shape[1], 1.0 / probs.shape[1])
    for _ in range(_EM_ROUNDS):
        growth = (probs / (probs @ weights)[:, None]).mean(axis=0)
        weights = weights * growth
        weights /= weights.sum()
        if growth.max() <= 1.0 + _EM_TOLERANCE:
            break
    return weights


def exponents(corpus: Corpus, docs: Sequence[Doc]) -> F64:
    """float64[n_experts]: the exponents a ≥ 0 of f ∝ Π p_i^a_i with the fewest bits; convex, by L-BFGS."""
    from scipy.optimize import minimize

    rows = corpus.rows(docs)
    rows = rows[:: max(1, len(rows) // _EXPONENT_BYTES)]
    laws = np.maximum(corpus.laws[rows].astype(np.float64), -40.0)
    came = laws[np.arange(len(rows)), :, corpus.text[rows]]

    def loss(a: F64) -> tuple[float, F64]:
        logs = np.einsum("i,tis->ts", a, laws)
        top = logs.max(axis=1)
        probs = np.exp(logs - top[:, None])
        total = probs.sum(axis=1)
        expected = np.einsum("ts,tis->ti", probs / total[:, None], laws)
        value = float((top + np.log(total) - came @ a).mean())
        return value, (expected - came).mean(axis=0)

    n = len(corpus.names)
    found = minimize(loss, np.full(n, 1.0 / n), jac=True, method="L-BFGS-B", bounds=[(0.0, 4.0)] * n)
    result: F64 = found.x
    return result


def tuned(evaluator: Evaluator, docs: Sequence[Doc], budget: int, seed: int) -> Iterator[list[Scored]]:
    """Yield what was scored, batch by batch: starting points, closed forms, then Optuna's TPE over the families."""
    corpus = evaluator.corpus
    names = corpus.names
    yield evaluator.score([(text, 1, ()) for text in starting_points(corpus)])
    weights = em_weights(corpus.given(docs))
    a = exponents(corpus, docs)
    closed = [pool_text(names, 1.0, weights)]
    if a.sum() > _LEAST_WEIGHT:
        closed.append(_temper(pool_text(names, 0.0, a / a.sum()), 1.0 / float(a.sum())))
    yield evaluator.score([(f"formula({text})", 1, ()) for text in closed])
    yield from _searched(evaluator, budget, seed)


def pool_text(names: Sequence[str], r: float, weights: F64, eta: float = 0.0, gamma: float = 1.0) -> str:
    """A pool over experts as text, numbers rounded to what can be told apart; experts without weight are left out."""
    pool = {1.0: "linear(", 0.0: "geometric("}.get(r, f"power(r={r:.4g}, ")
    moving = f"eta={eta:.4g}, gamma={gamma:.5g}, " if eta else ""
    parts = [f'{w:.4g}*"{name}"' for name, w in zip(names, weights / weights.sum(), strict=True) if w > _LEAST_WEIGHT]
    return f"{pool}{moving}{', '.join(parts)})"


def _temper(text: str, t: float) -> str:
    return text if abs(t - 1.0) < 0.005 else f"temper({t:.4g}, {text})"


def _searched(evaluator: Evaluator, budget: int, seed: int) -> Iterator[list[Scored]]:
    """Exponent r, η, γ, base weights and temperature together, in batches of one size whatever the workers."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = evaluator.corpus.names
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True))
    study.enqueue_trial({"r": 0.0, "eta": 0.1, "fade": 0.01, "t": 1.0} | {f"w{i}": 0.0 for i in range(len(names))})
    for first in range(0, budget, _BATCH):
        trials = [study.ask() for _ in range(min(_BATCH, budget - first))]
        texts = []
        for trial in trials:
            r = round(trial.suggest_float("r", -1.0, 1.5), 2)
            eta = trial.suggest_float("eta", 0.005, 1.0, log=True)
            gamma = 1.0 - trial.suggest_float("fade", 1e-4, 0.2, log=True)
            raw = np.exp([trial.suggest_float(f"w{i}", -3.0, 3.0) for i in range(len(names))])
            t = trial.suggest_float("t", 0.8, 1.3)
            texts.append(_temper(pool_text(names, r, raw / raw.sum(), eta, gamma), t))
        scored = evaluator.score([(f"formula({text})", 1, ()) for text in texts])
        for trial, one in zip(trials, scored, strict=True):
            study.tell(trial, min(one.bpb, 99.0))
        yield scored


_BATCH = 8
