"""Pools, weight rules, strategy expressions: laws over the whole registry."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.errors import ExpertFailedError, StrategyError
from gguf_fusion.expressions import DEFAULT, PRESETS, listing, parse
from gguf_fusion.fusion import POOLS, normalised
from gguf_fusion.weights import RULES

EVERY = sorted(
    {
        *(DEFAULT, *PRESETS, *POOLS),
        *(f"{pool}(w={rule})" for pool in ("linear", "loglinear", "route") for rule in RULES),
        "power(r=inf)", "linear(w=entropy(form=inverse))", "linear(w=prompt(fit=em))",
        "gate(inner=loglinear)", "linear(smooth=0.1)", "linear(w=role(task=code))",
    }
)  # fmt: skip

NOT_IDEMPOTENT = {"product", "contrast", "linear(smooth=0.1)"}
"""Strategies that sharpen or smooth: copies of one expert are not that expert."""

NOT_ONE_HOT = {"linear(smooth=0.1)"}


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
    if expression not in NOT_ONE_HOT:
        np.testing.assert_allclose(fused_after(expression, [0.0, 1.0, 0.0], rows), normalised(rows[1])[0], atol=1e-9)
    broken = rows.copy()
    broken[2] = np.nan
    np.testing.assert_allclose(
        fused_after(expression, [0.4, 0.6, 0.0], broken), fused_after(expression, [0.4, 0.6], rows[:2]), atol=1e-12
    )


@pytest.mark.parametrize("expression", [e for e in EVERY if e not in NOT_IDEMPOTENT])
def test_copies_of_one_expert(expression: str) -> None:
    """Several copies of one expert are that expert."""
    row = laws(1, 3)[0]
    np.testing.assert_allclose(
        fused_after(expression, [0.2, 0.5, 0.3], np.stack([row] * 3)), normalised(row)[0], atol=1e-9
    )


@pytest.mark.parametrize(
    "expression",
    [*(f"{pool}(w={rule})" for pool in ("linear", "route") for rule in RULES), "power(r=2)", "max", "gate"],
)
def test_never_above_the_best(expression: str) -> None:
    """Linear pools, routers, the gate and power means with r >= 1 give no symbol more than its best expert."""
    rows = laws(3, 4)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    assert (fused_after(expression, [0.2, 0.5, 0.3], rows) <= rows.max(axis=0) + 1e-9).all()


@pytest.mark.parametrize("expression", ["linear", "power(r=0.75)", "power(r=0.5)", "power(r=0.1)", "loglinear"])
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
        ("linear(w=evidence(eta=200))", r"eta lies in \[0, 10\], got 200"),
        ("linear(w=entropy(form=odd))", "form is one of power, inverse, got odd"),
        ("loglinear(a=3)", "expects a list of numbers"),
        ("loglinear(a=[1, 2)", "expected a number or a name in a list"),
        ("loglinear(a=[1, 2", "closing bracket"),
        ("linear(w=cascade(order=[1]))", "expects a list of experts' names"),
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


# ---- plain reference implementations, step by step, in probabilities ---------------------------------------------


def mean(p, w):
    return w @ p


def geometric(p, w):
    return np.prod(p ** w[:, None], axis=0)


def entropy_bits(p):
    return -(p * np.log2(p)).sum(axis=1)


REFERENCES = {
    "average": mean,
    "sqrt-product": geometric,
    "product": lambda p, w: np.prod(p ** (3 * w[:, None]), axis=0),
    "harmonic": lambda p, w: 1.0 / (w @ (1.0 / p)),
    "power(r=0.5)": lambda p, w: (w @ np.sqrt(p)) ** 2,
    "min": lambda p, w: p.min(axis=0),
    "max": lambda p, w: p.max(axis=0),
    "adaptive": lambda p, w: mean(p, norm(w * 2.0 ** -entropy_bits(p))),
    "linear(w=entropy(form=inverse))": lambda p, w: mean(p, norm(w / (entropy_bits(p) + 0.01))),
    "confidence": lambda p, w: mean(p, norm(w * p.max(axis=1))),
    "min-entropy": lambda p, w: p[entropy_bits(p).argmin()],
    "dynamic": lambda p, w: mean(p, np.array([0.8 if i == w.argmax() else 0.1 for i in range(3)])),
    "loglinear(a=[1.5, 0.2, 0.7])": lambda p, w: np.prod(p ** np.array([[1.5], [0.2], [0.7]]), axis=0),
    "linear(tau=[2, 1, 0.5])": lambda p, w: mean(np.array([norm(p[0] ** 0.5), p[1], norm(p[2] ** 2)]), w),
    "linear(smooth=0.1)": lambda p, w: 0.9 * mean(p, w) + 0.1 / p.shape[1],
    "contrast": lambda p, w: np.where(p[2] >= 0.1 * p[2].max(), p[2] ** 1.5 / p[0] ** 0.5, 0.0),
    "proxy": lambda p, w: p[2] * p[1] / p[0],
    "linear(w=role(task=code))": mean,
}


def norm(x):
    return x / x.sum()


@pytest.mark.parametrize("expression", REFERENCES)
def test_equals_the_plain_formula(expression: str) -> None:
    """Strategies without a memory equal their formula written out in probabilities."""
    p, w = np.exp(normalised_rows(laws(3, 11))), np.array([0.2, 0.3, 0.5])
    wanted = norm(REFERENCES[expression](p, w))
    np.testing.assert_allclose(np.exp(fuser(expression, list(w)).fuse(np.log(p)).log_f), wanted, atol=1e-9)


@pytest.mark.parametrize("expression", EVERY)
@pytest.mark.parametrize("n_symbols", [257, 40])
def test_blocks_equal_single_steps(expression: str, n_symbols: int) -> None:
    """A block of given text gives what its steps give one by one, weights and what is remembered included."""
    rng = np.random.default_rng(12)
    n_steps = 60
    rows = np.stack([normalised_rows(laws(3, 200 + t, n_symbols)) for t in range(n_steps)], axis=1)
    came = rng.integers(0, min(n_symbols, 256), n_steps)
    came[[7, 20, 21]] = 32 if n_symbols == 257 else 3
    one, other = (fuser(expression, [0.2, 0.3, 0.5], n_symbols) for _ in range(2))
    law, weights, log_z = one.fuse_block(rows[:, :50].copy(), came[:50])
    for t in range(50):
        here = np.ascontiguousarray(rows[:, t])
        fused = other.fuse(here)
        other.advance(int(came[t]), here, generated=False)
        np.testing.assert_allclose(law[t], fused.log_f, atol=1e-9)
        np.testing.assert_allclose(weights[:, t], fused.weights, atol=1e-9)
        assert abs(log_z[t] - fused.log_z) < 1e-9
    last = np.ascontiguousarray(rows[:, 55])
    np.testing.assert_allclose(one.fuse(last).log_f, other.fuse(last).log_f, atol=1e-9)


def test_presets_differ_and_aliases_agree() -> None:
    """Every preset is a strategy of its own on text with a history; aliases are the very same."""
    rows = [normalised_rows(laws(3, 300 + t)) for t in range(80)]
    came = np.concatenate([np.random.default_rng(0).integers(32, 120, 75), np.full(5, ord("a"))])
    found = {}
    for name in [*PRESETS, *(alias for preset in PRESETS.values() for alias in preset.aliases)]:
        bound = parse(name).bind(3, 257, np.array([0.2, 0.3, 0.5]), ["a", "b", "c"], ["coder", "chat", "prose"])
        bound.hint(b"Write a function that sorts a list")
        for here, symbol in zip(rows, came, strict=True):
            bound.fuse(here)
            bound.advance(int(symbol), here, generated=False)
        agreed = normalised_rows(rows[5] + 9.0 * (np.arange(257) == 65))
        found[name] = np.concatenate([np.exp(bound.fuse(here).log_f) for here in (rows[3], agreed)])
    for preset in PRESETS.values():
        for alias in preset.aliases:
            np.testing.assert_allclose(found[alias], found[preset.name], atol=1e-12)
    names = list(PRESETS)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert np.abs(found[one] - found[other]).max() > 1e-3, (one, other)


@pytest.mark.parametrize("expression", ["sqrt-product", "product", "min", "harmonic"])
def test_a_zero_rules_out(expression: str) -> None:
    """In pools that multiply, a symbol that one expert rules out has probability 0 in the fused law."""
    rows = normalised_rows(laws(3, 13))
    rows[1, 9] = -np.inf
    fused = fuser(expression, [0.2, 0.3, 0.5]).fuse(rows)
    assert fused.log_f[9] == -np.inf
    assert abs(np.exp(fused.log_f).sum() - 1.0) < 1e-9


def test_sphere_is_a_power_mean_for_two_equal_weights_only() -> None:
    """The spherical mean equals the power mean of exponent ½ at N = 2, w = (½, ½), and nowhere else in general."""
    rows = normalised_rows(laws(2, 14))
    same = fuser("slerp", [0.5, 0.5]).fuse(rows).log_f, fuser("power(r=0.5)", [0.5, 0.5]).fuse(rows).log_f
    np.testing.assert_allclose(np.exp(same[0]), np.exp(same[1]), atol=1e-8)
    other = fuser("slerp", [0.2, 0.8]).fuse(rows).log_f, fuser("power(r=0.5)", [0.2, 0.8]).fuse(rows).log_f
    assert np.abs(np.exp(other[0]) - np.exp(other[1])).max() > 1e-4


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [0.1, 0.0, 0.9], [0.25, 0.75]])
def test_spherical_mean_has_no_pull_left(weights: list[float]) -> None:
    """At the mean on the sphere the weighted log maps of all experts add up to nothing, zeros and copies included."""
    rows = normalised_rows(laws(len(weights), 14))
    rows[0, :5] = -np.inf
    rows = normalised_rows(rows)
    mean = np.exp(0.5 * fuser("slerp", weights).fuse(rows).log_f)
    roots = np.exp(0.5 * rows)
    angles = np.arccos(roots @ mean)
    pull = sum(
        w * angle / np.sin(angle) * (root - np.cos(angle) * mean)
        for w, root, angle in zip(weights, roots, angles, strict=True)
    )
    assert np.abs(pull).max() < 1e-9


def test_fixed_share_bound() -> None:
    """Against every sequence of experts with few switches, fixed share keeps its bound in bits."""
    rng, alpha, n = np.random.default_rng(15), 0.02, 150
    bound, bits = fuser(f"linear(w=evidence(eta=1, gamma=1, alpha={alpha}))", [1.0, 1.0]), 0.0
    good = np.repeat(rng.integers(0, 2, 3), n // 3)
    own = 0.0
    for t in range(n):
        rows = normalised_rows(laws(2, 400 + t, 257))
        symbol = int(rows[good[t]].argmax())
        bits -= bound.fuse(rows).log_f[symbol] / np.log(2)
        own -= rows[good[t], symbol] / np.log(2)
        bound.advance(symbol, rows, generated=False)
    k = int((np.diff(good) != 0).sum())
    # within a segment the start costs log2(1/w0), a switch log2(1/alpha) and log2(1/w0), staying the rest
    limit = (k + 1) * np.log2(2) + k * np.log2(1 / alpha) + (n - 1 - k) * np.log2(1 / (1 - alpha))
    assert bits <= own + limit + 1e-6


def test_a_noise_expert_loses_its_weight() -> None:
    """The evidence weight of an expert that knows nothing goes to zero."""
    bound = fuser("bayes", [0.5, 0.5])
    for t in range(200):
        rows = np.stack([normalised_rows(laws(1, 500 + t))[0], np.full(257, -np.log(257))])
        bound.fuse(rows)
        bound.advance(int(rows[0].argmax()), rows, generated=False)
    assert bound.fuse(rows).weights[1] < 1e-9


def test_roles_move_weight_to_the_expert_of_the_task() -> None:
    """A prompt about code gives the coder 0.6 nearly, a named task exactly; nothing known leaves weights alone."""
    roles = ["coder", "chat", "prose"]

    def weights(text: bytes, task: str = "") -> np.ndarray:
        bound = parse("role").bind(3, 257, np.ones(3), ["a", "b", "c"], roles)
        bound.hint(text, task)
        return bound.fuse(normalised_rows(laws(3, 16))).weights

    assert weights(b"```python\nprint(1)\n```")[0] == pytest.approx(0.6)
    assert weights(b"anything", "code")[0] == pytest.approx(0.6)
    assert weights(b"Write a short poem about a river.")[0] < weights(b"Write a program that sorts.")[0]
    np.testing.assert_allclose(weights(b""), np.full(3, 1 / 3))


def test_experts_are_named_where_a_pool_needs_them() -> None:
    """Contrast takes experts by name; a name that is not there is refused with those that are."""
    rows = normalised_rows(laws(3, 17))
    named = fuser("contrast(expert=e0, amateur=e1)", [0.2, 0.3, 0.5]).fuse(rows).log_f
    p = np.exp(rows)
    wanted = norm(np.where(p[0] >= 0.1 * p[0].max(), p[0] ** 1.5 / p[1] ** 0.5, 0.0))
    np.testing.assert_allclose(np.exp(named), wanted, atol=1e-9)
    with pytest.raises(StrategyError, match="amateur=nobody is no expert with a weight here; there are e0, e1, e2"):
        fuser("contrast(amateur=nobody)", [0.2, 0.3, 0.5]).fuse(rows)


def test_affine_exponents() -> None:
    """The exponents are b + M w, at least 0; without b and M it is the log-linear pool; weight 0 takes its row out."""
    p, w = np.exp(normalised_rows(laws(3, 18))), np.array([0.2, 0.3, 0.5])
    b, m = np.array([0.1, 0.2, -5.0]), np.array([[0.5, 0.1, 0.0], [-0.2, 0.9, 0.3], [0.0, 0.0, 1.0]])
    exponents = np.maximum(b + m @ w, 0.0)
    assert exponents[2] == 0.0
    text = f"affine(b=[{', '.join(map(str, b))}], m=[{', '.join(map(str, m.ravel()))}])"
    wanted = norm(np.prod(p ** exponents[:, None], axis=0))
    np.testing.assert_allclose(np.exp(fuser(text, list(w)).fuse(np.log(p)).log_f), wanted, atol=1e-9)
    plain = fuser("loglinear", list(w)).fuse(np.log(p)).log_f
    np.testing.assert_allclose(fuser("affine", list(w)).fuse(np.log(p)).log_f, plain, atol=1e-12)
    two = fuser(text, [0.4, 0.6, 0.0]).fuse(np.log(p)).log_f
    pair = norm(np.prod(p[:2] ** np.maximum(b + m @ [0.4, 0.6, 0.0], 0.0)[:2, None], axis=0))
    np.testing.assert_allclose(np.exp(two), pair, atol=1e-9)
    for wrong in ("affine(b=[1, 2])", "affine(m=[1, 0, 0, 1])"):
        with pytest.raises((StrategyError, ValueError), match="expected"):
            fuser(wrong, list(w)).fuse(np.log(p))
