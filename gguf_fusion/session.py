"""A conversation as a plain record, and the file that keeps it.

The file is JSON lines. The first line is the whole conversation; every further line is a JSON string, text that was
added to the last answer since. So an answer in the making costs one short line per step, and what a reader has seen
is on disk even if the process is killed. A finished answer replaces the file by a single line::

    {"format": 1, "ensemble": "pocket", "experts": ["a", "b"], "system": null, "weights": null, "strategy": null,
     "exchanges": [{"question": "…", "answer": "…", "finish_reason": "stop", "seed": 7,
                    "pieces": [["Par", [0.2, 0.8]], …]}]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from gguf_fusion.errors import UsageError

FORMAT = 1
"""Raised whenever a reader of older files would misread newer ones."""

INTERRUPTED = "interrupted"
"""The finish reason of an answer that somebody stopped."""

Shares = tuple[str, tuple[float, ...]]
"""(text of a piece, how much of it each expert carried: sum 1)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and its answer."""

    question: str
    answer: str = ""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``interrupted``; None while the answer is being written."""
    seed: int | None = None
    pieces: tuple[Shares, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation and how it is fused; every change makes a new one."""

    ensemble: str = ""
    experts: tuple[str, ...] = ()
    system: str | None = None
    weights: Mapping[str, float] | None = None
    """By expert; None for the ensemble's own."""
    strategy: str | None = None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def last(self) -> Exchange:
        """The last exchange. Raises UsageError where there is none."""
        if not self.exchanges:
            raise UsageError("the conversation is empty; ask something first")
        return self.exchanges[-1]

    def messages(self) -> list[dict[str, str]]:
        """What the experts read: everything up to the last question, its answer left out while it is not finished."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for exchange in self.exchanges:
            found.append({"role": "user", "content": exchange.question})
            if exchange.finish_reason is not None:
                found.append({"role": "assistant", "content": exchange.answer})
        return found

    def asked(self, question: str) -> Session:
        """With one more question."""
        return replace(self, exchanges=(*self.exchanges, Exchange(question=question)))

    def answered(self, answer: str, finish_reason: str, seed: int, pieces: tuple[Shares, ...] = ()) -> Session:
        """With an answer to the last question."""
        done = replace(self.last, answer=answer, finish_reason=finish_reason, seed=seed, pieces=pieces)
        return replace(self, exchanges=(*self.exchanges[:-1], done))

    def undone(self) -> Session:
        """Without the last question and its answer."""
        self.last  # noqa: B018 (raises if there is none)
        return replace(self, exchanges=self.exchanges[:-1])

    def edited(self, question: str | None = None) -> Session:
        """With the last question, or another one in its place, to be answered again."""
        return self.undone().asked(self.last.question if question is None else question)


def to_json(session: Session) -> str:
    """The conversation as one line of JSON."""
    return json.dumps({"format": FORMAT, **asdict(session)}, ensure_ascii=False, allow_nan=False)


def read(path: Path) -> Session:
    """A conversation from its file; an answer that was cut short counts as interrupted. Raises UsageError."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; expected a conversation written by /save") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: expected a conversation written by /save, got a file that is no UTF-8") from None
    head, _, rest = text.partition("\n")
    try:
        record = json.loads(head)
        added = "".join(json.loads(line) for line in rest.split("\n")[:-1])
        session = _session(record)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path}: expected a conversation of format {FORMAT}, written by /save: {error}") from None
    if session.exchanges and session.last.finish_reason is None:
        return session.answered(session.last.answer + added, INTERRUPTED, session.last.seed or 0)
    return session


def _session(record: Any) -> Session:
    """Raises TypeError, ValueError, KeyError for anything that is no conversation."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError("its first line is something else")
    weights = record["weights"]
    return Session(
        ensemble=_text(record["ensemble"]),
        experts=tuple(map(_text, record["experts"])),
        system=None if record["system"] is None else _text(record["system"]),
        weights=None if weights is None else {_text(name): float(weight) for name, weight in weights.items()},
        strategy=None if record["strategy"] is None else _text(record["strategy"]),
        exchanges=tuple(_exchange(item) for item in record["exchanges"]),
    )


def _exchange(record: Any) -> Exchange:
    reason, seed = record["finish_reason"], record["seed"]
    return Exchange(
        question=_text(record["question"]),
        answer=_text(record["answer"]),
        finish_reason=None if reason is None else _text(reason),
        seed=None if seed is None else int(seed),
        pieces=tuple((_text(text), tuple(map(float, shares))) for text, shares in record["pieces"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is {value!r}")
    return value


def write(session: Session, path: Path) -> None:
    """Write a conversation; an older file is replaced in one go. Raises UsageError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(to_json(session) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: the conversation cannot be written there: {error.strerror}") from None


class Journal:
    """Keeps a conversation on disk while it goes on."""

    def __init__(self, path: Path) -> None:
        """``path`` is written as soon as something was asked."""
        self.path = path
        self._stream: TextIO | None = None

    def write(self, session: Session) -> None:
        """The whole conversation. Raises UsageError."""
        self.close()
        write(session, self.path)

    def add(self, text: str) -> None:
        """Text of the answer that is being written. Raises UsageError."""
        if not text:
            return
        try:
            if self._stream is None:
                self._stream = self.path.open("a", encoding="utf-8", newline="\n")
            self._stream.write(json.dumps(text) + "\n")
            self._stream.flush()
        except OSError as error:
            raise UsageError(f"{self.path}: the conversation cannot be kept there: {error.strerror}") from None

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
