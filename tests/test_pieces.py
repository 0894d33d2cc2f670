"""The piece view: steps grouped into tokens of an expert, characters, or themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_fusion.experts.table import TableExpert
from gguf_fusion.pieces import PieceView
from gguf_fusion.records import END, Piece, Step
from gguf_fusion.testing import nested_vocabulary
from gguf_fusion.vocabulary import Vocabulary

POCKET = ("smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct")


def step(data: bytes, number: int = 0, reason: str | None = None) -> Step:
    """A step of two experts whose numbers tell it from others."""
    return Step(
        symbol=data[0] if data else END,
        data=data,
        logprob=-1.0 - number / 7,
        expert_logprobs=np.array([-float(number), -2.0]),
        weights=np.array([0.25, 0.75]),
        responsibility=np.array([1.0, 0.0] if number % 2 else [0.0, 1.0]),
        n_decodes=number % 3,
        ghost_share=0.1 * (number % 5),
        finish_reason=reason,
    )


def steps_of(text: bytes, ending: str = "stop") -> list[Step]:
    """One step per byte, then END or a limit."""
    steps = [step(text[i : i + 1], i) for i in range(len(text))]
    if ending == "stop":
        return [*steps, step(b"", len(text), "stop")]
    return [*steps[:-1], replace(steps[-1], finish_reason="length")] if steps else []


def grouped(view: PieceView, steps: Sequence[Step]) -> list[Piece]:
    """All pieces of the steps."""
    return [piece for s in steps for piece in view.push(s)] + view.finish()


def word_expert() -> TableExpert:
    """An expert with single bytes and some longer pieces."""
    words = [b" the", b"the", b" cat", b"cat", b"ing", b" sing", b"\n\n", "é".encode(), b"==", b"===="]
    pieces = [bytes([b]) for b in range(256)] + words
    vocabulary = Vocabulary.from_pieces(pieces)
    return TableExpert(vocabulary, lambda path: np.ones(len(pieces)))


@given(st.binary(max_size=200), st.sampled_from(["stop", "length"]))
def test_pieces_lose_nothing(data: bytes, ending: str) -> None:
    """However they are grouped: bytes and texts joined are the text, log-probabilities and decodes add up."""
    steps = steps_of(data, ending)
    for view in (PieceView.of_tokens(word_expert()), PieceView.of_characters(), PieceView.of_steps()):
        pieces = grouped(view, steps)
        assert b"".join(p.data for p in pieces) == data
        assert "".join(p.text for p in pieces) == data.decode("utf-8", "replace")
        assert sum(p.logprob for p in pieces) == pytest.approx(sum(s.logprob for s in steps))
        assert sum(p.n_decodes for p in pieces) == sum(s.n_decodes for s in steps)
        assert np.sum([p.expert_logprobs for p in pieces]) == pytest.approx(np.sum([s.expert_logprobs for s in steps]))
        assert [p.finish_reason for p in pieces if p.finish_reason] == ([ending] if steps else [])
        for piece in pieces:
            assert piece.weights.sum() == pytest.approx(1.0)
            assert piece.responsibility.sum() == pytest.approx(1.0)


@given(st.lists(st.sampled_from(["the", " the", " cat", "sing", ".", "\n\n", " ", "é", "===="]), max_size=60))
def test_token_pieces_are_the_tokens_of_the_whole_text(words: list[str]) -> None:
    """Grouping while the text grows gives what tokenizing the finished text gives."""
    text, expert = "".join(words).encode(), word_expert()
    ids = expert.tokenize(text)
    pieces = grouped(PieceView.of_tokens(expert), steps_of(text))
    assert [p.data for p in pieces] == [*(expert.vocabulary.piece(int(t)) for t in ids), b""]


def test_pieces_come_while_the_text_grows() -> None:
    """A piece is handed out some words after its end, not at the end of the text."""
    view = PieceView.of_tokens(word_expert())
    pieces = [p for s in steps_of(b"the cat sing the cat sing the")[:-1] for p in view.push(s)]
    assert [p.data for p in pieces[:2]] == [b"the", b" cat"]
    assert len(pieces) >= 4


def test_a_text_without_words_is_not_held_for_ever() -> None:
    """A long line of one sign is grouped although no word begins in it."""
    view = PieceView.of_tokens(word_expert())
    n_open = 0
    for n, s in enumerate(steps_of(b"=" * 500)[:-1], 1):
        n_open += 1 - sum(len(p.data) for p in view.push(s))
        assert n_open <= 100, n


def test_means_are_by_bytes_and_sums_by_steps() -> None:
    """Weights and responsibility of a piece count a step as often as it has bytes."""
    expert = TableExpert(nested_vocabulary(), lambda path: np.ones(16))
    first, second = step(b"a", 1), step(b"bc", 2)
    (piece,) = [p for p in grouped(PieceView.of_tokens(expert), [first, second]) if p.data]
    assert piece.data == b"abc"
    assert piece.logprob == pytest.approx(first.logprob + second.logprob)
    assert piece.responsibility == pytest.approx([1 / 3, 2 / 3])
    assert piece.ghost_share == pytest.approx(0.1 / 3 + 0.2 * 2 / 3)
    assert piece.n_decodes == 3


def test_characters_wait_for_their_last_byte() -> None:
    """A character is one piece, whatever its length."""
    pieces = grouped(PieceView.of_characters(), steps_of("aé👩".encode()))
    assert [p.text for p in pieces] == ["a", "é", "👩", ""]


@pytest.mark.model
@pytest.mark.parametrize("name", POCKET)
def test_pieces_of_real_experts_are_their_canonical_tokens(name: str) -> None:
    """Code, prose, other scripts and long runs: the pieces are those of the finished text."""
    from gguf_fusion import hub
    from gguf_fusion.experts.llama import LlamaExpert

    code = Path(textwrap.__file__).read_text(encoding="utf-8")[4000:9000]
    prose = (
        "Größe zählt nicht, sagte sie; und 今天天气很好，我们去公园。 Привет, мир! 👩‍💻🌶️\n\n\n- 3.14159, 1,000,000\n"
    )
    text = (code + prose * 3 + "=" * 150 + "\n\n\n" + " " * 70 + "x\n").encode()
    with LlamaExpert.load(hub.locate(name), name=name, n_ctx=256) as expert:
        pieces = grouped(PieceView.of_tokens(expert), steps_of(text))
        expected = [expert.vocabulary.piece(int(t)) for t in expert.tokenize(text)]
    assert [p.data for p in pieces if p.data] == expected
