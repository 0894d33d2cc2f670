"""Levels for an ensemble: the search equals trying everything, and budgets are kept."""

import itertools

import numpy as np
import pytest

from gguf_fusion.errors import UsageError
from gguf_fusion.expressions import parse
from gguf_fusion.measure import combinations
from gguf_fusion.measure.combinations import Laws, choose

N, S = 300, 12


def some_laws(seed, n_levels=3):
    rng = np.random.default_rng(seed)
    sizes = np.sort(rng.integers(10, 100, n_levels))
    return [Laws(f"Q{i}", int(size), np.log(rng.dirichlet(np.full(S, 0.5), N))) for i, size in enumerate(sizes)]


CAME = np.random.default_rng(0).integers(0, S, N)
SCORED = np.ones(N, np.bool_)


def fused_bpb(picked, strategy):
    fuser = parse(strategy).bind(len(picked), S, np.ones(len(picked)), ["a", "b"][: len(picked)])
    bits = 0.0
    for t in range(N):
        row = np.array([one.logs[t] for one in picked])
        bits -= fuser.fuse(row).log_f[CAME[t]] / np.log(2)
        fuser.advance(int(CAME[t]), row, generated=False)
    return bits / N


@pytest.mark.parametrize("limit", [None, 1])
def test_equals_brute_force(limit, monkeypatch):
    """The best combination within the budget is the one that loops over everything find; climbing finds it here too."""
    if limit:
        monkeypatch.setattr(combinations, "_MOST", limit)
    laws = {"a": some_laws(1), "b": some_laws(2)}
    strategy = "loglinear(w=evidence(eta=0.1, gamma=0.99))"
    budget = 120
    every = [pair for pair in itertools.product(laws["a"], laws["b"]) if sum(one.size_bytes for one in pair) <= budget]
    wanted = min(fused_bpb(pair, strategy) for pair in every)
    found = choose(["a", "b"], laws, CAME, SCORED, parse(strategy), np.ones(2), budget)
    assert found.best.bpb == pytest.approx(wanted, abs=1e-9)
    assert found.best.size_bytes <= budget
    assert found.exhaustive == (limit is None)


def test_even_spending_is_compared():
    """The comparison spends the same share on each expert, on the largest level that fits it."""
    laws = {"a": some_laws(3), "b": some_laws(4)}
    found = choose(["a", "b"], laws, CAME, SCORED, parse("linear"), np.ones(2), 180)
    assert found.even is not None
    for name, level in zip(("a", "b"), found.even.levels, strict=True):
        fitting = [one for one in laws[name] if one.size_bytes <= 90]
        assert level == fitting[-1].level
    assert found.best.bpb <= found.even.bpb


def test_a_budget_that_nothing_fits_is_refused():
    """Where the smallest levels are too large, the message says how much they take."""
    with pytest.raises(UsageError, match="the smallest levels together take"):
        choose(["a"], {"a": some_laws(5)}, CAME, SCORED, parse("linear"), np.ones(1), 1)
