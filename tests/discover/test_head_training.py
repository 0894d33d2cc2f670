"""The router's head: gradients, planted truths, and what is saved is what is loaded."""

import numpy as np
import pytest

from gguf_fusion.discover.head_training import Examples, Fit, loss_and_gradient, train
from gguf_fusion.errors import ModelFileError
from gguf_fusion.router.head import EXTRAS, Head, extras_size, features, fused

S, D = 11, 6


def examples(n, seed, make):
    rng = np.random.default_rng(seed)
    hidden, laws, router, came = zip(*(make(rng) for _ in range(n)), strict=True)
    return Examples(np.array(hidden), np.array(laws, np.float32), np.array(router, np.float32), np.array(came))


def random_step(rng):
    laws = np.log(rng.dirichlet(np.full(S, 0.5), 3))
    return rng.normal(size=D), laws, np.log(rng.dirichlet(np.full(S, 0.5))), int(rng.integers(S))


def perfect_in_its_domain(rng):
    """Three domains, one expert sure of each; the hidden state tells the domain through noise."""
    domain, symbol = int(rng.integers(3)), int(rng.integers(S))
    laws = np.log(rng.dirichlet(np.full(S, 0.5), 3))
    sure = np.full(S, 0.02 / (S - 1))
    sure[symbol] = 0.98
    laws[domain] = np.log(sure)
    hidden = 0.25 * rng.normal(size=D)
    hidden[domain] += 1.5
    return hidden, laws, np.full(S, -np.log(S)), symbol


def nobody_covers_it(rng):
    """Experts know the symbol's half only, the router its parity only: together they know it."""
    symbol = int(rng.integers(8))
    half = np.where((np.arange(8) < 4) == (symbol < 4), 0.24, 0.01)
    parity = np.where(np.arange(8) % 2 == symbol % 2, 0.24, 0.01)
    laws = np.log(np.stack([half, half, np.full(8, 0.125)]))
    return rng.normal(size=D), laws, np.log(parity), symbol


def law_of(fit, mean, scale, data, *, hard, lam=None):
    head = Head(("a", "b", "c"), "r", "", fit.w, fit.c, mean, scale, fit.lam)
    omega = head.weights(data.features)
    lam = fit.lam if lam is None else lam
    return omega, fused(omega, lam, data.laws.astype(np.float64), data.router.astype(np.float64), hard=hard)


def bits(law, came):
    return -law[np.arange(len(came)), came].mean() / np.log(2.0)


def test_gradient_is_that_of_the_loss():
    """Analytic gradients of W, c and lambda agree with differences of the loss."""
    data = examples(40, 0, random_step)
    rng = np.random.default_rng(1)
    fit = Fit(rng.normal(size=(3, D)), rng.normal(size=3), 0.3)
    rows = np.arange(40)
    _, gradient = loss_and_gradient(fit, data.features, data, rows)
    h = 1e-6

    def loss(w=0.0, c=0.0, lam=0.0):
        return loss_and_gradient(Fit(fit.w + w, fit.c + c, fit.lam + lam), data.features, data, rows)[0]

    for i, j in ((0, 0), (1, 3), (2, 5)):
        step = np.zeros((3, D))
        step[i, j] = h
        assert (loss(w=step) - loss(w=-step)) / (2 * h) == pytest.approx(gradient.w[i, j], abs=1e-5)
    step = np.array([0.0, h, 0.0])
    assert (loss(c=step) - loss(c=-step)) / (2 * h) == pytest.approx(gradient.c[1], abs=1e-5)
    assert (loss(lam=h) - loss(lam=-h)) / (2 * h) == pytest.approx(gradient.lam, abs=1e-5)


def test_experts_perfect_on_one_domain_each_are_told_apart():
    """The router picks the right expert in 98 % of steps and gets 95 % of what an oracle gains over the best expert."""
    fit_on, dev, test = (examples(n, seed, perfect_in_its_domain) for seed, n in ((0, 1500), (1, 500), (2, 1000)))
    fit, mean, scale = train(fit_on, dev, seed=0)
    omega, law = law_of(fit, mean, scale, test, hard=True)
    at = np.arange(1000)
    given = test.laws[at, :, test.came]
    # the right expert is the one that is sure
    assert (omega.argmax(axis=1) == test.laws.max(axis=2).argmax(axis=1)).mean() >= 0.98
    single = (-given.mean(axis=0) / np.log(2.0)).min()
    oracle = -given.max(axis=1).mean() / np.log(2.0)
    assert single - bits(law, test.came) >= 0.95 * (single - oracle)


def test_complementary_law_solves_what_no_expert_covers():
    """With the router's own law the symbol is known; without it one bit per symbol is missing."""
    fit_on, dev, test = (examples(n, seed, nobody_covers_it) for seed, n in ((0, 800), (1, 300), (2, 500)))
    with_it, mean, scale = train(fit_on, dev, seed=0)
    without, mean0, scale0 = train(fit_on, dev, seed=0, complementary=False)
    assert without.lam == 0.0
    alone = bits(law_of(without, mean0, scale0, test, hard=False)[1], test.came)
    both = bits(law_of(with_it, mean, scale, test, hard=False)[1], test.came)
    assert alone > 2.0
    assert both < alone - 0.8


def test_nothing_to_learn_keeps_the_uniform_head():
    """Where hidden states say nothing, early stopping keeps weights near uniform instead of noise."""
    fit_on, dev = (examples(n, seed, random_step) for seed, n in ((0, 400), (1, 400)))
    fit, mean, scale = train(fit_on, dev, seed=0)
    omega, law = law_of(fit, mean, scale, dev, hard=False)
    uniform = Fit(np.zeros_like(fit.w), np.zeros_like(fit.c), 0.0)
    assert bits(law, dev.came) <= bits(law_of(uniform, mean, scale, dev, hard=False)[1], dev.came) + 1e-9
    assert omega.min() > 0.05


def test_training_is_deterministic():
    """The same seed gives the same head, bit for bit."""
    fit_on, dev = (examples(300, seed, perfect_in_its_domain) for seed in (0, 1))
    one, two = (train(fit_on, dev, seed=4)[0] for _ in range(2))
    np.testing.assert_array_equal(one.w, two.w)
    assert one.lam == two.lam


@pytest.mark.parametrize("hard", [True, False])
def test_routed_laws_sum_to_one(hard):
    """Both forms are normalised, also where an expert rules symbols out."""
    data = examples(20, 3, random_step)
    laws = data.laws.astype(np.float64)
    laws[:5, 0, 0] = -np.inf
    omega = np.random.default_rng(0).dirichlet(np.ones(3), 20)
    law = fused(omega, 0.4, laws, data.router.astype(np.float64), hard=hard)
    np.testing.assert_allclose(np.exp(law).sum(axis=1), 1.0, atol=1e-9)


def test_features_have_the_promised_size():
    """Extra features come in the named order and width, and are finite."""
    data = examples(8, 5, random_step)
    x = features(EXTRAS, data.features, np.arange(8), data.laws, np.ones((8, 3)))
    assert x.shape == (8, D + extras_size(EXTRAS, 3))
    assert np.isfinite(x).all()


def test_saved_is_loaded(tmp_path):
    """A head comes back with its numbers, names and card; other files are refused with a reason."""
    rng = np.random.default_rng(0)
    head = Head(
        ("a", "b"), "r", "ab12", rng.normal(size=(2, 4)), rng.normal(size=2), rng.normal(size=4), np.ones(4), 0.25,
        hard=False, extras=("since",), card={"dev_bpb": 1.5},
    )  # fmt: skip
    path = tmp_path / "sub" / "router.safetensors"
    head.save(path)
    again = Head.load(path)
    np.testing.assert_array_equal(again.w, head.w)
    assert (again.experts, again.router, again.lam, again.hard, again.extras) == (
        ("a", "b"),
        "r",
        0.25,
        False,
        ("since",),
    )
    assert again.card == {"dev_bpb": 1.5}
    path.write_bytes(b"GGUF nonsense")
    with pytest.raises(ModelFileError, match="expected a router written by"):
        Head.load(path)
    with pytest.raises(ModelFileError, match="expected a router written by"):
        Head.load(tmp_path / "missing")
