"""The complementary preference loss: its slope, planted preferences, and none."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.discover.head_training import Examples
from gguf_fusion.discover.preferences import Answers, Pair, pairs_of, refine
from gguf_fusion.router.head import Head

S, N = 6, 40


def head_of(lam: float = 0.5, *, hard: bool = False) -> Head:
    """A head that weighs two experts alike."""
    return Head(("a", "b"), "r", "", np.zeros((2, 3)), np.zeros(2), np.zeros(3), np.ones(3), lam, hard=hard)


def answer(rng: np.random.Generator, source: str) -> Examples:
    """Symbols drawn from the experts' law, from the router's, or from neither."""
    laws = np.log(rng.dirichlet(np.full(S, 0.7), (N, 2)))
    router = np.log(rng.dirichlet(np.full(S, 0.7), N))
    law = {"experts": laws.mean(axis=1), "router": router, "neither": np.zeros((N, S))}[source]
    probs = np.exp(law) / np.exp(law).sum(axis=1, keepdims=True)
    came = np.array([rng.choice(S, p=row) for row in probs])
    return Examples(rng.normal(size=(N, 3)), laws.astype(np.float32), router.astype(np.float32), came)


def planted(better: str, worse: str, seed: int, *, shuffled: bool = False) -> tuple[Answers, list[Pair], Head]:
    """60 prompts with an answer of either source each."""
    rng = np.random.default_rng(seed)
    examples, pairs = [], []
    for k in range(60):
        examples += [answer(rng, better), answer(rng, worse)]
        places = (2 * k, 2 * k + 1)
        if shuffled and rng.random() < 0.5:
            places = places[::-1]
        pairs.append(Pair(str(k), *places))
    head = head_of()
    return Answers(examples, head), pairs, head


@pytest.mark.parametrize(("better", "worse", "sign"), [("router", "experts", 1.0), ("experts", "router", -1.0)])
def test_a_preference_for_the_routers_mass_moves_lambda_its_way(better: str, worse: str, sign: float) -> None:
    """Where only more (or less) of the complementary law ranks the pairs, lambda goes there and held-out loss falls."""
    answers, pairs, head = planted(better, worse, 1)
    refined = refine(head, answers, pairs[:30], pairs[30:45])
    assert sign * (refined.lam - head.lam) > 0.15
    test = pairs[45:]
    assert answers.judged(refined.lam, test).loss < answers.judged(head.lam, test).loss
    margins = [answers.judged(lam, test).margins.mean() for lam in (head.lam, refined.lam)]
    assert margins[1] > margins[0]
    np.testing.assert_array_equal(refined.w, head.w)


@pytest.mark.parametrize("seed", range(4))
def test_without_a_signal_nothing_changes_beyond_noise(seed: int) -> None:
    """Where chance says which answer is better, lambda stays about where it was and held-out loss at ln 2."""
    answers, pairs, head = planted("neither", "neither", seed)
    refined = refine(head, answers, pairs[:30], pairs[30:45])
    assert abs(refined.lam - head.lam) < 0.3
    differences = answers.judged(refined.lam, pairs[45:]).margins - answers.judged(head.lam, pairs[45:]).margins
    assert abs(differences.mean()) <= 3.0 * differences.std() / np.sqrt(len(differences)) + 1e-12
    assert abs(answers.judged(refined.lam, pairs[45:]).loss - np.log(2.0)) < 0.1


@pytest.mark.parametrize("hard", [True, False])
def test_the_slope_is_that_of_the_loss(hard: bool) -> None:
    """The derivative in lambda agrees with finite differences, for both forms of selection."""
    rng = np.random.default_rng(0)
    answers = Answers([answer(rng, "router") for _ in range(6)], head_of(hard=hard))
    pairs = [Pair("p", 0, 1), Pair("p", 2, 3), Pair("q", 4, 5)]
    step = 1e-5
    (up, _), (down, _) = (answers.loss(0.8 + d, pairs) for d in (step, -step))
    assert answers.loss(0.8, pairs)[1] == pytest.approx((up - down) / (2 * step), rel=1e-5)
    assert answers.loss(0.5, pairs)[0] == pytest.approx(np.log(2.0))


def test_pairs_are_of_one_prompt_and_texts_count_once() -> None:
    """Passed answers are paired with failed ones of their prompt; copies and empty texts make no pair."""
    texts = [("p", True, b"yes"), ("p", True, b"yes"), ("p", False, b"no"), ("q", False, b"no"), ("p", False, b"")]
    assert pairs_of(texts) == [Pair("p", 0, 2)]
    many = [("p", k % 2 == 0, bytes([65 + k])) for k in range(20)]
    assert 0 < len(pairs_of(many, most=8)) <= 8
