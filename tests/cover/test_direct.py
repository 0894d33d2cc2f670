"""Token space: one decode per token, the model's own law."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.cover.base import Prompt
from gguf_fusion.cover.direct import TokenCursor
from gguf_fusion.errors import ContextOverflowError, ExpertFailedError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.testing import nested_vocabulary

VOCABULARY = nested_vocabulary()
CONTROL, UNUSED, END_A, END_B = 12, 13, 14, 15


def law(path: tuple[int, ...]) -> np.ndarray:
    """A generic law that depends on the whole path and puts mass on every id, control ids included."""
    rng = np.random.default_rng([len(path), *path])
    return rng.dirichlet(np.ones(VOCABULARY.n_vocab))


def expert(**options: object) -> TableExpert:
    return TableExpert(VOCABULARY, law, **options)  # type: ignore[arg-type]


def prompt(*ids: int, tail: bytes = b"") -> Prompt:
    return Prompt(ids=np.array(ids, np.int32), observed=np.ones(len(ids), np.bool_), tail=tail)


def test_law_is_the_softmax_without_control_ids_and_with_one_end() -> None:
    """Excluded ids have no mass, both END ids count as the first, everything sums to 1."""
    cursor = TokenCursor(expert())
    cursor.start(prompt(0, 3))
    probs, ghost_share = cursor.law()
    wanted = law((0, 3))
    wanted[[CONTROL, UNUSED]] = 0.0
    wanted[END_A] += wanted[END_B]
    wanted[END_B] = 0.0
    np.testing.assert_allclose(probs, wanted / wanted.sum(), atol=1e-7)
    assert ghost_share == 0.0
    assert cursor.end_symbol == END_A


def test_greedy_output_is_the_models_own() -> None:
    """Greedy choices through the cursor are those of evaluating the whole path each time."""
    own = expert()
    path = [0, 5]
    for _ in range(20):
        row = own.evaluate(np.array(path, np.int32))[0].copy()
        row[[CONTROL, UNUSED, END_A, END_B]] = -np.inf
        path.append(int(row.argmax()))
    cursor = TokenCursor(expert())
    cursor.start(prompt(0, 5))
    drawn = []
    for _ in range(20):
        probs = cursor.law()[0].copy()
        probs[END_A] = 0.0
        drawn.append(int(probs.argmax()))
        cursor.push(drawn[-1])
    assert path[2:] == drawn


def test_one_decode_per_token() -> None:
    """Each pushed token costs one decode, and asking for a law twice costs nothing."""
    cursor = TokenCursor(expert())
    cursor.start(prompt(0, 1, 2))
    prefilled = cursor.expert.n_decoded
    for n in range(1, 6):
        assert cursor.due
        cursor.prepare()
        assert not cursor.due
        cursor.law()
        assert cursor.stats.n_decodes == n
        cursor.push(4)
    assert cursor.n_tokens == 8
    assert cursor.expert.n_decoded == prefilled + 5


def test_prompt_reports_the_log_probability_of_its_bytes() -> None:
    """A token's log-probability is spread over its bytes; the first token has none."""
    cursor = TokenCursor(expert())
    observed = cursor.start(prompt(0, 3, 2))
    logp = [np.log(law((0,))[3]) / 2] * 2 + [np.log(law((0, 3))[2])]
    np.testing.assert_allclose(observed, logp, atol=1e-5)


def test_tail_is_tokenized() -> None:
    """In token space no border is open: the whole run of text is tokenized as the expert would do it."""
    cursor = TokenCursor(expert())
    cursor.start(prompt(CONTROL, 2, 0, tail=b"bca"))
    assert cursor.snapshot().tolist() == [CONTROL, 9, 6]


def test_restore_forgets_later_tokens() -> None:
    """After restore the law is that of the snapshot's text."""
    cursor = TokenCursor(expert())
    cursor.start(prompt(0))
    cursor.push(3)
    before = cursor.law()[0].copy()
    saved = cursor.snapshot()
    cursor.push(1)
    cursor.push(2)
    cursor.law()
    cursor.restore(saved)
    np.testing.assert_array_equal(cursor.law()[0], before)


def test_empty_prompt_has_a_law() -> None:
    """Without anything before it the first token follows a Zipf law, END and control ids excluded."""
    cursor = TokenCursor(expert())
    assert not len(cursor.start(prompt()))
    probs, _ = cursor.law()
    assert not cursor.stats.n_decodes
    assert probs.sum() == pytest.approx(1.0)
    assert probs[[CONTROL, UNUSED, END_A, END_B]].sum() == 0.0


def test_end_adds_no_token() -> None:
    """Pushing END leaves the text as it is."""
    cursor = TokenCursor(expert())
    cursor.start(prompt(0))
    cursor.push(END_A)
    assert cursor.n_tokens == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_row_names_the_expert(bad: float) -> None:
    """A row with NaN or infinity stops with the expert's name and the place."""
    broken = expert(name="coder")

    def evaluate(path: np.ndarray, n_rows: int = 1, **_: object) -> np.ndarray:
        row = np.zeros((n_rows, VOCABULARY.n_vocab), np.float32)
        row[:, 3] = bad
        return row

    broken.evaluate = evaluate  # type: ignore[method-assign, assignment]
    cursor = TokenCursor(broken)
    cursor.start(prompt(0))
    with pytest.raises(ExpertFailedError, match=r"'coder'.*after token 1"):
        cursor.law()


def test_row_without_text_names_the_expert() -> None:
    """Mass on control tokens only is no law."""
    odd = TableExpert(VOCABULARY, lambda path: np.eye(VOCABULARY.n_vocab)[CONTROL], name="odd")
    cursor = TokenCursor(odd)
    cursor.start(prompt(0))
    with pytest.raises(ExpertFailedError, match="control tokens"):
        cursor.law()


def test_prompt_must_leave_room() -> None:
    """A prompt as long as the context is refused; one token shorter fits."""
    with pytest.raises(ContextOverflowError, match="4 prompt tokens"):
        TokenCursor(expert(n_ctx=4)).start(prompt(0, 1, 2, 3))
    cursor = TokenCursor(expert(n_ctx=4))
    cursor.start(prompt(0, 1, 2))
    cursor.push(0)
    cursor.law()


def test_foreign_symbol_is_refused() -> None:
    """Symbols are token ids."""
    cursor = TokenCursor(expert())
    cursor.start(prompt(0))
    with pytest.raises(ValueError, match="token id"):
        cursor.push(VOCABULARY.n_vocab)
