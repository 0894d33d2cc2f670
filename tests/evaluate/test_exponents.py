"""Exponents fitted on dev documents."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.evaluate.exponents import Rows, _loss, fitted_exponents
from gguf_fusion.expressions import parse


def rows(seed: int, domain: str = "") -> Rows:
    """Two experts of whom the first is right; the second one's weight says how sharp the truth is."""
    rng = np.random.default_rng(seed)
    laws = np.log(rng.dirichlet(np.full(20, 0.5), (300, 2)) + 1e-6)
    weights = rng.dirichlet(np.ones(2), 300)
    truth = np.exp((0.5 + weights[:, 1:]) * laws[:, 0])
    came = np.array([rng.choice(20, p=law / law.sum()) for law in truth])
    laws = laws.astype(np.float32)
    return Rows(laws, laws[np.arange(300), :, came].astype(np.float64), weights, domain)


def test_derivatives() -> None:
    """Gradient and curvature are those of the loss, by finite differences."""
    part, rng = rows(0), np.random.default_rng(1)
    features = np.hstack([np.ones((300, 1)), part.weights])
    worth, table = np.full(300, 1 / 300), rng.normal(size=(2, 3))
    _, gradient, curvature = _loss(table, part.laws, part.given, features, worth)
    for k, step in enumerate(np.eye(6).reshape(6, 2, 3) * 1e-5):
        up, down = (_loss(table + sign * step, part.laws, part.given, features, worth) for sign in (1, -1))
        assert (up[0] - down[0]) / 2e-5 == pytest.approx(gradient[k], abs=1e-6)
        np.testing.assert_allclose((up[1] - down[1]) / 2e-5, curvature[k], atol=1e-5)


def test_the_expert_that_is_right_is_found() -> None:
    """The first expert's exponent follows the truth, the second one's is next to nothing; bits fall on new rows too."""
    found = fitted_exponents([rows(seed, f"{seed % 2}") for seed in range(8)])
    fuser = parse(found).bind(2, 20, np.ones(2), ["a", "b"])
    exponents = np.array(fuser._parameters["b"])[:, None] + np.array(fuser._parameters["m"]).reshape(2, 2)
    np.testing.assert_allclose(exponents, [[0.5, 1.5], [0.0, 0.0]], atol=0.12)
