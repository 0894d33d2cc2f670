"""What every comparison needs beside it: pools fitted on dev, and checks that must come out as they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.evaluate.trace import Trace
from gguf_fusion.evidence import em_weights
from gguf_fusion.expressions import parse
from gguf_fusion.records import N_SYMBOLS
from gguf_fusion.strategy import Strategy

UNTUNED = ("average", "bayes")
"""Strategies that any other one should beat, or say why not."""


@dataclass(frozen=True, slots=True)
class Checks:
    """What must come out on any document.

    copies_gain  : bits per byte that copies of the first expert gain over it; 0 where the pool is sound
    noise_weight : weight that the online Bayes mixture leaves to an expert that knows nothing, at the document's end
    """

    copies_gain: float
    noise_weight: float


def laws_of(trace: Trace, weights: F64) -> F64:
    """float64[n_experts, n_bytes, n_symbols], natural logs, every ghosts' share filled."""
    return np.concatenate([laws for _, laws in trace.blocks(weights / weights.sum())], axis=1)


def given_of(trace: Trace, weights: F64) -> F64:
    """float64[n_scored, n_experts]: ln of what each expert gave to the scored bytes."""
    laws = laws_of(trace, weights)
    came = np.frombuffer(trace.text, np.uint8).astype(np.int64)
    return np.take_along_axis(laws, came[None, :, None], axis=2)[:, :, 0].T[np.asarray(trace.scored)]


def fitted_pool(given: Sequence[F64], names: Sequence[str]) -> str:
    """The linear pool with the fewest bits on the dev documents, as a formula."""
    weights = em_weights(np.concatenate(given), np.full(len(names), 1.0 / len(names)), rounds=500)
    parts = [f'{w:.4g}*"{name}"' for w, name in zip(weights, names, strict=True) if w >= 1e-3]
    return f"formula(linear({', '.join(parts)}))"


def checks(trace: Trace, strategy: Strategy, weights: F64) -> Checks:
    """Run a strategy on copies of one expert, and the Bayes mixture beside an expert that knows nothing."""
    laws = laws_of(trace, weights)
    came = np.frombuffer(trace.text, np.uint8).astype(np.int64)
    scored = np.asarray(trace.scored)
    steps = np.arange(len(came))
    names = [f"copy {i}" for i in range(len(weights))]
    copies = np.repeat(laws[:1], len(weights), axis=0)
    fused, _, _ = strategy.bind(len(weights), N_SYMBOLS, weights, names).fuse_block(copies, came)
    alone = laws[0, steps, came]
    gain = float((fused[steps, came] - alone)[scored].sum() / np.log(2.0)) / max(1, int(scored.sum()))
    noise = np.stack([laws[0], np.full(laws.shape[1:], -np.log(float(N_SYMBOLS)))])
    _, mixed, _ = parse("bayes").bind(2, N_SYMBOLS, np.ones(2), ["expert", "noise"]).fuse_block(noise, came)
    return Checks(gain, float(mixed[1, -1]))
