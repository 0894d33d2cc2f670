"""Pieces of a text with their log-probabilities and alternatives, told only once they belong to the text for sure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gguf_fusion.engine import SymbolSpace
from gguf_fusion.pieces import PieceView
from gguf_fusion.records import Piece, Step
from gguf_fusion.trace import piece_record

IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON has no number for."""

_END = "<|end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What could have stood in the place of a piece: its beginning, then another symbol. ``data`` is None for END."""

    text: str
    data: bytes | None
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldPiece:
    """A piece as clients are told of it; ``piece`` is None where nothing is known, as at the start of a text."""

    data: bytes
    piece: Piece | None
    top: tuple[Alternative, ...] = ()
    divergence: float | None = None
    """Mean over the bytes, nats."""

    @classmethod
    def unscored(cls, data: bytes) -> ToldPiece:
        """The first piece of an echoed prompt."""
        return cls(data=data, piece=None)

    @property
    def text(self) -> str:
        """The piece by itself; bytes of a character that is cut off are replaced."""
        return self.data.decode("utf-8", "replace")

    @property
    def n_characters(self) -> int:
        """Characters that are complete with this piece."""
        return len(self.text if self.piece is None else self.piece.text)

    @property
    def logprob(self) -> float | None:
        """ln of its probability under the fused law."""
        return None if self.piece is None else max(IMPOSSIBLE, self.piece.logprob)


class PieceFeed:
    """Takes the steps of one text and tells its pieces; nothing of a stop string is ever told."""

    def __init__(self, view: PieceView, space: SymbolSpace, n_top: int) -> None:
        self._view = view
        self._space = space
        self._n_top = n_top
        self._unsure: deque[Step] = deque()
        self._n_sure = 0
        """Bytes of the steps that were passed on."""
        self._in_view: deque[Step] = deque()
        self._given = False

    def push(self, step: Step, n_shown: int) -> list[ToldPiece]:
        """Pieces that became certain; ``n_shown``: bytes that belong to the text for sure, given ones included."""
        pieces: list[Piece] = []
        if self._given and not step.given:
            pieces += self._view.finish()  # a piece does not reach from the prompt into the reply
        self._given = step.given
        if step.data:
            self._unsure.append(step)
        if step.given:
            n_shown = self._n_sure + len(step.data)
        while self._unsure and self._n_sure + len(self._unsure[0].data) <= n_shown:
            pieces += self._pass_on(self._unsure.popleft())
        if step.finish_reason is not None:
            cut = n_shown - self._n_sure
            if self._unsure and cut > 0:
                pieces += self._pass_on(replace(self._unsure[0], data=self._unsure[0].data[:cut]))
            pieces += self._view.finish()
        return [self._told(piece) for piece in pieces if piece.data]

    def _pass_on(self, step: Step) -> list[Piece]:
        self._n_sure += len(step.data)
        self._in_view.append(step)
        return self._view.push(replace(step, finish_reason=None))

    def _told(self, piece: Piece) -> ToldPiece:
        steps: list[Step] = []
        n = 0
        while n < len(piece.data):
            steps.append(self._in_view.popleft())
            n += len(steps[-1].data)
        spread = sum((step.divergence or 0.0) * len(step.data) for step in steps) / len(piece.data)
        top = self._alternatives(piece, steps) if self._n_top else ()
        return ToldPiece(data=piece.data, piece=piece, top=top, divergence=spread)

    def _alternatives(self, piece: Piece, steps: Sequence[Step]) -> tuple[Alternative, ...]:
        """The first is what a greedy reader would have taken for the piece; then the most probable others.

        The beginnings of the piece, each continued with another symbol, and the piece itself exclude one another and
        together are everything that could have come.
        """
        chosen = Alternative(text=piece.data.decode("utf-8", "replace"), data=piece.data, logprob=piece.logprob)
        first: Alternative | None = None
        others = [chosen]
        before, logprob = b"", 0.0
        for step in steps:
            for symbol, other in step.top:
                if symbol != step.symbol:
                    others.append(self._alternative(before, symbol, logprob + other))
                    if first is None and symbol == step.top[0][0]:
                        first = others[-1]
            before += step.data
            logprob += step.logprob
        first = first or chosen
        rest = sorted((a for a in others if a is not first), key=lambda a: -a.logprob)
        return (first, *rest[: self._n_top - 1])

    def _alternative(self, before: bytes, symbol: int, logprob: float) -> Alternative:
        if symbol == self._space.end:
            return Alternative(text=before.decode("utf-8", "replace") + _END, data=None, logprob=logprob)
        data = before + self._space.data(symbol)
        return Alternative(text=data.decode("utf-8", "replace"), data=data, logprob=logprob)


def fusion_record(told: ToldPiece, experts: Sequence[str]) -> dict[str, Any]:
    """A piece as ``fusion.trace`` tells it: what every expert thought, the alternatives and the divergence."""
    if told.piece is None:
        return {"text": told.text, "bytes": told.data.hex()}
    record = piece_record(told.piece, experts)
    del record["finish_reason"]
    alternatives = [{"text": a.text, "probability": math.exp(a.logprob)} for a in told.top]
    return {**record, "divergence": told.divergence, "alternatives": alternatives}


def chat_logprobs(pieces: Sequence[ToldPiece], n_top: int) -> dict[str, Any]:
    """``logprobs`` of a chat completion."""
    return {"content": [_entry(told, n_top) for told in pieces], "refusal": None}


def _entry(told: ToldPiece, n_top: int) -> dict[str, Any]:
    top = [
        {"token": a.text, "logprob": max(IMPOSSIBLE, a.logprob), "bytes": None if a.data is None else list(a.data)}
        for a in told.top[:n_top]
    ]
    return {"token": told.text, "logprob": told.logprob, "bytes": list(told.data), "top_logprobs": top}


def completion_logprobs(pieces: Sequence[ToldPiece], offset: int, n_top: int) -> dict[str, Any]:
    """``logprobs`` of a completion; ``offset``: characters of the text before these pieces."""
    offsets = []
    for told in pieces:
        offsets.append(offset)
        offset += told.n_characters
    return {
        "tokens": [_byte_name(told.data) for told in pieces],
        "token_logprobs": [told.logprob for told in pieces],
        "top_logprobs": [_top(told, n_top) for told in pieces] if n_top else None,
        "text_offset": offsets,
    }


def _top(told: ToldPiece, n_top: int) -> dict[str, float] | None:
    """The alternatives of a piece by name, the piece itself always among them."""
    if told.piece is None:
        return None
    found: dict[str, float] = {}
    for alternative in told.top[:n_top]:
        name = alternative.text if alternative.data is None else _byte_name(alternative.data)
        found[name] = max(found.get(name, IMPOSSIBLE), alternative.logprob)
    found.setdefault(_byte_name(told.data), max(IMPOSSIBLE, told.piece.logprob))
    return found


def _byte_name(data: bytes) -> str:
    """A piece as text, or its bytes spelt out where it is no whole text, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
