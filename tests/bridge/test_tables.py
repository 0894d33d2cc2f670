"""Byte tables and their disk cache."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.bridge import store
from gguf_fusion.bridge.tables import byte_tables
from gguf_fusion.testing import nested_vocabulary
from gguf_fusion.vocabulary import Kind, Vocabulary


def pieces_of(tables) -> list[bytes]:
    blob = tables.piece_bytes.tobytes()
    return [blob[a:b] for a, b in zip(tables.piece_start[:-1], tables.piece_start[1:], strict=True)]


def test_ranges() -> None:
    """Pieces are sorted, and the one- and two-byte tables delimit exactly the pieces with these bytes."""
    rng = np.random.default_rng(0)
    words = {bytes(rng.integers(0, 256, rng.integers(1, 5)).astype(np.uint8)) for _ in range(3000)}
    tables = byte_tables(Vocabulary.from_pieces(sorted(words, key=lambda w: (len(w), w))))
    ordered = pieces_of(tables)
    assert ordered == sorted(words)
    for b in range(256):
        lo, hi = tables.first_start[b], tables.first_start[b + 1]
        assert ordered[lo:hi] == [w for w in ordered if w[0] == b]
    for key in rng.integers(0, 65536, 500):
        prefix = bytes([key >> 8, key & 255])
        lo = tables.pair_start[key]
        hi = min(tables.pair_start[key + 1], tables.first_start[prefix[0] + 1])
        assert ordered[lo:hi] == [w for w in ordered if w.startswith(prefix)]


def test_equal_pieces_share_a_representative() -> None:
    """Ids with the same bytes feed back the id that is no byte fallback (D4)."""
    tables = byte_tables(nested_vocabulary())
    same = [i for i, piece in enumerate(pieces_of(tables)) if piece == b"a"]
    assert len(same) == 2
    assert {int(tables.representative[i]) for i in same} == {0}


def test_no_text_is_refused() -> None:
    """A vocabulary without text pieces cannot be bridged."""
    with pytest.raises(ValueError, match="expected a vocabulary with text pieces"):
        byte_tables(Vocabulary.from_pieces([b"<s>"], [Kind.CONTROL]))


def test_cache_survives_damage() -> None:
    """Tables come back from disk equal, and a damaged file is built again."""
    vocabulary = nested_vocabulary()
    fresh = store.cached_byte_tables(vocabulary)
    [path] = (store.cache_dir() / "tables").glob("bytes-*.npz")
    again = store.cached_byte_tables(vocabulary)
    np.testing.assert_array_equal(fresh.pair_start, again.pair_start)
    path.write_bytes(path.read_bytes()[:100])
    rebuilt = store.cached_byte_tables(vocabulary)
    np.testing.assert_array_equal(fresh.order, rebuilt.order)
    assert path.stat().st_size > 100
