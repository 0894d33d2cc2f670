"""Dev and test by document: what is chosen on one part is reported on the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gguf_fusion.evaluate.score import Document

_SHINGLE = 16
SHARED = 0.5
"""Share of the smaller document's 16-byte pieces found in the other from which two documents belong together."""


def split(documents: Sequence[Document]) -> tuple[list[int], list[int]]:
    """(indices of dev, indices of test), half of every domain each, near-duplicates on one side.

    The choice depends on the texts and domains alone, not on names or order. A domain of one group of near-duplicates
    goes to test. Either list may be empty: then the documents cannot be split.
    """
    digests = [hashlib.sha256(document.text).digest() for document in documents]
    groups = [sorted(group, key=lambda i: (digests[i], documents[i].domain)) for group in together(documents)]
    by_domain: dict[str, list[list[int]]] = {}
    for group in sorted(groups, key=lambda group: digests[group[0]]):
        by_domain.setdefault(documents[group[0]].domain, []).append(group)
    sides: tuple[list[int], list[int]] = ([], [])
    for same in by_domain.values():
        for rank, group in enumerate(same):
            sides[rank % 2 == 0].extend(group)
    return sorted(sides[0]), sorted(sides[1])


def together(documents: Sequence[Document]) -> list[list[int]]:
    """Groups of near-duplicates, by index; a chain of pairs is one group."""
    pieces = [_pieces(document.text) for document in documents]
    known, places = np.unique(np.concatenate([*pieces, np.zeros(0, np.uint64)]), return_inverse=True)
    parts = np.split(places, np.cumsum([len(p) for p in pieces])[:-1]) if pieces else []
    leader = list(range(len(documents)))
    for i, mine in enumerate(parts):
        seen = np.zeros(len(known), np.bool_)
        seen[mine] = True
        for j in range(i):
            if leader[i] != leader[j] and seen[parts[j]].sum() >= SHARED * min(len(mine), len(parts[j])):
                leader = [leader[i] if one == leader[j] else one for one in leader]
    groups: dict[int, list[int]] = {}
    for i, of in enumerate(leader):
        groups.setdefault(of, []).append(i)
    return list(groups.values())


def _pieces(text: bytes) -> NDArray[np.uint64]:
    """uint64[≥ 1]: hashes of all runs of 16 bytes; a shorter text is one piece, filled up with zeros."""
    data = np.frombuffer(text.ljust(_SHINGLE, b"\0"), np.uint8)
    factors = np.random.default_rng(0).integers(1, 2**63, _SHINGLE, np.uint64) | np.uint64(1)
    hashes = np.zeros(len(data) - _SHINGLE + 1, np.uint64)
    for k, factor in enumerate(factors):
        hashes += data[k : k + len(hashes)] * factor
    return np.unique(hashes)
