"""Sampling: ranges, identities of the off values, and the law of the draws."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.errors import SamplingError
from gguf_fusion.sampling import Sampler, SamplingParams, allowed, truncated

LAW = np.log(np.random.default_rng(0).dirichlet(np.full(20, 0.5)))


def test_all_off_is_plain_sampling() -> None:
    """With everything off, 50,000 draws follow the law (chi-square)."""
    sampler = Sampler(SamplingParams(temperature=1, min_p=0, seed=1), 20, None)
    counts = np.bincount([sampler.draw(LAW) for _ in range(50_000)], minlength=20)
    expected = 50_000 * np.exp(LAW)
    keep = expected > 5
    assert (((counts - expected) ** 2 / expected)[keep]).sum() < 50.0


def test_greedy_ignores_the_seed_and_breaks_ties_low() -> None:
    """Temperature 0 takes the first of the most probable symbols, whatever the seed."""
    law = np.log(np.array([0.1, 0.4, 0.4, 0.1]))
    assert {Sampler(SamplingParams(temperature=0, seed=s), 4, None).draw(law) for s in range(5)} == {1}


def test_seeds() -> None:
    """One seed gives one text; 0 is a seed; no seed gives a fresh one that can be printed."""
    one, two = (Sampler(SamplingParams(seed=0), 20, None) for _ in range(2))
    assert [one.draw(LAW) for _ in range(50)] == [two.draw(LAW) for _ in range(50)]
    fresh = {SamplingParams().seeded().seed for _ in range(5)}
    assert None not in fresh
    assert len(fresh) > 1


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": 10**9}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_off_values_change_nothing(off: dict[str, float]) -> None:
    """Every stage has a value at which the law stays bit-identical."""
    mass = np.exp(LAW)
    np.testing.assert_array_equal(truncated(mass, SamplingParams(**{"min_p": 0.0, **off})), mass)


def test_truncation() -> None:
    """top-k, top-p and min-p keep what they should, the most probable symbol always."""
    mass = np.array([0.5, 0.3, 0.15, 0.05])
    assert (truncated(mass, SamplingParams(top_k=2, min_p=0)) > 0).tolist() == [True, True, False, False]
    assert (truncated(mass, SamplingParams(top_p=0.6, min_p=0)) > 0).tolist() == [True, True, False, False]
    assert (truncated(mass, SamplingParams(top_p=0.0, min_p=0)) > 0).tolist() == [True, False, False, False]
    assert (truncated(mass, SamplingParams(min_p=0.2)) > 0).tolist() == [True, True, True, False]


class Allow:
    """A constraint that allows the same symbols at every step and remembers what was drawn."""

    def __init__(self, *symbols: int) -> None:
        self.bits = np.array([sum(1 << symbol for symbol in symbols)], np.int32)
        self.seen: list[int] = []

    def mask(self) -> np.ndarray:
        return self.bits

    def advance(self, symbol: int) -> None:
        self.seen.append(symbol)


def test_constraint() -> None:
    """Only allowed symbols are drawn, and the constraint hears of them; one that allows nothing is an error."""
    rule = Allow(1, 3)
    assert allowed(rule.bits, 4).tolist() == [False, True, False, True]
    sampler = Sampler(SamplingParams(temperature=1, min_p=0, seed=3), 20, None, constraint=rule)
    assert {sampler.draw(LAW) for _ in range(200)} <= {1, 3}
    sampler.observe(3)
    assert rule.seen == [3]
    with pytest.raises(SamplingError, match="allowed symbol"):
        Sampler(SamplingParams(), 20, None, constraint=Allow()).draw(LAW)


def test_bias() -> None:
    """A bias of 100 makes a symbol certain and one of -100 makes it vanish; symbols and values have their limits."""
    least, most = int(LAW.argmin()), int(LAW.argmax())
    sampler = Sampler(SamplingParams(temperature=1, min_p=0, seed=3), 20, None, bias={least: 100.0})
    assert {sampler.draw(LAW) for _ in range(50)} == {least}
    sampler = Sampler(SamplingParams(temperature=1, min_p=0, seed=3), 20, None, bias={most: -100.0})
    assert most not in {sampler.draw(LAW) for _ in range(200)}
    for wrong in ({20: 1.0}, {-1: 1.0}, {3: 101.0}, {3: float("nan")}):
        with pytest.raises(SamplingError, match="logit_bias"):
            Sampler(SamplingParams(), 20, None, bias=wrong)


def test_repeat_penalty() -> None:
    """A repeated n-gram loses probability whatever constant is added to the law; END is exempt."""
    law = np.log(np.full(5, 0.2))
    sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=2.0), 5, 4)
    for symbol in (0, 1, 2, 0, 1, 2, 0):
        sampler.observe(symbol)
    sampler.observe(4)
    assert sampler._penalised(law)[1] == pytest.approx(law[1] - 2.0)
    assert sampler._penalised(law)[[0, 2, 3, 4]].tolist() == law[[0, 2, 3, 4]].tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"temperature": -0.1},
        {"temperature": "0.7"},
        {"temperature": True},
        {"top_p": 1.1},
        {"min_p": float("inf")},
        {"top_k": -1},
        {"top_k": 1.5},
        {"seed": -1},
        {"seed": 2**32},
        {"max_bytes": -5},
        {"stop": ("",)},
        {"stop": "x"},
        {"repeat_penalty": None},
    ],
)
def test_ranges(wrong: dict[str, object]) -> None:
    """A value outside its interval is refused; the message names the parameter and the value."""
    [(name, value)] = wrong.items()
    with pytest.raises(SamplingError, match=name):
        SamplingParams(**wrong)
    assert value is not None or name == "repeat_penalty"


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    """Close to 0 the law is all on the most probable symbol; nothing overflows on the way there."""
    for temperature in (5e-324, 1e-308, 1e-9):
        sampler = Sampler(SamplingParams(temperature=temperature, min_p=0.0, seed=1), 20, None)
        assert [sampler.draw(LAW) for _ in range(5)] == [int(LAW.argmax())] * 5
