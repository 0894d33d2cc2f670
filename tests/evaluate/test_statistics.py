"""Statistics over documents against answers known beforehand."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.evaluate.statistics import bootstrap_gain, calibration, holm, regret, sign_flip, win_rate


def test_equal_bits_are_no_gain() -> None:
    """The same bits on every document: gain 0, an interval of 0, p = 1."""
    bits, n_bytes = np.arange(1.0, 31.0), np.full(30, 10.0)
    gain = bootstrap_gain(bits, bits, n_bytes)
    assert (gain.relative, gain.relative_low, gain.relative_high) == (0.0, 0.0, 0.0)
    assert sign_flip(bits, bits) == 1.0


def test_constant_ratio_has_no_spread() -> None:
    """A tenth fewer bits on every document is a tenth in every resample."""
    theirs = np.random.default_rng(0).uniform(50, 150, 40)
    gain = bootstrap_gain(0.9 * theirs, theirs, np.full(40, 100.0))
    assert gain.relative == pytest.approx(0.1)
    assert gain.relative_low == pytest.approx(0.1)
    assert gain.relative_high == pytest.approx(0.1)
    assert gain.bits_per_byte == pytest.approx(0.1 * theirs.sum() / 4000)


def test_interval_covers_the_truth() -> None:
    """About 95 % of intervals hold the true mean difference (100 trials)."""
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(100):
        theirs = rng.normal(100.0, 1.0, 60)
        gain = bootstrap_gain(theirs - rng.normal(2.0, 4.0, 60), theirs, np.ones(60), n_resamples=500, seed=trial)
        hits += gain.bits_per_byte_low <= 2.0 <= gain.bits_per_byte_high
    assert 87 <= hits <= 100


def test_strata_keep_their_size() -> None:
    """With one constant difference per domain, resampling inside domains changes nothing."""
    theirs = np.full(20, 10.0)
    ours = theirs - np.repeat([1.0, 3.0], [5, 15])
    domains = ["a"] * 5 + ["b"] * 15
    stratified = bootstrap_gain(ours, theirs, np.ones(20), domains)
    assert stratified.bits_per_byte_low == pytest.approx(stratified.bits_per_byte_high)
    plain = bootstrap_gain(ours, theirs, np.ones(20))
    assert plain.bits_per_byte_high - plain.bits_per_byte_low > 0.1


def test_one_document_has_no_interval() -> None:
    """One document gives a gain but no interval; none is an error."""
    gain = bootstrap_gain(np.array([9.0]), np.array([10.0]), np.array([10.0]))
    assert gain.relative == pytest.approx(0.1)
    assert np.isnan(gain.relative_low)
    with pytest.raises(ValueError, match="at least one document"):
        bootstrap_gain(np.zeros(0), np.zeros(0), np.zeros(0))


def test_sign_flip_by_hand() -> None:
    """Four equal differences: 2 of 16 flips are as extreme, so p is close to 1/8."""
    assert sign_flip(np.zeros(4), np.ones(4)) == pytest.approx(0.125, abs=0.015)
    assert sign_flip(np.zeros(40), np.ones(40)) == pytest.approx(1 / 10_001)


def test_holm_by_hand() -> None:
    """Holm's example: each p times what is left, never falling, at most 1."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_win_rate_and_regret() -> None:
    """Ties are apart; regret is measured against the best expert of each document."""
    assert win_rate(np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 2.0, 2.0, 5.0])) == (0.5, 0.25)
    assert regret(np.array([5.0, 5.0]), np.array([[4.0, 9.0], [6.0, 7.0]])).tolist() == [1.0, -2.0]


def test_calibration() -> None:
    """A law that is right as often as it says has ECE near 0; one that is always sure and half right has ½."""
    rng = np.random.default_rng(2)
    confidence = rng.uniform(0.2, 1.0, 20_000)
    honest = calibration(confidence, rng.random(20_000) < confidence, np.zeros(20_000, np.float32))
    assert honest.ece < 0.02
    sure = calibration(np.ones(1000), np.arange(1000) % 2 == 0, np.full(1000, 0.5, np.float32))
    assert sure.ece == pytest.approx(0.5)
    assert (sure.accuracy, sure.brier) == (0.5, 0.5)


def test_a_lone_document_of_a_domain_is_not_taken_for_certain():
    """With one document per domain the interval is as wide as that of the documents regardless of domains."""
    ours, theirs, sizes = np.array([90.0, 100.0, 95.0]), np.full(3, 100.0), np.full(3, 50.0)
    lone = bootstrap_gain(ours, theirs, sizes, ["a", "b", "c"])
    assert lone == bootstrap_gain(ours, theirs, sizes)
    assert lone.relative_low < lone.relative < lone.relative_high
