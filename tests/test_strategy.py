"""Pools, weight rules, strategy expressions: laws over the whole registry."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.errors import ExpertFailedError, StrategyError
from gguf_fusion.fusion import POOLS, normalised
from gguf_fusion.strategy import DEFAULT, PRESETS, listing, parse
from gguf_fusion.weights import RULES

EVERY = sorted({DEFAULT, *PRESETS, *(f"{pool}(w={rule})" for pool in POOLS for rule in RULES), "power(r=-1)"})


def laws(n: int, seed: int, n_symbols: int = 257) -> np.ndarray:
    return np.log(np.random.default_rng(seed).dirichlet(np.full(n_symbols, 0.3), n) + 1e-12)


def fuser(expression: str, weights: list[float], n_symbols: int = 257):
    names = [f"e{i}" for i in range(len(weights))]
    return parse(expression).bind(len(weights), n_symbols, np.array(weights), names)


def fused_after(expression: str, weights: list[float], rows: np.ndarray) -> np.ndarray:
    """The law at the last of several steps, after observing symbols with different support."""
    bound = fuser(expression, weights)
    for step, symbol in enumerate([3, 77, 200]):
        bound.fuse(np.roll(rows, step, axis=1))
        bound.advance(symbol, np.roll(rows, step, axis=1), generated=False)
    return bound.fuse(rows).log_f


@pytest.mark.parametrize("expression", EVERY)
@pytest.mark.parametrize("weights", [[0.2, 0.8], [0.5, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]])
def test_sums_to_one_and_ignores_order(expression: str, weights: list[float]) -> None:
    """Every strategy gives a distribution that does not depend on the order of the experts."""
    rows = laws(len(weights), 1)
    log_f = fused_after(expression, weights, rows)
    assert abs(np.exp(log_f).sum() - 1.0) <= 1e-6
    back = fused_after(expression, weights[::-1], np.ascontiguousarray(rows[::-1]))
    np.testing.assert_allclose(log_f, back, atol=1e-9)


@pytest.mark.parametrize("expression", EVERY)
def test_one_hot_weights_and_zero_weight(expression: str) -> None:
    """One-hot weights give that expert's law; an expert with weight 0 has no influence, even a broken one."""
    rows = laws(3, 2)
    np.testing.assert_allclose(fused_after(expression, [0.0, 1.0, 0.0], rows), normalised(rows[1])[0], atol=1e-9)
    broken = rows.copy()
    broken[2] = np.nan
    np.testing.assert_allclose(
        fused_after(expression, [0.4, 0.6, 0.0], broken), fused_after(expression, [0.4, 0.6], rows[:2]), atol=1e-12
    )


@pytest.mark.parametrize("expression", EVERY)
def test_copies_of_one_expert(expression: str) -> None:
    """Several copies of one expert are that expert."""
    row = laws(1, 3)[0]
    np.testing.assert_allclose(
        fused_after(expression, [0.2, 0.5, 0.3], np.stack([row] * 3)), normalised(row)[0], atol=1e-9
    )


@pytest.mark.parametrize("expression", ["linear", "linear(evidence)", "power(r=2)"])
def test_never_above_the_best(expression: str) -> None:
    """A linear pool or a power mean with r >= 1 … gives no symbol more than its best expert, before normalising."""
    rows = laws(3, 4)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    assert (fused_after(expression, [0.2, 0.5, 0.3], rows) <= rows.max(axis=0) + 1e-9).all()


@pytest.mark.parametrize("expression", ["linear", "power(r=0.5)", "loglinear"])
def test_never_worse_than_the_mean_of_bits(expression: str) -> None:
    """-log f(x) <= Σ w_i (-log p_i(x)) for power means with 0 <= r <= 1."""
    rows = laws(3, 5)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    weights = np.array([0.2, 0.5, 0.3])
    assert (-fused_after(expression, list(weights), rows) <= -(weights @ rows) + 1e-9).all()


def test_bayes_regret() -> None:
    """The Bayes mixture costs at most log2(1/w) bits more than any expert, over the whole text."""
    rng = np.random.default_rng(6)
    bound, bits, own = fuser("bayes", [0.25, 0.25, 0.5]), 0.0, np.zeros(3)
    for step in range(200):
        rows = laws(3, 100 + step)
        symbol = int(rng.integers(257))
        bits -= bound.fuse(rows).log_f[symbol] / np.log(2)
        own -= normalised_rows(rows)[:, symbol] / np.log(2)
        bound.advance(symbol, normalised_rows(rows), generated=False)
    assert (bits <= own + np.log2([4, 4, 2]) + 1e-6).all()


def normalised_rows(rows: np.ndarray) -> np.ndarray:
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def test_evidence_finds_the_right_expert_and_forgets() -> None:
    """An expert that foresees the text gains weight, and loses it when it stops doing so."""
    bound = fuser("linear(evidence(eta=0.5, gamma=0.9))", [0.5, 0.5])
    good, bad = np.full(257, -8.0), np.full(257, -6.0)
    good[0] = -0.01
    rows = np.stack([good, bad])
    for _ in range(30):
        bound.advance(0, rows, generated=False)
    assert bound.fuse(rows).weights[0] > 0.95
    for _ in range(60):
        bound.advance(1, rows, generated=False)
    assert bound.fuse(rows).weights[0] < 0.05
    weights = bound.fuse(rows).weights.copy()
    bound.advance(0, rows, generated=True)
    np.testing.assert_array_equal(bound.fuse(rows).weights, weights)


@pytest.mark.parametrize("expression", EVERY)
def test_snapshot(expression: str) -> None:
    """Restoring brings back the very same law."""
    rows, bound = laws(3, 8), fuser(expression, [0.2, 0.3, 0.5])
    bound.advance(5, rows, generated=False)
    saved, before = bound.snapshot(), bound.fuse(rows).log_f.copy()
    bound.advance(9, np.roll(rows, 3, axis=0), generated=False)
    bound.restore(saved)
    np.testing.assert_array_equal(bound.fuse(rows).log_f, before)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_rows_name_the_expert(broken: float) -> None:
    """NaN or +inf in one expert's law stops the text and names the expert (A10)."""
    rows = laws(3, 9)
    rows[1, 4] = broken
    with pytest.raises(ExpertFailedError, match="'e1'"):
        fuser("linear", [0.3, 0.3, 0.4]).fuse(rows)


@pytest.mark.parametrize("expression", EVERY)
def test_printing_round_trips(expression: str) -> None:
    """What is printed is what is parsed."""
    strategy = parse(expression)
    assert parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got nothing"),
        ("linar", "did you mean 'linear'"),
        ("power(r=200)", r"r lies in \[-100, 100\], got 200"),
        ("power(rr=1)", "unknown parameter of power 'rr'"),
        ("linear(w=evidense)", "did you mean 'evidence'"),
        ("linear(", "closing parenthesis"),
        ("linear()x", "expected the end"),
        ("power(r=x)", "expects a number"),
        ("linear($)", "cannot read"),
    ],
)
def test_mistakes_are_explained(text: str, message: str) -> None:
    """A wrong expression says what is wrong and what comes near."""
    with pytest.raises(StrategyError, match=message):
        parse(text)


@pytest.mark.parametrize("weights", [[-0.1, 1.1], [0.0, 0.0], [np.nan, 1.0]])
def test_bad_weights(weights: list[float]) -> None:
    """Negative weights and weights without a sum are refused."""
    with pytest.raises(StrategyError, match="weights: expected 2 numbers"):
        fuser("linear", weights)


def test_listing_is_complete() -> None:
    """Pools, rules and presets are all listed, with a formula each."""
    rows = listing()
    assert {row.name for row in rows} == {*POOLS, *RULES, *PRESETS}
    assert all(row.formula for row in rows)
