"""The router at work: it follows the hidden state, adds its own law, and says what is missing."""

import numpy as np
import pytest

from gguf_fusion.errors import ExpertFailedError, StrategyError
from gguf_fusion.router.fuser import Routed, running_bits
from gguf_fusion.router.head import RUNNING, Head, extras_size

S, NAMES = 7, ("coder", "chat", "small")


class Expert:
    """Only what the router is asked for."""

    def __init__(self):
        self.hidden, self.n_hidden = None, 0

    def read(self, *state):
        self.hidden, self.n_hidden = np.array([state], np.float32), self.n_hidden + 1


def head(lam=0.0, extras=(), hard=True):
    n = 2 + extras_size(extras, 2)
    w = np.zeros((2, n))
    w[0, 0], w[1, 1] = 5.0, 5.0
    return Head(("coder", "chat"), "small", "", w, np.zeros(2), np.zeros(n), np.ones(n), lam, hard=hard, extras=extras)


def bound(**given):
    fuser = Routed(head(**given)).bind(3, S, np.ones(3), NAMES)
    experts = [Expert(), Expert(), Expert()]
    fuser.attach(experts)
    return fuser, experts[2]


def laws(seed=0):
    return np.log(np.random.default_rng(seed).dirichlet(np.ones(S), 3))


def test_the_hidden_state_chooses_the_expert():
    """With hard selection the law is that of the expert the state points to."""
    fuser, small = bound()
    rows = laws()
    for state, chosen in (((1.0, 0.0), 0), ((0.0, 1.0), 1)):
        small.read(*state)
        fused = fuser.fuse(rows)
        np.testing.assert_allclose(fused.log_f, rows[chosen], atol=1e-9)
        assert fused.weights.argmax() == chosen


def test_soft_selection_mixes_and_the_router_adds_its_law():
    """f is proportional to the product of the experts' laws with weights omega and the router's own to the lambda."""
    fuser, small = bound(lam=0.4, hard=False)
    small.read(0.1, 0.0)
    rows = laws(1)
    omega = np.exp([0.5, 0.0]) / np.exp([0.5, 0.0]).sum()
    wanted = omega @ rows[:2] + 0.4 * rows[2]
    wanted -= np.log(np.exp(wanted).sum())
    np.testing.assert_allclose(fuser.fuse(rows).log_f, wanted, atol=1e-7)


def test_without_a_state_all_experts_count_alike():
    """Before the router has read anything, soft weights are equal."""
    fuser, _ = bound(hard=False)
    np.testing.assert_allclose(fuser.fuse(laws()).weights, [0.5, 0.5, 0.0])


def test_bytes_since_the_state_are_counted():
    """The feature since grows byte by byte and starts again with every new state."""
    fuser, small = bound(extras=("since",))
    small.read(1.0, 0.0)
    rows = laws()
    seen = []
    for _ in range(3):
        fuser.fuse(rows)
        seen.append(fuser._since)
        fuser.advance(0, rows, generated=True)
    small.read(1.0, 0.0)
    fuser.fuse(rows)
    assert (*seen, fuser._since) == (0, 1, 2, 0)


def test_running_bits_step_by_step_equal_those_of_a_whole_text():
    """Recent bits per byte are the same in training and at work; generated symbols do not count."""
    rows = [laws(seed) for seed in range(20)]
    came = np.random.default_rng(3).integers(0, S, 20)
    given = np.array([row[:2, symbol] for row, symbol in zip(rows, came, strict=True)])
    wanted = running_bits(given)
    fuser, _ = bound()
    for t, (row, symbol) in enumerate(zip(rows, came, strict=True)):
        np.testing.assert_allclose(fuser.running(), wanted[t], atol=1e-9)
        fuser.advance(int(symbol), row, generated=False)
    before = fuser.running()
    fuser.advance(0, rows[0], generated=True)
    np.testing.assert_array_equal(fuser.running(), before)
    assert 0.0 < RUNNING < 1.0


def test_snapshots_bring_back_what_was_known():
    """Restoring gives the same law as before."""
    fuser, small = bound(extras=("since", "running"))
    small.read(0.3, 0.1)
    rows = laws(4)
    fuser.fuse(rows)
    fuser.advance(2, rows, generated=False)
    kept, wanted = fuser.snapshot(), fuser.fuse(rows).log_f.copy()
    fuser.advance(3, laws(5), generated=False)
    fuser.restore(kept)
    np.testing.assert_array_equal(fuser.fuse(rows).log_f, wanted)


def test_missing_experts_and_states_are_named():
    """An ensemble without one of the experts, or a router without hidden states, is refused with names."""
    with pytest.raises(StrategyError, match="'chat' is missing"):
        Routed(head()).bind(2, S, np.ones(2), ("coder", "small"))
    fuser = Routed(head()).bind(3, S, np.ones(3), NAMES)
    with pytest.raises(StrategyError, match="no hidden states"):
        fuser.attach([object()] * 3)
    broken = laws()
    broken[1, 2] = np.nan
    with pytest.raises(ExpertFailedError, match="'chat'"):
        bound()[0].fuse(broken)
