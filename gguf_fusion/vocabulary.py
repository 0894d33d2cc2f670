"""Vocabulary: the bytes behind every token id, which ids are text, and which end a text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from gguf_fusion.arrays import I32, I64, U8, Bool


class Kind(IntEnum):
    """What a token id is for the bridge."""

    TEXT = 0
    """Stands for bytes of text (normal, user-defined or byte pieces)."""
    CONTROL = 1
    """Scaffolding of templates; never text."""
    UNUSED = 2
    """Padding, unused, suppressed or empty ids; never chosen."""
    END = 3
    """Ends the generation; the masses of all END ids add up to the END symbol."""


@dataclass(frozen=True)
class Vocabulary:
    """Bytes and kinds of all token ids of one expert.

    piece_bytes : uint8[total], the pieces of all ids one after the other
    piece_start : int64[n_vocab + 1], piece of id t is piece_bytes[piece_start[t]:piece_start[t + 1]]
    kinds       : uint8[n_vocab], values of Kind
    byte_fallback : bool[n_vocab], ids such as <0x0A> that stand for a raw byte beside a normal piece
    bos_id      : id to put first, or None where the model wants none (its own add-BOS flag decides)
    """

    piece_bytes: U8
    piece_start: I64
    kinds: U8
    byte_fallback: Bool
    bos_id: int | None

    @property
    def n_vocab(self) -> int:
        """Number of ids, the width of a logits row."""
        return len(self.kinds)

    @cached_property
    def _blob(self) -> bytes:
        return self.piece_bytes.tobytes()

    def piece(self, token_id: int) -> bytes:
        """Bytes of one id."""
        return self._blob[self.piece_start[token_id] : self.piece_start[token_id + 1]]

    def text(self, ids: I32) -> bytes:
        """Joined bytes of the TEXT ids in ``ids``; all other kinds add nothing."""
        return b"".join(self.piece(int(t)) for t in ids if self.kinds[t] == Kind.TEXT)

    def ids_of(self, piece: bytes) -> list[int]:
        """All ids of any kind whose bytes are exactly ``piece``, ascending. Looks through the whole vocabulary."""
        lengths = np.diff(self.piece_start)
        starts = self.piece_start[:-1]
        same = lengths == len(piece)
        for offset, byte in enumerate(piece):
            candidates = np.flatnonzero(same)
            same[candidates[self.piece_bytes[starts[candidates] + offset] != byte]] = False
        return [int(t) for t in np.flatnonzero(same)]

    @cached_property
    def end_ids(self) -> I32:
        """int32[n_end], ids of kind END in ascending order."""
        return np.flatnonzero(self.kinds == Kind.END).astype(np.int32)

    @cached_property
    def text_ids(self) -> I32:
        """int32[n_text], ids of kind TEXT in ascending order."""
        return np.flatnonzero(self.kinds == Kind.TEXT).astype(np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over pieces and kinds without trailing unused ids: equal means interchangeable ids."""
        last = int(np.flatnonzero(self.kinds != Kind.UNUSED).max(initial=-1)) + 1
        digest = hashlib.sha256(b"gguf-fusion vocabulary 1")
        digest.update(self.piece_start[: last + 1].astype("<i8").tobytes())
        digest.update(self.piece_bytes[: self.piece_start[last]].tobytes())
        digest.update(self.kinds[:last].tobytes())
        digest.update(self.byte_fallback[:last].tobytes())
        return digest.hexdigest()

    @classmethod
    def from_pieces(
        cls,
        pieces: list[bytes],
        kinds: list[int] | None = None,
        bos_id: int | None = None,
        byte_fallback: list[bool] | None = None,
    ) -> Vocabulary:
        """Build from a list of pieces; ``kinds`` defaults to TEXT, with UNUSED for empty pieces."""
        if kinds is None:
            kinds = [Kind.TEXT if p else Kind.UNUSED for p in pieces]
        start = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(p) for p in pieces], out=start[1:])
        return cls(
            piece_bytes=np.frombuffer(b"".join(pieces), np.uint8).copy(),
            piece_start=start,
            kinds=np.array(kinds, np.uint8),
            byte_fallback=np.array(byte_fallback or [False] * len(pieces), np.bool_),
            bos_id=bos_id,
        )
