"""Laws of the cover tree on toy experts, without any model file."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from gguf_fusion.bridge.tables import byte_tables
from gguf_fusion.cover.base import Prompt
from gguf_fusion.cover.tree import CoverTree
from gguf_fusion.records import END
from gguf_fusion.testing import enumerate_next_bytes, nested_vocabulary

VOCABULARY = nested_vocabulary()
TABLES = byte_tables(VOCABULARY)
START = 12  # a control token, so that the first row has something before it


class ToyExpert:
    """Random next-token laws, a function of the path or only of its bytes."""

    name = "toy"
    vocabulary = VOCABULARY
    n_ctx = 1000
    max_rows = 4
    n_decoded = 0
    decode_s = 0.0

    def __init__(self, seed: int, *, by_bytes: bool):
        self.seed = seed
        self.by_bytes = by_bytes

    def law(self, path: tuple[int, ...]) -> np.ndarray:
        key = VOCABULARY.text(np.array(path, np.int32)) if self.by_bytes else bytes(path)
        probs = np.random.default_rng([self.seed, zlib.crc32(key)]).dirichlet(np.full(VOCABULARY.n_vocab, 0.4))
        # Rows are float32 in real life: the law is what such a row says.
        return np.exp(self._logits(probs).astype(np.float64))

    def _logits(self, probs: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(probs, 1e-12)).astype(np.float32)

    def tokenize(self, text: bytes) -> np.ndarray:
        ids, i = [], 0
        while i < len(text):
            fits = [t for t in range(11) if text.startswith(VOCABULARY.piece(t), i)]
            ids.append(max(fits, key=lambda t: len(VOCABULARY.piece(t))))
            i += len(VOCABULARY.piece(ids[-1]))
        return np.array(ids, np.int32)

    def tokenize_template(self, text: bytes) -> np.ndarray:
        return self.tokenize(text)

    def evaluate(self, path, n_rows=1, *, branch=False, progress=None):
        self.n_decoded += n_rows
        ends = range(len(path) - n_rows + 1, len(path) + 1)
        return np.stack([np.log(self.law(tuple(int(t) for t in path[:end]))).astype(np.float32) for end in ends])

    def close(self) -> None:
        pass


def tree_for(expert: ToyExpert, **options) -> CoverTree:
    tree = CoverTree(expert, TABLES, **options)
    tree.start(Prompt(ids=np.array([START], np.int32), observed=np.zeros(1, np.bool_)))
    return tree


def walk(tree: CoverTree, rng: np.random.Generator, n: int) -> bytes:
    text = b""
    for _ in range(n):
        probs = full_law(tree)[list(b"abc")]  # the only bytes this vocabulary can spell
        byte = int(rng.choice(list(b"abc"), p=probs / probs.sum()))
        tree.push(byte, float(tree.stand_in()[byte]))
        text += bytes([byte])
    return text


def full_law(tree: CoverTree) -> np.ndarray:
    probs, ghost_share = tree.law()
    return probs + ghost_share * tree.stand_in()


@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_brute_force(seed: int, by_bytes: bool) -> None:
    """With epsilon 0 the law equals the one from listing every cover, given the rows as the kernel reads them.

    Merging is exact only where rows depend on the bytes alone, so it is off where they depend on the path.
    """
    expert = ToyExpert(seed, by_bytes=by_bytes)
    tree = tree_for(expert, epsilon=0.0, merge=by_bytes, escape=0.0)
    rng = np.random.default_rng(seed)
    text = b""
    for _ in range(7):
        expected = enumerate_next_bytes(VOCABULARY, lambda path: kernel_law(expert, path), (START,), text)
        actual, ghost_share = tree.law()
        assert ghost_share == 0.0
        np.testing.assert_allclose(actual, expected, atol=1e-9)
        byte = int(rng.choice(END, p=expected[:END] / expected[:END].sum()))
        text += bytes([byte])
        tree.push(byte)


def kernel_law(expert: ToyExpert, path: tuple[int, ...]) -> np.ndarray:
    """The next-token law with the float32 rounding that the row kernel applies (its precision has its own test)."""
    from gguf_fusion.kernels.softmax import row_masses

    row, sums = np.empty(TABLES.n_text, np.float32), np.empty(1)
    logits = expert.evaluate(np.array(path, np.int32))[0]
    _, end = row_masses(logits, TABLES.order, TABLES.end_ids, row, sums)
    law = np.zeros(VOCABULARY.n_vocab)
    law[TABLES.order] = row
    law[TABLES.end_ids[0]] = end
    return law


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.3, 0.9])
def test_sums_to_one(epsilon: float) -> None:
    """Law plus stand-in is a distribution without a zero, whatever epsilon."""
    tree = tree_for(ToyExpert(3, by_bytes=False), epsilon=epsilon)
    rng = np.random.default_rng(5)
    for _ in range(40):
        law = full_law(tree)
        assert abs(law.sum() - 1.0) < 1e-6
        assert law.min() > 0.0
        walk(tree, rng, 1)


def test_larger_epsilon_saves_decodes() -> None:
    """Leaving boundaries to the stand-in saves decodes."""
    spent = []
    for epsilon in (0.0, 0.2):
        expert = ToyExpert(1, by_bytes=True)
        tree = tree_for(expert, epsilon=epsilon)
        for byte in b"abcaabbcababcabcaabca":
            tree.law()
            tree.push(byte, float(tree.stand_in()[byte]))
        spent.append(tree.stats.n_decodes)
    assert spent[1] < spent[0]


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_snapshot_and_restore(epsilon: float) -> None:
    """Laws after a restore are the laws of a tree that never went astray."""
    tree, twin = (tree_for(ToyExpert(7, by_bytes=False), epsilon=epsilon) for _ in range(2))
    for byte in b"abca":
        for each in (tree, twin):
            each.law()
            each.push(byte, float(each.stand_in()[byte]))
    saved = tree.snapshot()
    walk(tree, np.random.default_rng(0), 6)
    tree.restore(saved)
    for byte in b"bcab":
        np.testing.assert_allclose(full_law(tree), full_law(twin), atol=1e-12)
        for each in (tree, twin):
            each.push(byte, float(each.stand_in()[byte]))


def test_impossible_byte_reanchors() -> None:
    """Text that no piece can spell still gets a finite probability, and the tree finds back to it."""
    tree = tree_for(ToyExpert(2, by_bytes=True), epsilon=0.1)
    walk(tree, np.random.default_rng(1), 5)
    before = tree.stats.n_reanchors
    tree.law()
    state = tree._covers.state
    state["n_leaves"] = state["n_ghosts"] = 0
    state["ghost_share"] = tree._limits.escape
    tree._probs[:] = 0.0
    tree.push(ord("b"), 0.5)
    assert tree.stats.n_reanchors == before + 1
    assert abs(full_law(tree).sum() - 1.0) < 1e-6


def test_tail_of_a_raw_prompt_equals_pushed_bytes() -> None:
    """A prompt's open tail goes through the tree exactly like observed text (B3 of a prompt cut anywhere)."""
    text = b"abcaab"
    laws = []
    for cut in (0, 2, 5):
        expert = ToyExpert(4, by_bytes=True)
        tree = CoverTree(expert, TABLES, epsilon=0.0, escape=0.0)
        tree.start(Prompt(ids=np.array([START], np.int32), observed=np.zeros(1, np.bool_), tail=text[:cut]))
        for byte in text[cut:]:
            tree.law()
            tree.push(byte)
        laws.append(tree.law()[0].copy())
    np.testing.assert_allclose(laws[1], laws[0], atol=1e-12)
    np.testing.assert_allclose(laws[2], laws[0], atol=1e-12)


def test_long_texts_need_larger_arrays() -> None:
    """A text far longer than the first arrays gives the laws that fresh readings of its end would give."""
    expert = ToyExpert(5, by_bytes=True)
    tree = tree_for(expert, epsilon=0.05)
    text = np.random.default_rng(2).choice(list(b"abc"), 700)
    for byte in text.tolist():
        law, share = tree.law()
        assert law.sum() + share == pytest.approx(1.0, abs=1e-9)
        tree.push(byte, float(tree.stand_in()[byte]))
    assert len(tree._covers.text) >= 700
    assert tree._text() == bytes(text.tolist())


def test_rows_of_a_snapshot_stay_while_it_lives() -> None:
    """Slots of rows that a snapshot needs are not used for others; once it is gone, they are."""
    tree = tree_for(ToyExpert(6, by_bytes=True), epsilon=0.0)
    walk(tree, np.random.default_rng(3), 4)
    before = full_law(tree)
    saved = tree.snapshot()
    walk(tree, np.random.default_rng(4), 12)
    held = len(tree._rows.scale)
    tree.restore(saved)
    np.testing.assert_array_equal(full_law(tree), before)
    del saved
    walk(tree, np.random.default_rng(5), 40)
    assert len(tree._rows.scale) == held
