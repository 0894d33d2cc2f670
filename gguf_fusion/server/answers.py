"""What clients get: completions, whole or in chunks, in OpenAI's form. Everything of ours is under ``fusion``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gguf_fusion import __version__
from gguf_fusion.records import Timings
from gguf_fusion.server.pieces import ToldPiece, chat_logprobs, completion_logprobs, fusion_record
from gguf_fusion.server.writer import Delta, Spent

FINGERPRINT = f"gguf-fusion-{__version__}"


@dataclass(slots=True)
class _Whole:
    """A choice put together."""

    text: str = ""
    pieces: list[ToldPiece] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.pieces += delta.pieces
        self.finish_reason = delta.finish_reason or self.finish_reason


@dataclass(slots=True, kw_only=True)
class Answer:
    """The form of one answer.

    n_top : alternatives per piece that the client wants to see under ``logprobs``; None for no logprobs
    trace : whether the pieces are told under ``fusion`` too
    facts : what stays the same for the whole answer under ``fusion``
    """

    chat: bool
    model: str
    n_choices: int
    n_top: int | None
    trace: bool
    experts: Sequence[str]
    facts: dict[str, Any]
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _n_characters: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)

    # ---- whole ------------------------------------------------------------------------------------------------

    def whole(self, deltas: Sequence[Delta], spent: Spent) -> dict[str, Any]:
        """The answer as one object."""
        choices = [_Whole() for _ in range(self.n_choices)]
        for delta in deltas:
            choices[delta.index].add(delta)
        fusion = dict(self.facts)
        if self.trace:
            fusion["pieces"] = [self._records(choice.pieces) for choice in choices]
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage(spent),
            "timings": timings(spent),
            "fusion": fusion,
        }

    def _choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        said: dict[str, Any] = {"text": whole.text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": whole.text, "refusal": None}}
        logprobs = None if self.n_top is None else self._logprobs(index, whole.pieces)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": whole.finish_reason}

    # ---- chunks -----------------------------------------------------------------------------------------------

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before any text: roles, and what is fused how."""
        if not self.chat:
            return []
        role = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(i, {"delta": role}, None, None, self.facts) for i in range(self.n_choices)]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """One chunk for more text or pieces, another one for the end of a choice."""
        found = []
        fusion = {"pieces": self._records(delta.pieces)} if self.trace and delta.pieces else None
        if delta.text or delta.pieces:
            said = {"delta": {"content": delta.text}} if self.chat else {"text": delta.text}
            logprobs = None if self.n_top is None else self._logprobs(delta.index, delta.pieces)
            found.append(self._chunk(delta.index, said, logprobs, None, fusion))
        if delta.finish_reason is not None:
            nothing: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            found.append(self._chunk(delta.index, nothing, None, delta.finish_reason, None))
        return found

    def closing(self, spent: Spent, *, include_usage: bool) -> list[dict[str, Any]]:
        """The chunk after all choices."""
        if not include_usage:
            return []
        return [{**self._chunk_head(), "choices": [], "usage": usage(spent), "timings": timings(spent)}]

    def _chunk(
        self,
        index: int,
        said: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        fusion: dict[str, Any] | None,
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._chunk_head(), "choices": [choice]}
        return chunk if fusion is None else {**chunk, "fusion": fusion}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    # ---- parts ------------------------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _records(self, pieces: Sequence[ToldPiece]) -> list[dict[str, Any]]:
        return [fusion_record(told, self.experts) for told in pieces]

    def _logprobs(self, index: int, pieces: Sequence[ToldPiece]) -> dict[str, Any]:
        assert self.n_top is not None
        if self.chat:
            return chat_logprobs(pieces, self.n_top)
        offset = self._n_characters.get(index, 0)
        self._n_characters[index] = offset + sum(told.n_characters for told in pieces)
        return completion_logprobs(pieces, offset, self.n_top)


def usage(spent: Spent) -> dict[str, int]:
    """Counts in pieces; prompt tokens are those of the piece expert."""
    return {
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
        "total_tokens": spent.prompt_tokens + spent.completion_tokens,
    }


def timings(spent: Spent) -> dict[str, Any]:
    """Durations in llama-server's names; ``predicted`` is the writing, all choices together."""
    prompt_s = sum(t.prefill_s for t in spent.timings)
    predicted_s = sum(t.total_s - t.prefill_s for t in spent.timings)
    return {
        "prompt_n": spent.prompt_tokens,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_second": _rate(spent.prompt_tokens, prompt_s),
        "predicted_n": spent.completion_tokens,
        "predicted_ms": 1e3 * predicted_s,
        "predicted_per_second": _rate(spent.completion_tokens, predicted_s),
        "predicted_bytes_per_second": _rate(sum(t.bytes for t in spent.timings), predicted_s),
        "decodes": sum(t.decodes for t in spent.timings),
        "expert_ms": {name: 1e3 * seconds for name, seconds in expert_seconds(spent.timings).items()},
    }


def expert_seconds(spent: Sequence[Timings]) -> dict[str, float]:
    """Seconds that each expert decoded."""
    found: dict[str, float] = {}
    for one in spent:
        for name, seconds in one.expert_decode_s.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0
