"""Exponents of a log-linear pool fitted on dev documents: affine in the weights by evidence, so the fit is convex."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gguf_fusion.arrays import F32, F64
from gguf_fusion.evaluate.trace import Trace
from gguf_fusion.expressions import parse
from gguf_fusion.records import N_SYMBOLS

RULE = "evidence(eta=0.1, gamma=0.99)"

MOST_ROWS = 60_000
"""Bytes to fit on; more are thinned out evenly, a dozen numbers need no more."""

_LOWEST = -60.0
_RIDGE = 1e-4
_ROUNDS = 20
_ENOUGH = 1e-7


@dataclass(frozen=True, slots=True)
class Rows:
    """Scored bytes of one document. laws : float32[n_rows, n, n_symbols];  given : float64[n_rows, n], ln p_i(x);
    weights : float64[n_rows, n], by evidence, before each byte;  domain : kind of text."""  # noqa: D205, D209

    laws: F32
    given: F64
    weights: F64
    domain: str


def rows_of(trace: Trace, domain: str, base: F64, every: int = 1) -> Rows:
    """Every ``every``-th scored byte of a trace; ``base``: float64[n], the weights as given."""
    names = trace.names
    fuser = parse(f"loglinear(w={RULE})").bind(len(names), N_SYMBOLS, base, names)
    kept = np.flatnonzero(trace.scored)[::every]
    came = np.frombuffer(trace.text, np.uint8).astype(np.int64)
    laws, weights = [], []
    for first, block in trace.blocks(base / base.sum()):
        at = slice(first, first + block.shape[1])
        _, mixed, _ = fuser.fuse_block(block, came[at])
        mine = kept[(kept >= first) & (kept < at.stop)]
        laws.append(np.maximum(block[:, mine - first], _LOWEST).transpose(1, 0, 2).astype(np.float32))
        weights.append(mixed[:, mine - first].T)
    whole = np.concatenate(laws)
    given = np.take_along_axis(whole, came[kept][:, None, None], axis=2)[:, :, 0].astype(np.float64)
    return Rows(whole, given, np.concatenate(weights), domain)


def fitted_exponents(rows: Sequence[Rows]) -> str:
    """The strategy ``affine`` with the fewest bits on these rows, as an expression.

    Every domain counts by its bits relative to those of its best expert, so that kinds of text count alike. The loss is
    convex in b and M; Newton's method, with a little ridge.
    """
    laws, given = np.concatenate([r.laws for r in rows]), np.concatenate([r.given for r in rows])
    features = np.concatenate([np.hstack([np.ones((len(r.weights), 1)), r.weights]) for r in rows])
    worth = np.concatenate([np.full(len(r.given), 1.0 / _best_nats(rows, r.domain)) for r in rows])
    n, k = given.shape[1], features.shape[1]
    table = np.zeros((n, k))
    table[:, 0] = 0.25 / n
    table[:, 1:] = 0.75 * np.eye(n)
    value, gradient, curvature = _loss(table, laws, given, features, worth / worth.sum())
    for _ in range(_ROUNDS):
        step = np.linalg.solve(curvature, gradient).reshape(n, k)
        size = 1.0
        while size > 1e-3:
            new = _loss(table - size * step, laws, given, features, worth / worth.sum())
            if new[0] < value:
                break
            size /= 2.0
        else:
            break
        gained, table = value - new[0], table - size * step
        value, gradient, curvature = new
        if gained < _ENOUGH:
            break
    b, m = (", ".join(f"{v:.4g}" for v in part.ravel()) for part in (table[:, 0], table[:, 1:]))
    return f"affine(b=[{b}], m=[{m}], w={RULE})"


def _best_nats(rows: Sequence[Rows], domain: str) -> float:
    """Nats that the best single expert needs for a domain's rows."""
    nats = -sum(r.given.sum(axis=0) for r in rows if r.domain == domain)
    return max(float(np.min(nats)), np.finfo(np.float64).tiny)


def _loss(table: F64, laws: F32, given: F64, features: F64, worth: F64) -> tuple[float, F64, F64]:
    """(mean nats, gradient float64[n k], Hessian float64[n k, n k]) of exponents ``features @ table.T``, with ridge."""
    n, k = table.shape
    value, gradient, curvature = 0.0, np.zeros((n, k)), np.zeros((n, k, n, k))
    for first in range(0, len(given), 4096):
        at = slice(first, first + 4096)
        part, phi, w = laws[at].astype(np.float64), features[at], worth[at]
        a = phi @ table.T
        logs = np.einsum("ti,tis->ts", a, part)
        top = logs.max(axis=1, keepdims=True)
        probs = np.exp(logs - top)
        total = probs.sum(axis=1, keepdims=True)
        probs /= total
        value += float(w @ (top[:, 0] + np.log(total[:, 0]) - (a * given[at]).sum(axis=1)))
        expected = np.einsum("ts,tis->ti", probs, part)
        gradient += np.einsum("t,ti,tk->ik", w, expected - given[at], phi)
        spread = np.matmul(part * probs[:, None], part.transpose(0, 2, 1)) - expected[:, :, None] * expected[:, None]
        curvature += np.einsum("tij,tk,tl->ikjl", w[:, None, None] * spread, phi, phi, optimize=True)
    value += 0.5 * _RIDGE * float((table**2).sum())
    gradient += _RIDGE * table
    flat = curvature.reshape(n * k, n * k) + _RIDGE * np.eye(n * k)
    return value, gradient.ravel(), flat
