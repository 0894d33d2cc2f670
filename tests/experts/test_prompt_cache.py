"""Texts that are kept while others are read: the right one comes back, and never more bytes than allowed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gguf_fusion.arrays import I32
from gguf_fusion.experts.prompt_cache import LEAST_TOKENS, PromptCache, n_shared

N = 2 * LEAST_TOKENS


def path(seed: int, n: int = N) -> I32:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def longer(ids: I32, n: int = 10) -> I32:
    return np.concatenate([ids, path(99, n)])


def swap(cache: PromptCache, resident: I32, to: I32, *, size: int = 100, owner: str = "e", whole: bool = False):
    """One exchange; the state's bytes all are the sum of its path, so that a mix-up shows."""
    state = np.full(size, int(resident.sum()) % 251, np.uint8)
    return cache.exchange(owner, resident, to, lambda: size, lambda: state, whole=whole)


def test_a_text_comes_back_with_its_state():
    """What was put aside is given for a prompt that goes on from it, and only to its owner."""
    cache = PromptCache(1000)
    assert swap(cache, path(1), path(2)) is None
    assert swap(cache, path(2), path(3)) is None
    found = swap(cache, path(3), longer(path(1)))
    assert found is not None
    assert (found.path == path(1)).all()
    assert (found.state == path(1).sum() % 251).all()
    assert swap(cache, path(0, 0), longer(path(1)), owner="other") is None
    assert len(cache) == 3


def test_short_losses_and_short_gains_are_not_worth_it():
    """A few tokens are read again: nothing is kept for them, and nothing brought back."""
    cache = PromptCache(1000)
    assert swap(cache, path(1), path(1)[: N - LEAST_TOKENS + 1]) is None
    assert len(cache) == 0
    swap(cache, path(1), path(2))
    assert swap(cache, path(2), path(1)[: LEAST_TOKENS - 1]) is None
    assert swap(cache, path(1)[:LEAST_TOKENS], longer(path(1)[: N - 1])) is None
    assert swap(cache, path(2), path(1)[:LEAST_TOKENS]) is not None


def test_never_more_bytes_than_allowed():
    """The least recently used text makes room; one that is too large alone is not kept."""
    cache = PromptCache(300)
    for seed in (1, 2, 3):
        swap(cache, path(seed), path(9))
    assert cache.n_bytes == 300
    assert swap(cache, path(0, 0), path(1)) is not None  # 1 was used: 2 is the oldest now
    swap(cache, path(4), path(9))
    assert cache.n_bytes == 300
    assert swap(cache, path(0, 0), path(2)) is None
    assert all(swap(cache, path(0, 0), path(seed)) is not None for seed in (1, 3, 4))
    swap(cache, path(5), path(9), size=301)
    assert swap(cache, path(0, 0), path(5)) is None
    assert len(cache) == 3


def test_a_text_that_grows_is_kept_once():
    """The longer text takes the place of its beginning; the beginning does not come on top of it."""
    cache = PromptCache(1000)
    swap(cache, path(1), path(9))
    swap(cache, longer(path(1)), path(9))
    assert len(cache) == 1
    swap(cache, path(1), path(9))
    assert len(cache) == 1
    found = swap(cache, path(0, 0), longer(path(1), 40))
    assert found is not None
    assert len(found.path) == N + 10


def test_states_that_cannot_be_cut_are_used_as_a_whole():
    """A recurrent memory gets a text only where the prompt goes on from all of it."""
    cache = PromptCache(1000)
    swap(cache, longer(path(1)), path(9))
    assert swap(cache, path(0, 0), path(1), whole=True) is None
    assert swap(cache, path(0, 0), path(1)) is not None
    assert swap(cache, path(0, 0), longer(path(1), 12), whole=True) is not None


def test_threads_may_share_one():
    """Lanes exchange at the same time; the limit holds, and states stay with their paths."""
    cache, wrong = PromptCache(1500), []

    def work(owner: str) -> None:
        rng = np.random.default_rng(len(owner))
        for _ in range(200):
            one, other = rng.integers(0, 6, 2)
            found = swap(cache, path(int(one)), longer(path(int(other))), owner=owner)
            if found is not None and (found.state != found.path.sum() % 251).any():
                wrong.append(owner)
            if cache.n_bytes > 1500:
                wrong.append("bytes")

    threads = [threading.Thread(target=work, args=("e" * n,)) for n in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(("one", "other", "n"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 4, 3], 1)])
def test_shared_prefix(one, other, n):
    """Tokens that two paths begin with."""
    assert n_shared(np.array(one, np.int32), np.array(other, np.int32)) == n
