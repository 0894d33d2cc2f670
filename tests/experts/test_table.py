"""The table expert: an exact fake with all the awkward habits of a real one."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from gguf_fusion.arrays import F64
from gguf_fusion.errors import ClosedError, ContextOverflowError, ExpertFailedError
from gguf_fusion.experts.base import Expert
from gguf_fusion.experts.byte_law import ByteLaw, SegmentedLaw
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.records import END
from gguf_fusion.testing import byte_vocabulary, enumerate_next_bytes, nested_vocabulary
from gguf_fusion.vocabulary import Kind, Vocabulary


def letters_law(seed: int, letters: bytes = b"abc", end: float = 0.1) -> ByteLaw:
    """A law over a few letters that depends on the whole text."""

    def law(text: bytes) -> F64:
        rng = np.random.default_rng([seed, zlib.crc32(text)])
        probs = np.zeros(257)
        probs[list(letters)] = rng.dirichlet(np.ones(len(letters))) * (1.0 - end)
        probs[END] = end
        return probs

    return law


def uniform(vocabulary: Vocabulary) -> TableExpert:
    return TableExpert(vocabulary, lambda path: np.ones(vocabulary.n_vocab), n_ctx=6, max_rows=3)


@pytest.mark.parametrize("greedy", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_byte_marginal_of_a_segmented_law(seed: int, greedy: float) -> None:
    """However a byte law is cut into tokens, summing over all covers gives the law back."""
    vocabulary, law = nested_vocabulary(), letters_law(seed)
    segmented = SegmentedLaw(vocabulary, law, greedy=greedy)
    text = b""
    rng = np.random.default_rng(seed)
    for _ in range(6):
        expected = law(text)
        found = enumerate_next_bytes(vocabulary, segmented, (), text)
        assert np.abs(found - expected).max() < 1e-12
        text += bytes([int(rng.choice(list(b"abc")))])


def test_two_segmentations_of_one_law_agree() -> None:
    """Experts of one law under different vocabularies have the same byte marginal, within float32 rows."""
    law = letters_law(5)
    pieces = [b"a", b"b", b"c", b"ab", b"ba", b"cc", b"abcab", b"</s>"]
    other = Vocabulary.from_pieces(pieces, [Kind.TEXT] * 7 + [Kind.END])
    first = TableExpert.from_byte_law(nested_vocabulary(), law, greedy=0.7)
    second = TableExpert.from_byte_law(other, law)
    for text in (b"", b"a", b"ab", b"abca", b"ccabc"):
        one = enumerate_next_bytes(first.vocabulary, first.probs, (), text)
        two = enumerate_next_bytes(second.vocabulary, second.probs, (), text)
        assert np.abs(one - two).max() < 1e-6


def test_a_vocabulary_that_cannot_spell_the_law_is_refused() -> None:
    """A byte without a piece of its own cannot be hidden."""
    vocabulary = Vocabulary.from_pieces([b"a", b"bc", b"</s>"], [Kind.TEXT, Kind.TEXT, Kind.END])
    with pytest.raises(ValueError, match="cannot spell"):
        SegmentedLaw(vocabulary, letters_law(0))(())
    without_end = Vocabulary.from_pieces([b"a", b"b", b"c"])
    with pytest.raises(ValueError, match="no END id"):
        SegmentedLaw(without_end, letters_law(0))(())


def test_rows_are_overwritten() -> None:
    """A kept view does not keep its values; a copy does."""
    expert: Expert = TableExpert.from_byte_law(nested_vocabulary(), letters_law(1))
    kept = expert.evaluate(np.array([0], np.int32))
    copy = kept.copy()
    expert.evaluate(np.array([0, 1], np.int32))
    assert not np.array_equal(kept, copy, equal_nan=True)
    assert np.array_equal(expert.evaluate(np.array([0], np.int32)), copy)


def test_several_rows_are_those_of_the_prefixes() -> None:
    """The last rows of a path are the rows of its prefixes."""
    expert = TableExpert.from_byte_law(nested_vocabulary(), letters_law(2))
    path = np.array([0, 1, 2, 3], np.int32)
    rows = expert.evaluate(path, 3).copy()
    singles = [expert.evaluate(path[:n])[0].copy() for n in (2, 3, 4)]
    assert np.array_equal(rows, np.stack(singles))


def test_work_is_counted_as_a_cache_would() -> None:
    """A resident prefix is not decoded again, a branch leaves it there, a repeated call costs nothing."""
    expert = TableExpert(nested_vocabulary(), lambda path: np.ones(16))
    expert.evaluate(np.array([0, 1, 2], np.int32))
    assert expert.n_decoded == 3
    expert.evaluate(np.array([0, 1, 2], np.int32))
    assert expert.n_decoded == 3
    expert.evaluate(np.array([0, 1, 3], np.int32), branch=True)
    assert expert.n_decoded == 4
    expert.evaluate(np.array([0, 1, 2, 4], np.int32))
    assert expert.n_decoded == 5
    expert.evaluate(np.array([0, 1], np.int32))
    assert expert.n_decoded == 6


def test_sticky_memory() -> None:
    """A memory that cannot go back evaluates everything again, with the same result."""
    law = SegmentedLaw(nested_vocabulary(), letters_law(3))
    plain = TableExpert(nested_vocabulary(), law)
    sticky = TableExpert(nested_vocabulary(), law, refuses_rollback=True)
    for path in ([0, 1, 2], [0, 1], [0, 1, 3], [0, 1, 3, 4]):
        ids = np.array(path, np.int32)
        assert np.array_equal(plain.evaluate(ids), sticky.evaluate(ids))
    assert sticky.n_restarts == 1
    assert sticky.n_decoded == 3 + 2 + 1 + 1


def test_limits() -> None:
    """Paths beyond the context, foreign ids and too many rows are refused."""
    expert = uniform(byte_vocabulary())
    with pytest.raises(ContextOverflowError):
        expert.evaluate(np.zeros(7, np.int32))
    with pytest.raises(ValueError, match="token ids"):
        expert.evaluate(np.array([300], np.int32))
    with pytest.raises(ValueError, match="n_rows"):
        expert.evaluate(np.zeros(6, np.int32), 4)
    with pytest.raises(ValueError, match="n_rows"):
        expert.evaluate(np.zeros(0, np.int32))


def test_tokenize() -> None:
    """The longest piece wins; template text finds control tokens, plain text does not; closed experts refuse."""
    expert = TableExpert(nested_vocabulary(), lambda path: np.ones(16))
    pieces = [expert.vocabulary.piece(int(t)) for t in expert.tokenize(b"abcabcab")]
    assert pieces == [b"abca", b"bc", b"ab"]
    assert expert.tokenize_template(b"<c>a").tolist() == [12, 0]
    with pytest.raises(ExpertFailedError, match="0x3C"):
        expert.tokenize(b"<c>a")
    expert.close()
    expert.close()
    with pytest.raises(ClosedError):
        expert.tokenize(b"a")
    with pytest.raises(ClosedError):
        expert.evaluate(np.zeros(1, np.int32))
