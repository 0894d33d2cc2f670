"""Tokenization that keeps its word: the pieces of the ids, joined, are exactly the bytes that were given.

The native tokenizer does not promise that. It may put a space in front (SentencePiece vocabularies), replaces broken
UTF-8, takes a literal "▁" for a space, strips blanks beside some special tokens, and can merge ordinary text into a
control token. Every answer is therefore compared with the text; where it differs the text is cut around the culprits
and the parts are tokenized on their own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cached_property

import numpy as np

from gguf_fusion.arrays import I32
from gguf_fusion.errors import ExpertFailedError
from gguf_fusion.vocabulary import Kind, Vocabulary

NativeTokenize = Callable[[bytes, bool], I32]
"""(valid UTF-8, parse_special) -> ids, without BOS."""

_log = logging.getLogger(__name__)

_WEDGES = (b"\x01", b"\x02", b"\n", b"\x1f")
"""Characters put before a text so that an added space clings to them; no vocabulary merges them with what follows."""


_SHORT = 64
"""Parts up to so many bytes are remembered during a call: culprits tend to come again."""


class Tokenizer:
    """Exact tokenization with one expert's vocabulary."""

    def __init__(self, name: str, vocabulary: Vocabulary, native: NativeTokenize) -> None:
        self._name = name
        self._vocabulary = vocabulary
        self._native = native
        self._warned = False
        self._is_text = vocabulary.kinds == Kind.TEXT
        self._adds_space = self._joined(native(b"a", False)) == b" a"

    def text(self, text: bytes) -> I32:
        """int32[n]: canonical ids of plain text, for any bytes. No BOS, nothing but TEXT ids, exact when joined.

        The one exception: a byte in ``unspellable`` is read as another one, with a warning.
        """
        return _concatenated([self._plain(part) if valid else self._spelled(part) for part, valid in utf8_runs(text)])

    def template(self, text: bytes) -> I32:
        """int32[n]: ids of template scaffolding; the text of control tokens becomes these tokens, no BOS is added.

        Blanks next to control tokens are treated as the model file demands, no space is put at the start.
        """
        return _concatenated(
            [self._called(part, True) if valid else self._spelled(part) for part, valid in utf8_runs(text)]
        )

    def _called(self, text: bytes, parse_special: bool) -> I32:
        """The native answer without a space added at the start."""
        if not text:
            return np.zeros(0, np.int32)
        if not self._adds_space:
            return self._native(text, parse_special)
        for wedge in _WEDGES:
            ids = self._native(wedge + text, parse_special)
            for n in range(1, min(4, len(ids)) + 1):
                if self._joined(ids[:n]) in (wedge, b" " + wedge):
                    return ids[n:]
        return self._native(text, parse_special)

    def _plain(self, text: bytes) -> I32:
        """Ids of valid UTF-8: the native answer where it is exact, else that of the parts around what went wrong."""
        done: list[I32] = []
        todo = [text]
        known: dict[bytes, I32] = {}
        while todo:
            part = todo.pop()
            ids = known.get(part)
            if ids is None:
                ids = self._called(part, False) if _is_utf8(part) else self._spelled(part)
                culprits = self._culprits(part, ids)
                if culprits and len(part.decode()) > 1:
                    todo.extend(reversed(_cut(part, culprits)))
                    continue
                if culprits:
                    ids = self._spelled(part)
                if len(part) <= _SHORT:
                    known[part] = ids
            done.append(ids)
        return _concatenated(done)

    def _culprits(self, text: bytes, ids: I32) -> set[bytes]:
        """What in ``text`` went wrong: the bytes of all tokens that are no text, else the first changed character."""
        joined, is_text = self._joined(ids), self._is_text[ids]
        if joined == text and is_text.all():
            return set()
        found = {piece for piece in map(self._vocabulary.piece, ids[~is_text].tolist()) if piece and piece in text}
        if found:
            return found
        same = 0
        while same < min(len(text) - 1, len(joined)) and text[same] == joined[same]:
            same += 1
        return {_character_at(text, same)}

    def _joined(self, ids: I32) -> bytes:
        return b"".join(map(self._vocabulary.piece, ids.tolist()))

    def _spelled(self, data: bytes) -> I32:
        """Bytes that must not, or cannot, go through the native tokenizer: the longest pieces there are, then bytes."""
        ids, at = [], 0
        while at < len(data):
            for length in range(min(4, len(data) - at), 0, -1):
                token = self._short_pieces.get(data[at : at + length])
                if token is not None:
                    break
            else:
                token, length = self._replacement(data[at]), 1
            ids.append(token)
            at += length
        return np.array(ids, np.int32)

    def _replacement(self, byte: int) -> int:
        """A one-byte token to read instead of a byte that the vocabulary lacks, so that all borders stay in place.

        Stopping instead would let one stray control character end the work of a whole ensemble.
        """
        if not self._warned:
            self._warned = True
            _log.warning("expert %r has no token for the byte 0x%02X: it reads '?' instead", self._name, byte)
        for stand_in in (b"?", b" ", b"."):
            token = self._short_pieces.get(stand_in)
            if token is not None:
                return token
        raise ExpertFailedError(
            self._name,
            f"its vocabulary has no token for the byte 0x{byte:02X} and none to stand in for it; "
            f"choose a text-generation model",
        )

    @property
    def unspellable(self) -> bytes:
        """The byte values for which the vocabulary has no token; control characters and bytes that UTF-8 never uses."""
        return bytes(b for b in range(256) if bytes([b]) not in self._short_pieces)

    @cached_property
    def _short_pieces(self) -> dict[bytes, int]:
        """TEXT pieces of one byte, and those of up to 4 bytes that hold parts of characters only."""
        vocabulary = self._vocabulary
        lengths = np.diff(vocabulary.piece_start)
        short = np.flatnonzero((vocabulary.kinds == Kind.TEXT) & (lengths >= 1) & (lengths <= 4))
        first = vocabulary.piece_bytes[vocabulary.piece_start[short]]
        known: dict[bytes, int] = {}
        # Byte fallbacks last: where a normal piece has the same byte, it is the one the tokenizer uses.
        order = np.lexsort((short, vocabulary.byte_fallback[short]))
        for token in short[order][((first >= 0x80) | (lengths[short] == 1))[order]]:
            piece = vocabulary.piece(int(token))
            if len(piece) == 1 or not _is_utf8(piece):
                known.setdefault(piece, int(token))
        return known


def utf8_runs(data: bytes) -> list[tuple[bytes, bool]]:
    """``data`` cut into non-empty runs, each (bytes, whether it is valid UTF-8)."""
    runs: list[tuple[bytes, bool]] = []
    at = 0
    while at < len(data):
        try:
            data[at:].decode()
        except UnicodeDecodeError as error:
            if error.start:
                runs.append((data[at : at + error.start], True))
            broken = data[at + error.start : at + error.end]
            if runs and not runs[-1][1]:
                runs[-1] = (runs[-1][0] + broken, False)
            else:
                runs.append((broken, False))
            at += error.end
        else:
            runs.append((data[at:], True))
            break
    return runs


def _cut(text: bytes, culprits: set[bytes]) -> list[bytes]:
    """``text`` cut before and after every culprit; a text that is one is cut behind its first character."""
    if text in culprits:
        # Alone, the whole text means something else than text: its first character breaks the spell.
        first = len(_character_at(text, 0))
        return [text[:first], text[first:]]
    pattern = b"|".join(map(re.escape, sorted(culprits, key=len, reverse=True)))
    return [part for part in re.split(b"(" + pattern + b")", text) if part]


def _character_at(text: bytes, at: int) -> bytes:
    """The UTF-8 character of valid ``text`` that the byte at ``at`` belongs to."""
    while at and text[at] & 0xC0 == 0x80:
        at -= 1
    end = at + 1
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end += 1
    return text[at:end]


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _concatenated(parts: list[I32]) -> I32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)
