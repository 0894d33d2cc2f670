"""Scores of byte strings, against laws that are known and against step by step computation."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_fusion.arrays import F64
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import ContextOverflowError, UsageError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.harness.scoring import continuation, document, fits, require_bytes, shortened
from gguf_fusion.vocabulary import Kind, Vocabulary

LETTERS = st.text("abc", max_size=12).map(str.encode)


def words(*pieces: str) -> Vocabulary:
    """Single bytes, some longer pieces, BOS and END."""
    kinds = [Kind.TEXT] * (256 + len(pieces)) + [Kind.CONTROL, Kind.END]
    texts = [bytes([b]) for b in range(256)] + [piece.encode() for piece in pieces] + [b"<s>", b"</s>"]
    return Vocabulary.from_pieces(texts, kinds, len(texts) - 2)


def letters(seed: int) -> Callable[[bytes], F64]:
    """A random law of the next letter, given the last two."""

    def law(text: bytes) -> F64:
        probs = np.zeros(257)
        probs[[*b"abc", 256]] = np.random.default_rng([seed, zlib.crc32(text[-2:])]).dirichlet([2, 2, 2, 0.5])
        return probs

    return law


def pair(n_ctx: int = 4096, **options: object) -> Ensemble:
    experts = [
        TableExpert.from_byte_law(words("abc", "bc", "abca", "aa"), letters(1), name="one", n_ctx=n_ctx),
        TableExpert.from_byte_law(words("ab", "bca", "cc"), letters(2), name="two", n_ctx=n_ctx),
    ]
    return Ensemble.from_experts(experts, weights=[2, 1], strategy="linear", epsilon=0.0, **options)  # type: ignore[arg-type]


def mixture(context: bytes, text: bytes) -> tuple[float, bool]:
    """The same by the known byte laws: a fixed mixture of both."""
    total, greedy = 0.0, True
    for i, byte in enumerate(text):
        seen = context + text[:i]
        law = 2 / 3 * letters(1)(seen) + 1 / 3 * letters(2)(seen)
        total += log(law[byte])
        greedy &= bool(law.argmax() == byte)
    return total, greedy


@settings(max_examples=30, deadline=None)
@given(LETTERS, LETTERS)
def test_a_continuation_has_the_probability_of_the_laws(context: bytes, text: bytes) -> None:
    """Whatever tokens context and continuation have, and wherever they meet."""
    with pair() as ensemble:
        score, greedy = continuation(ensemble, context, text)
    wanted, wanted_greedy = mixture(context, text)
    assert score == pytest.approx(wanted, abs=1e-4)
    assert greedy == wanted_greedy


def test_parts_add_up() -> None:
    """A text scored in one go and in two is equally likely; bytes that have begun the answer are not scored."""
    with pair() as ensemble:
        whole, _ = continuation(ensemble, b"ab", b"cabcab")
        first, _ = continuation(ensemble, b"ab", b"cab")
        rest, _ = continuation(ensemble, b"abcab", b"cab")
        begun, _ = continuation(ensemble, b"ab", b"cab", begun=b"cab")
    assert first + rest == pytest.approx(whole, abs=1e-4)
    assert begun == pytest.approx(rest, abs=1e-4)


def test_documents_longer_than_a_context_are_scored_in_parts() -> None:
    """Every byte once; with laws that look two bytes back the parts lose nothing."""
    text = bytes(np.random.default_rng(0).choice(list(b"abc"), 700).tolist())
    with pair(n_ctx=128) as ensemble:
        assert document(ensemble, text) == pytest.approx(mixture(b"", text)[0], abs=1e-3)
        assert document(ensemble, b"") == 0.0
        assert continuation(ensemble, text, b"ab")[0] == pytest.approx(mixture(text, b"ab")[0], abs=1e-4)


def test_contexts_lose_their_beginning_not_their_end() -> None:
    """The longest end that fits, in whole characters."""
    expert = TableExpert(words(), lambda _: np.ones(258), n_ctx=64)
    text = "a👩‍💻é".encode() * 10
    kept = shortened([expert], text, b"12345")
    assert text.endswith(kept)
    assert kept.decode()
    assert len(kept) <= 64 - 24 - 5 < len(kept) + 4
    assert shortened([expert], b"short") == b"short"
    assert shortened([expert], text, b"x" * 60) == b""
    assert fits([expert], b"x" * 40)
    assert not fits([expert], b"x" * 40, n_more=1)


def test_what_cannot_be_scored_is_told() -> None:
    """A continuation that fits no context, a context without room, and an ensemble over tokens."""
    with pair(n_ctx=64) as ensemble, pytest.raises(ContextOverflowError):
        continuation(ensemble, b"ab", b"abc" * 40)
    with pair(n_ctx=20) as ensemble, pytest.raises(UsageError, match="no text at all"):
        document(ensemble, b"abc")
    tokens = Ensemble.from_experts([TableExpert.from_byte_law(words("ab"), letters(1))])
    with tokens, pytest.raises(UsageError, match="space='byte'"):
        require_bytes(tokens)
