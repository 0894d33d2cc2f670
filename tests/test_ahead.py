"""Reading ahead, lazy experts: never another text than without them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from gguf_fusion import Ensemble
from gguf_fusion.ahead import Draft
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.byte_law import SegmentedLaw
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.records import END
from gguf_fusion.reply import Reply
from gguf_fusion.testing import byte_vocabulary, nested_vocabulary
from gguf_fusion.vocabulary import Kind, Vocabulary

NESTED = nested_vocabulary()
SINGLE = Vocabulary.from_pieces(
    [b"a", b"b", b"c", b"ab", b"cc", b"<s>", b"</s>"], [Kind.TEXT] * 5 + [Kind.CONTROL, Kind.END]
)
STRATEGIES = (
    "linear(w=static)",
    "linear(w=evidence(eta=0.1, gamma=0.99))",
    "linear(w=schedule(length=20))",
    "loglinear(w=evidence(eta=0.1, gamma=0.99))",
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.5, "min_p": 0.1, "logit_bias": {END: -100.0, 97: 0.5}},
)


def sharp(seed: int, sharpness: float) -> Callable[[bytes], np.ndarray]:
    """A byte law over a, b, c and END by the last four bytes; experts of near seeds agree more often than not."""

    @cache
    def law(text: bytes) -> np.ndarray:
        common = np.random.default_rng([7, zlib.crc32(text[-4:])]).dirichlet([sharpness] * 3 + [0.02])
        own = np.random.default_rng([seed, zlib.crc32(text[-3:])]).dirichlet([1.0, 1.0, 1.0, 0.05])
        probs = np.zeros(257)
        probs[[*b"abc", END]] = 0.9 * common + 0.1 * own
        return probs

    return lambda text: law(text[-4:])


VOCABULARIES = (NESTED, SINGLE, byte_vocabulary())
LAWS = [cache(SegmentedLaw(vocabulary, sharp(seed, 0.1))) for seed, vocabulary in enumerate(VOCABULARIES)]


def ensemble(weights: list[float] | None = None, **options: Any) -> Ensemble:
    """Three vocabularies, three laws; rows are computed once for all ensembles."""
    experts = [TableExpert(v, law, name=f"e{i}") for i, (v, law) in enumerate(zip(VOCABULARIES, LAWS, strict=True))]
    return Ensemble.from_experts(experts, weights=weights, lanes="serial", **options)


def written(reply: Reply) -> tuple[bytes, str | None]:
    return b"".join(step.data for step in reply), reply.finish_reason


def test_lazy_experts_and_prefetch_give_the_same_bytes() -> None:
    """On 200 seeded prompts, strategies and ways to draw in turn, what saves time changes nothing of the text."""
    plain = ensemble()
    quick = [ensemble(lazy=True), ensemble(prefetch="exact"), ensemble(lazy=True, prefetch="exact")]
    rng = np.random.default_rng(1)
    lazy_steps = saved = 0
    for i in range(200):
        prompt = bytes(rng.choice(list(b"abc"), rng.integers(1, 24)).tolist())
        settings = {"strategy": STRATEGIES[i % 4], "seed": i, "max_bytes": 40, **SAMPLING[i // 4 % 5]}
        expected = written(plain.generate(prompt, **settings))
        for other in quick:
            reply = other.generate(prompt, **settings)
            assert written(reply) == expected, (i, settings)
            lazy_steps += reply.timings.lazy_steps
            saved += reply.timings.rows_saved
    assert lazy_steps > 500
    assert saved > 500


@pytest.mark.parametrize("epsilon", [0.0, 0.15])
def test_catching_up_restores_every_number(epsilon: float) -> None:
    """A symbol that is drawn after lazy ones has the laws, weights and probabilities it would have had anyway."""
    with ensemble(epsilon=epsilon) as plain, ensemble(epsilon=epsilon, lazy=True, prefetch="exact") as lazy:
        for seed in range(20):
            settings: dict[str, Any] = {"strategy": "linear", "seed": seed, "max_bytes": 60, "temperature": 0.8}
            steps = zip(plain.generate(b"abc", **settings), lazy.generate(b"abc", **settings), strict=True)
            for expected, actual in steps:
                assert actual.symbol == expected.symbol
                if np.isfinite(actual.logprob):
                    assert actual.logprob == expected.logprob
                    np.testing.assert_array_equal(actual.expert_logprobs, expected.expert_logprobs)


def test_nothing_is_lazy_where_no_bound_holds() -> None:
    """A log-linear pool, weights by the present laws, and a flattening temperature leave nothing decided."""
    with ensemble(lazy=True) as lazy:
        for strategy, temperature in (("loglinear", 0.0), ("linear(w=entropy)", 0.0), ("linear", 1.5)):
            reply = lazy.generate(b"abc", strategy=strategy, temperature=temperature, seed=1, max_bytes=30)
            assert len(written(reply)[0]) > 0
            assert reply.timings.lazy_steps == 0


def test_steps_with_insight_are_never_lazy() -> None:
    """Whoever asks for probabilities of every step gets all of them."""
    with ensemble(lazy=True) as lazy:
        steps = list(lazy.generate(b"abc", strategy="linear", temperature=0.0, seed=1, max_bytes=30, n_top=2))
    assert np.isfinite([step.logprob for step in steps]).all()


def test_a_guess_is_what_followed_the_same_bytes() -> None:
    """The draft repeats what came after the last place that looks like the end of the text."""
    draft = Draft()
    draft.guessing = True
    draft.begin(b"the quick brown fox jumps. ", fresh=True)
    assert draft.guess() == b""
    draft.push(b"the quick bro")
    assert draft.guess().startswith(b"wn fox jumps. the quick bro")


def test_other_texts_are_forgotten_unless_they_may_be_reused() -> None:
    """A fresh text starts without memories, the next turn of a conversation with those of the last text."""
    for fresh in (True, False):
        draft = Draft()
        draft.guessing = True
        draft.begin(b"the quick brown fox jumps. ", fresh=True)
        draft.begin(b"so the quick bro", fresh=fresh)
        assert bool(draft.guess()) is not fresh


@pytest.mark.model
def test_prefetch_is_exact_on_real_experts() -> None:
    """With the attention kernels under which batches are exact, reading ahead gives the same bytes in fewer calls."""
    prompts = ("def word_counts(path):\n", "one two three four, one two three four, one two")
    options: dict[str, Any] = {"n_threads": 1, "n_ctx": 1024, "lanes": "serial", "offline": True, "flash_attn": True}
    saved = 0
    with Ensemble.from_registry("pocket", prefetch="exact", lazy=True, **options) as loaded:
        for i, prompt in enumerate(prompts):
            for strategy in STRATEGIES[::3]:
                settings: dict[str, Any] = {"strategy": strategy, "seed": i, "max_bytes": 40, "temperature": 0.8 * i}
                loaded.read_ahead(lazy=False, prefetch="off")
                expected = written(loaded.generate(prompt, **settings))
                loaded.read_ahead(lazy=True, prefetch="exact")
                reply = loaded.generate(prompt, **settings)
                assert written(reply) == expected
                saved += reply.timings.rows_saved
    assert saved > 0


def test_a_level_that_does_not_exist_is_refused() -> None:
    """At load and afterwards, with the levels that exist."""
    with pytest.raises(UsageError, match="off, exact, law"):
        ensemble(prefetch="exat")
    with ensemble() as loaded, pytest.raises(UsageError, match="exact"):
        loaded.read_ahead(lazy=False, prefetch="exat")
