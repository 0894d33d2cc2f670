"""Preferences: the loss and its slope, planted truths, and pairs."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.discover.head_training import Examples
from gguf_fusion.discover.preferences import Answers, Pair, pairs_of, refine
from gguf_fusion.router.head import Head

S, D = 8, 3


def head(lam: float) -> Head:
    """Two experts of equal weight, whatever the hidden state."""
    return Head(("a", "b"), "r", "", np.zeros((2, D)), np.zeros(2), np.zeros(D), np.ones(D), lam)


def answer(rng: np.random.Generator, n: int, *, likes: float) -> Examples:
    """An answer whose bytes the experts know nothing about, and the router likes more (or less) than others."""
    came = rng.integers(S, size=n)
    router = np.zeros((n, S))
    router[np.arange(n), came] = likes
    router += 0.3 * rng.normal(size=(n, S))
    router -= np.log(np.exp(router).sum(axis=1, keepdims=True))
    laws = np.full((n, 2, S), -np.log(S))
    return Examples(rng.normal(size=(n, D)), laws.astype(np.float32), router.astype(np.float32), came)


def data(*, likes: float, seed: int, n: int = 24) -> tuple[list[Examples], list[Pair]]:
    """Pairs of a better and a worse answer; of the better ones the router thinks ``likes``."""
    rng = np.random.default_rng(seed)
    found, pairs = [], []
    for k in range(n):
        found += [answer(rng, 20, likes=likes), answer(rng, 20, likes=-likes)]
        pairs.append(Pair(f"prompt {k}", 2 * k, 2 * k + 1))
    return found, pairs


def test_slope_is_that_of_the_loss() -> None:
    """The analytic slope in lambda agrees with differences."""
    found, pairs = data(likes=0.4, seed=0)
    answers = Answers(found, head(0.3))
    for lam in (0.0, 0.3, 1.7):
        h = 1e-5
        difference = (answers.loss(lam + h, pairs)[0] - answers.loss(lam - h, pairs)[0]) / (2 * h)
        assert answers.loss(lam, pairs)[1] == pytest.approx(difference, rel=1e-4, abs=1e-8)


def test_before_any_change_the_loss_is_that_of_a_coin() -> None:
    """Against itself a policy has no margin: ln 2."""
    found, pairs = data(likes=0.4, seed=1)
    assert Answers(found, head(0.7)).loss(0.7, pairs)[0] == pytest.approx(np.log(2.0), abs=1e-12)


def test_what_only_the_router_can_tell_raises_lambda() -> None:
    """Where better answers are those the router likes, its law comes to count, and held-out pairs are ranked right."""
    found, pairs = data(likes=0.5, seed=2, n=40)
    answers = Answers(found, head(0.0))
    refined = refine(head(0.0), answers, pairs[:20], pairs[20:30])
    assert refined.lam > 0.3
    assert answers.judged(refined.lam, pairs[30:]).ranked.mean() >= 0.9


def test_a_router_that_likes_the_wrong_answers_is_silenced() -> None:
    """Its law counted before; afterwards it counts less, but never below nothing."""
    found, pairs = data(likes=-0.5, seed=3, n=40)
    refined = refine(head(1.0), Answers(found, head(1.0)), pairs[:20], pairs[20:30])
    assert 0.0 <= refined.lam < 0.5


def test_without_a_signal_nothing_moves_far() -> None:
    """Pairs that nothing tells apart leave lambda about where it was."""
    found, pairs = data(likes=0.0, seed=4, n=60)
    answers = Answers(found, head(0.5))
    refined = refine(head(0.5), answers, pairs[:30], pairs[30:45])
    assert abs(refined.lam - 0.5) < 0.4
    test = pairs[45:]
    assert answers.loss(refined.lam, test)[0] == pytest.approx(np.log(2.0), abs=0.05)


def test_the_head_learns_from_text_only() -> None:
    """With text the head moves too; without it W and c stay."""
    found, pairs = data(likes=0.5, seed=5, n=20)
    before = head(0.2)
    alone = refine(before, Answers(found, before), pairs[:10], pairs[10:])
    np.testing.assert_array_equal(alone.w, before.w)
    rng = np.random.default_rng(6)
    laws = np.log(rng.dirichlet(np.full(S, 0.5), (600, 2)))
    came = laws[:, 1].argmax(axis=1)  # the second expert is always right
    features = rng.normal(size=(600, D))
    router = np.full((600, S), -np.log(S))
    text = [
        Examples(features[r], laws[r].astype(np.float32), router[r], came[r]) for r in (slice(400), slice(400, 600))
    ]
    both = refine(before, Answers(found, before), pairs[:10], pairs[10:], (text[0], text[1]))
    assert both.weights(features).mean(axis=0)[1] > 0.7


def test_same_seed_same_head() -> None:
    """Nothing in it depends on anything but its arguments."""
    found, pairs = data(likes=0.3, seed=7)
    one, two = (refine(head(0.1), Answers(found, head(0.1)), pairs[:12], pairs[12:]) for _ in range(2))
    assert one.lam == two.lam


def test_pairs_join_right_and_wrong_answers_of_one_prompt() -> None:
    """Equal texts count once, empty ones not at all, and no prompt has more than its share."""
    answers = [
        ("p", True, b"4"), ("p", True, b"4"), ("p", False, b"5"), ("p", False, b""), ("q", True, b"yes"),
        ("r", True, b"a"), *(("r", False, bytes((c,))) for c in range(20)),
    ]  # fmt: skip
    pairs = pairs_of(answers, most=8)
    assert [p for p in pairs if p.prompt == "p"] == [Pair("p", 0, 2)]
    assert not [p for p in pairs if p.prompt == "q"]
    assert len([p for p in pairs if p.prompt == "r"]) <= 8
