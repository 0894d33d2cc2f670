"""Reads the vocabulary of a loaded model: bytes, kinds and END set of all ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gguf_fusion.arrays import Bool
from gguf_fusion.errors import ConfigError
from gguf_fusion.experts import native
from gguf_fusion.vocabulary import Kind, Vocabulary

EndEdit = Iterable[int | str]
"""Token ids or exact token texts."""


def read_vocabulary(model: native.Model, *, add_end: EndEdit = (), remove_end: EndEdit = ()) -> Vocabulary:
    """All ids of ``model``; ``add_end`` and ``remove_end`` edit the set that ends a text.

    The native set is guessed by token text, and what it matches is turned into control tokens on the way. An id taken
    out of the set becomes text again if the file had it as text, else a control token.
    """
    piece_bytes, piece_start = model.pieces()
    attributes = model.attributes()

    def has(bit: int) -> Bool:
        found: Bool = (attributes & bit) != 0
        return found

    is_text = has(native.ATTR_NORMAL) | has(native.ATTR_USER_DEFINED) | has(native.ATTR_BYTE)
    empty = np.diff(piece_start) == 0
    control = has(native.ATTR_CONTROL) | has(native.ATTR_UNKNOWN)
    kinds = np.full(model.n_vocab, Kind.UNUSED, np.uint8)
    kinds[is_text & ~empty] = Kind.TEXT
    kinds[control] = Kind.CONTROL
    kinds[has(native.ATTR_UNUSED) | (empty & ~control)] = Kind.UNUSED
    for token in model.suppressed_ids():
        kinds[token] = Kind.UNUSED

    plain = Vocabulary(
        piece_bytes=piece_bytes,
        piece_start=piece_start,
        kinds=kinds,
        byte_fallback=has(native.ATTR_BYTE),
        bos_id=model.bos_id(),
    )
    ends = set(model.end_ids()) | set(_ids(plain, add_end, "add_end"))
    removed = set(_ids(plain, remove_end, "remove_end"))
    for token in removed & ends:
        kinds[token] = Kind.TEXT if is_text[token] and not empty[token] else Kind.CONTROL
    kinds[sorted(ends - removed)] = Kind.END
    return plain


def _ids(vocabulary: Vocabulary, wanted: EndEdit, key: str) -> list[int]:
    """The ids that ``wanted`` names, by number or by text."""
    found: list[int] = []
    for item in wanted:
        if isinstance(item, str):
            matches = vocabulary.ids_of(item.encode())
            if not matches:
                raise ConfigError(f"{key}: no token has the text {item!r}; 'gguf-fusion show --vocab' lists them")
            found.extend(matches)
        elif isinstance(item, bool) or not 0 <= item < vocabulary.n_vocab:
            raise ConfigError(f"{key}: expected a token id in 0…{vocabulary.n_vocab - 1} or a token text, got {item!r}")
        else:
            found.append(item)
    return found
