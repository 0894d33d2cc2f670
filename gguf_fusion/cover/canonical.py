"""Canonical tokenization of short stretches: where a token border is plausible, and how to find the text again."""

from __future__ import annotations

import numpy as np

from gguf_fusion.arrays import I32
from gguf_fusion.experts.base import Expert

_LOOK_BACK = 64
"""Bytes looked back for a word start; longer runs (a line of "=") are cut there."""

_BORDER_TOKENS = 3
"""Tokens of a raw prompt that stay open at its end."""


def word_start(text: bytes, position: int, at_least: int = 8) -> int:
    """Start of a word at least ``at_least`` bytes before ``position``: tokenizers begin afresh at such places.

    A start is a blank that follows something else than a blank. Falls back to ``_LOOK_BACK`` bytes before.
    """
    floor = max(0, position - at_least - _LOOK_BACK)
    for i in range(min(position - at_least, len(text) - 1), floor, -1):
        if text[i] in b" \n" and text[i - 1] not in b" \n\t":
            return i
    return _character_start(text, floor)


def _word_end(text: bytes, position: int) -> int:
    """Where a word ends, at least 8 bytes after ``position``: what follows does not change how it is cut.

    Falls back to ``_LOOK_BACK`` bytes after.
    """
    last = min(len(text), position + 8 + _LOOK_BACK)
    for i in range(position + 8, last):
        if text[i] in b" \n" and text[i - 1] not in b" \n\t":
            return i
    return last if last == len(text) else _character_start(text, last)


def _character_start(text: bytes, position: int) -> int:
    """The nearest start of a UTF-8 character at or before ``position``."""
    start = position
    while start > 0 and position - start < 4 and start < len(text) and text[start] & 0xC0 == 0x80:
        start -= 1
    return start


def complete_length(text: bytes) -> int:
    """Length of ``text`` without a UTF-8 character that is cut off at its end."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 1 if byte < 0x80 else 2 if byte >> 5 == 6 else 3 if byte >> 4 == 14 else 4 if byte >> 3 == 30 else 1
        return len(text) - back if need > back else len(text)
    return len(text)


def borders(expert: Expert, text: bytes) -> I32:
    """int32[n]: end positions of the canonical tokens of ``text``, in bytes."""
    ids = expert.tokenize(text)
    starts = expert.vocabulary.piece_start
    return np.cumsum(starts[ids + 1] - starts[ids]).astype(np.int32)


def border_holds(expert: Expert, text: bytes, position: int) -> bool:
    """Whether the canonical tokenization of the words around ``position`` has a token border there.

    A border inside a character that is still incomplete cannot be judged and counts as held.
    """
    end = complete_length(text)
    if position >= end:
        return True
    start = word_start(text, position)
    return position == start or position - start in borders(expert, text[start : _word_end(text[:end], position)])


def prompt_border(expert: Expert, text: bytes) -> tuple[I32, bytes]:
    """(ids to prefill, bytes to push): a raw prompt cut some tokens before its end.

    The cut lies at least three tokens before the end, and at least one before a run of one kind of character (blanks,
    digits, letters, a repeated sign) that reaches the end: such runs are where a longer text would be cut otherwise.
    """
    ids = expert.tokenize(text)
    starts = expert.vocabulary.piece_start
    ends = np.cumsum(starts[ids + 1] - starts[ids])
    before_run = int(np.searchsorted(ends, _final_run(text), side="right")) - 1
    keep = max(0, min(len(ids) - _BORDER_TOKENS, before_run))
    cut = int(ends[keep - 1]) if keep else 0
    return ids[:keep], text[cut:]


def _final_run(text: bytes) -> int:
    """Start of the run of one kind of character at the end of ``text``, at most ``_LOOK_BACK`` bytes back."""
    start = len(text)
    while start > max(0, len(text) - _LOOK_BACK) and _kind(text[start - 1]) == _kind(text[-1]):
        start -= 1
    return start


def _kind(byte: int) -> int:
    if byte in b" \t\r\n":
        return -1
    if byte in b"0123456789":
        return -2
    if byte >= 0x80 or chr(byte).isalpha():
        return -3
    return byte
