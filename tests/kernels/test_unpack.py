"""Kept laws made whole again, against the same in plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.cover.ghosts import FLOOR, fill
from gguf_fusion.kernels.unpack import unpack

N_SYMBOLS = 257


def kept(n_steps: int, n: int, seed: int = 0):
    """(laws, probability of what came, ghosts' shares, what came) of made-up experts."""
    rng = np.random.default_rng(seed)
    shares = rng.beta(0.5, 10.0, (n_steps, n)) if n > 1 else np.zeros((n_steps, n))
    probs = rng.dirichlet(np.full(N_SYMBOLS, 0.1), (n_steps, n)) * (1.0 - shares[:, :, None])
    came = rng.integers(0, 256, n_steps)
    exact = np.take_along_axis(probs, came[:, None, None], axis=2)[:, :, 0]
    with np.errstate(divide="ignore"):
        return np.log(probs).astype(np.float16), exact, shares, came


def by_hand(laws, exact, shares, came, weights):
    out = np.exp(laws.astype(np.float64))
    for t in range(len(out)):
        probs = out[t]
        probs[:, came[t]] = 0.0
        probs *= ((1.0 - shares[t] - exact[t]) / probs.sum(axis=1))[:, None]
        probs[:, came[t]] = exact[t]
        if len(weights) > 1:
            fill(probs, shares[t], weights, np.empty_like(probs), lambda i: np.full(N_SYMBOLS, 1.0 / N_SYMBOLS))
    return out.transpose(1, 0, 2)


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.2, 0.3, 0.5]])
def test_equals_the_plain_way(weights: list[float]) -> None:
    """Rounded laws are rescaled round the exact value, and the ghosts' share is filled by the others."""
    laws, exact, shares, came = kept(20, len(weights))
    found = unpack(laws, exact, shares, came, np.array(weights), FLOOR)
    np.testing.assert_allclose(found, by_hand(laws, exact, shares, came, np.array(weights)), atol=1e-12)
    np.testing.assert_allclose(found.sum(axis=2), 1.0, atol=1e-9)


def test_without_a_word_from_those_with_weight() -> None:
    """Others without weight stand in alike; where nobody knows anything every symbol is as likely."""
    laws, exact, shares, came = kept(1, 3)
    laws[0, 1] = -np.inf
    exact[0, 1], shares[0, 1] = 0.0, 1.0
    found = unpack(laws, exact, shares, came, np.array([0.0, 1.0, 0.0]), FLOOR)
    np.testing.assert_allclose(found.sum(axis=2), 1.0, atol=1e-6)
    laws[:], exact[:], shares[:] = -np.inf, 0.0, 1.0
    np.testing.assert_allclose(unpack(laws, exact, shares, came, np.full(3, 1 / 3), FLOOR), 1 / N_SYMBOLS)


def test_wrong_arrays_are_refused() -> None:
    """Shapes and types are checked before the kernel runs."""
    laws, exact, shares, came = kept(4, 2)
    with pytest.raises(ValueError, match="weights: expected"):
        unpack(laws, exact, shares, came, np.ones(3), FLOOR)
    with pytest.raises(TypeError, match="came: expected"):
        unpack(laws, exact, shares, came.astype(np.int32), np.ones(2), FLOOR)
