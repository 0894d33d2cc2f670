"""The vocabulary record: pieces, kinds, fingerprint."""

from __future__ import annotations

import numpy as np

from gguf_fusion.testing import nested_vocabulary
from gguf_fusion.vocabulary import Kind, Vocabulary


def test_pieces_and_text() -> None:
    """Pieces come back by id; only text ids add to a text."""
    vocabulary = Vocabulary.from_pieces(
        [b"ab", b"", b"</s>", b"c" * 300], [Kind.TEXT, Kind.UNUSED, Kind.END, Kind.TEXT]
    )
    assert vocabulary.n_vocab == 4
    assert vocabulary.piece(3) == b"c" * 300
    assert vocabulary.text(np.array([0, 2, 1, 3], np.int32)) == b"ab" + b"c" * 300
    assert vocabulary.end_ids.tolist() == [2]
    assert vocabulary.text_ids.tolist() == [0, 3]


def test_ids_of_a_piece() -> None:
    """All ids of one piece are found, whatever their kind; a piece that is not there gives none."""
    vocabulary = nested_vocabulary()
    assert vocabulary.ids_of(b"a") == [0, 11]
    assert vocabulary.ids_of(b"</s>") == [14]
    assert vocabulary.ids_of(b"zz") == []
    assert vocabulary.ids_of(b"") == [13]


def test_fingerprint_ignores_padding() -> None:
    """Siblings that differ in trailing unused ids only are interchangeable; a changed kind or piece is not."""
    plain = Vocabulary.from_pieces([b"a", b"b"])
    padded = Vocabulary.from_pieces([b"a", b"b", b"[PAD1]", b""], [Kind.TEXT, Kind.TEXT, Kind.UNUSED, Kind.UNUSED])
    assert plain.fingerprint == padded.fingerprint
    other_kind = Vocabulary.from_pieces([b"a", b"b"], [Kind.TEXT, Kind.END])
    other_cut = Vocabulary.from_pieces([b"ab", b""])
    assert len({plain.fingerprint, other_kind.fingerprint, other_cut.fingerprint}) == 3
