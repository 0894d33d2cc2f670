"""The arrays of a cover tree: how they begin, grow and are kept for later."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gguf_fusion.arrays import I32
from gguf_fusion.bridge.tables import ByteTables
from gguf_fusion.kernels.covers import BOUNDARY, LEAF, NODE, STATE, Covers, Pieces, Rows
from gguf_fusion.kernels.softmax import BLOCK
from gguf_fusion.records import N_SYMBOLS

_N_ROWS, _N_LEAVES, _N_GHOSTS, _N_NODES, _N_BYTES = 4, 16, 64, 256, 256


class Boundary(NamedTuple):
    """A boundary that is to be evaluated: its path (a node), where it lies, and its joint ln weight there."""

    path: int
    position: int
    log_weight: float


class Hold:
    """Keeps rows for a snapshot: as long as it lives, its slots are not used for others."""

    __slots__ = ("__weakref__", "slots")

    def __init__(self, slots: frozenset[int]) -> None:
        self.slots = slots


def pieces_of(tables: ByteTables) -> Pieces:
    """The tables as kernels read them."""
    return Pieces(tables.representative, tables.piece_bytes, tables.piece_start, tables.first_start, tables.pair_start)


def empty(n_prompt: int) -> Covers:
    """Arrays for a new text after ``n_prompt`` tokens."""
    covers = Covers(
        state=np.zeros(1, STATE),
        leaves=np.zeros(_N_LEAVES, LEAF),
        ghosts=np.zeros(_N_GHOSTS, BOUNDARY),
        costs=np.zeros(_N_GHOSTS),
        nodes=np.zeros(_N_NODES, NODE),
        text=np.zeros(_N_BYTES, np.uint8),
        stood=np.zeros(_N_BYTES + 1),
    )
    covers.state["n_nodes"] = 1
    covers.state["longest"] = covers.nodes["length"][:1] = n_prompt
    return covers


def larger(covers: Covers) -> Covers:
    """The same with room for twice as much of everything."""
    n_bytes = 2 * len(covers.text)
    return Covers(
        state=covers.state,
        leaves=_grown(covers.leaves, 2 * len(covers.leaves)),
        ghosts=_grown(covers.ghosts, 2 * len(covers.ghosts)),
        costs=_grown(covers.costs, 2 * len(covers.costs)),
        nodes=_grown(covers.nodes, 2 * len(covers.nodes)),
        text=_grown(covers.text, n_bytes),
        stood=_grown(covers.stood, n_bytes + 1),
    )


def copied(covers: Covers) -> Covers:
    """An independent copy."""
    return Covers._make(array.copy() for array in covers)


def no_rows(n_text: int) -> Rows:
    """Room for a few rows; memory is taken when a slot is first used."""
    shape = _N_ROWS, n_text
    return Rows(
        np.empty(shape, np.float32), np.empty((_N_ROWS, -(-n_text // BLOCK))), np.zeros(_N_ROWS),
        np.zeros((_N_ROWS, N_SYMBOLS)),
    )  # fmt: skip


def more_rows(rows: Rows) -> Rows:
    """The same with twice as many slots."""
    return Rows._make(_grown(array, 2 * len(array)) for array in rows)


def append_path(covers: Covers, path: int, ids: I32) -> tuple[Covers, int]:
    """(covers, node) of ``path`` followed by ``ids``: int32[n]."""
    for token in ids.tolist():
        if int(covers.state["n_nodes"][0]) == len(covers.nodes):
            covers = larger(covers)
        node = int(covers.state["n_nodes"][0])
        covers.nodes[node] = path, token, covers.nodes[path]["length"] + 1
        covers.state["n_nodes"] += 1
        path = node
    return covers, path


def _grown(array: Any, n: int) -> Any:
    grown = np.empty((n, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
