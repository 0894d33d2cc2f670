"""Writes the texts of a request with an ensemble, as a stream of events; runs in the owner's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gguf_fusion.chat import Message
from gguf_fusion.ensemble import Ensemble, Weights
from gguf_fusion.errors import UsageError
from gguf_fusion.grammar import Grammar
from gguf_fusion.records import Timings
from gguf_fusion.reply import Reply
from gguf_fusion.sampling import MAX_SEED
from gguf_fusion.server.owner import Job
from gguf_fusion.server.pieces import PieceFeed, ToldPiece

Prompt = str | Sequence[int] | Sequence[Message]
"""A text to continue, token ids of the piece expert, or a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a request asks for.

    prompts  : each is continued ``n`` times; choice ``i * n + j`` is the j-th text for prompt i, with the seed + j
    n_top    : alternatives to tell per piece
    pieces   : whether pieces are wanted at all
    reuse    : read only what is new since the last text; the text is then the same within rounding only
    echo     : give the prompt back before the text; with ``pieces`` it is scored byte by byte
    """

    prompts: Sequence[Prompt]
    chat: bool
    n: int
    sampling: dict[str, Any]
    seed: int | None = None
    weights: Weights | None = None
    strategy: str | None = None
    grammar: Grammar | None = None
    bias: dict[int, float] | None = None
    n_top: int = 0
    pieces: bool = False
    reuse: bool = False
    echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """The first prompt is read, and its text has begun: from here on there is something to stream."""

    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """More of one choice: text, pieces whose end became certain, and the reason why it is over, on its last one."""

    index: int
    text: str = ""
    pieces: tuple[ToldPiece, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Spent:
    """The last event: what all choices together took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    timings: list[Timings] = field(default_factory=list)


Event = Began | Delta | Spent


def write(order: Order, ensemble: Ensemble, job: Job) -> Iterator[Event | None]:
    """Events of all choices, None for a step that has nothing to tell."""
    spent = Spent()
    for i, prompt in enumerate(order.prompts):
        for j in range(order.n):
            seed = None if order.seed is None else (order.seed + j) % (MAX_SEED + 1)
            yield from _Choice(order, ensemble, job, spent, i * order.n + j, seed).events(prompt, first=j == 0)
    yield spent


class _Choice:
    """One text."""

    def __init__(self, order: Order, ensemble: Ensemble, job: Job, spent: Spent, index: int, seed: int | None) -> None:
        self._order = order
        self._ensemble = ensemble
        self._job = job
        self._spent = spent
        self._index = index
        self._seed = seed
        self._feed: PieceFeed | None = None
        if order.pieces:
            self._feed = PieceFeed(ensemble.piece_view(order.weights), ensemble.space, order.n_top)

    def events(self, prompt: Prompt, *, first: bool) -> Iterator[Event | None]:
        """Events of this choice; the prompt counts for the ``first`` one of its texts."""
        start, given, echoed = self._start(prompt)
        reply = self._reply(start, given)
        try:
            if echoed:
                pieces: tuple[ToldPiece, ...] = (
                    () if self._feed is None else (ToldPiece.unscored(echoed[: len(echoed) - len(given)]),)
                )
                yield Delta(index=self._index, text=echoed.decode("utf-8", "replace"), pieces=pieces)
            for at, step in enumerate(reply):
                if at == 0 and self._index == 0:
                    yield Began(seed=reply.seed)
                pieces = () if self._feed is None else tuple(self._feed.push(step, len(given) + reply.shown_bytes))
                if step.text or pieces or step.finish_reason is not None:
                    yield Delta(index=self._index, text=step.text, pieces=pieces, finish_reason=step.finish_reason)
                else:
                    yield None
            self._count(reply, first=first, n_given=self._n_tokens(given))
        finally:
            reply.close()

    def _reply(self, start: str | bytes | Sequence[Message], given: bytes) -> Reply:
        order = self._order
        return self._ensemble.generate(
            start,
            chat=True if order.chat else None,
            progress=lambda *_: self._job.check(),
            weights=order.weights,
            strategy=order.strategy,
            given=given,
            constraint=None if order.grammar is None else order.grammar.begin(),
            logit_bias=order.bias,
            n_top=order.n_top + 1 if order.pieces else 0,
            reuse=order.reuse,
            seed=self._seed,
            **order.sampling,
        )

    def _start(self, prompt: Prompt) -> tuple[str | bytes | Sequence[Message], bytes, bytes]:
        """(what to read at once, what to observe byte by byte, what to give back)."""
        if self._order.chat:
            return prompt, b"", b""  # type: ignore[return-value]
        data = prompt.encode() if isinstance(prompt, str) else self._text_of(prompt)  # type: ignore[arg-type]
        if not self._order.echo:
            return data, b"", b""
        if self._feed is None or not data:
            return data, b"", data
        expert = self._ensemble.heaviest(self._order.weights)
        first = bytes(expert.vocabulary.text(expert.tokenize(data)[:1]))
        return first, data[len(first) :], data

    def _text_of(self, ids: Sequence[int]) -> bytes:
        """Bytes of token ids of the piece expert; what is no text, such as BOS, adds nothing."""
        expert = self._ensemble.heaviest(self._order.weights)
        vocabulary = expert.vocabulary
        for token in ids:
            if token >= vocabulary.n_vocab:
                raise UsageError(
                    f"prompt: expected token ids of expert {expert.name!r}, 0…{vocabulary.n_vocab - 1}, got {token}"
                )
        return vocabulary.text(np.array(ids, np.int32))

    def _n_tokens(self, data: bytes) -> int:
        return len(self._ensemble.heaviest(self._order.weights).tokenize(data)) if data else 0

    def _count(self, reply: Reply, *, first: bool, n_given: int) -> None:
        usage = reply.usage
        name = self._ensemble.heaviest(self._order.weights).name
        self._spent.prompt_tokens += usage.prompt_tokens[name] + n_given if first else 0
        self._spent.completion_tokens += usage.generated_tokens
        self._spent.timings.append(reply.timings)
