"""Windows: how a document that is longer than a context is cut, the same way for every expert.

Each window starts afresh; its first bytes are context and not scored, the scored ranges join without a gap. The first
``FIRST_BYTES`` of a document are context too, since a model without a BOS token has no law for its first token. A
scored range begins and ends where the canonical tokens of all experts have a border, so that the bits of an expert's
own tokens and those of its bytes belong to exactly the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gguf_fusion.cover.canonical import borders, word_start
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.base import Expert

SIZE = 4096
CONTEXT = 512
FIRST_BYTES = 32

_LOOK_AHEAD = 64
"""Bytes after a scored range that are still tokenized: the token before a hard cut may not be the text's own."""

_CANDIDATES = 8
_LEAST_SCORED = 256


@dataclass(frozen=True, slots=True)
class Window:
    """Byte offsets: tokenized from ``start`` to ``end``, scored from ``score`` to ``stop``."""

    start: int
    score: int
    stop: int
    end: int


def check_sizes(size: int, context: int) -> None:
    """Raise UsageError unless every window has context and something to score."""
    if context < FIRST_BYTES or size < context + _LEAST_SCORED:
        raise UsageError(
            f"window: expected a context of at least {FIRST_BYTES} bytes and a window at least {_LEAST_SCORED} bytes "
            f"larger, got {context} in {size}"
        )


def windows(text: bytes, experts: Sequence[Expert], size: int = SIZE, context: int = CONTEXT) -> list[Window]:
    """Cut ``text``; every byte after the first few is scored in exactly one window. Empty text has no windows."""
    check_sizes(size, context)
    found: list[Window] = []
    if not text:
        return found
    n = len(text)
    start, score = 0, -1
    while True:
        end = n if start + size >= n else word_start(text, start + size, at_least=0)
        common = _common_borders(text, start, end, experts)
        if score < 0:
            score = next((border for border in common if border >= FIRST_BYTES), n)
        if end == n:
            return [*found, Window(start, score, n, n)]
        inside = [border for border in common if score < border <= end - _LOOK_AHEAD]
        stop, after = _join(text, inside[-_CANDIDATES:][::-1] or [end], experts, context)
        found.append(Window(start, score, stop, end))
        start, score = after, stop


def _join(text: bytes, candidates: list[int], experts: Sequence[Expert], context: int) -> tuple[int, int]:
    """(end of a scored range, start of the next window): a border in this window that is one in the next window too."""
    for stop in candidates:
        start = word_start(text, stop - context, at_least=0)
        if stop in _common_borders(text, start, min(len(text), stop + _LOOK_AHEAD), experts):
            return stop, start
    return candidates[0], word_start(text, candidates[0] - context, at_least=0)


def _common_borders(text: bytes, start: int, end: int, experts: Sequence[Expert]) -> list[int]:
    """Ascending positions in ``text`` where the canonical tokens of all experts end."""
    common: set[int] | None = None
    for expert in experts:
        mine = set((borders(expert, text[start:end]) + start).tolist())
        common = mine if common is None else common & mine
    return sorted(common or {end})
