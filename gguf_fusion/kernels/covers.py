"""The covers of a text as arrays, for the kernels of ``hypotheses``.

Hypotheses are records, not objects: a cover tree is asked once per byte and expert, and interpreting a few dozen
hypotheses one by one would cost more than all the sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gguf_fusion.arrays import F32, F64, I32, I64, U8

LEAF = np.dtype(
    [("path", "i4"), ("lo", "i4"), ("hi", "i4"), ("depth", "i4"), ("slot", "i4"), ("log_weight", "f8"), ("mass", "f8")],
    align=True,
)
"""An evaluated boundary: its path (a node), the row's slot, and the pieces in [lo, hi) that agree with the ``depth``
bytes since it; ``mass`` is the probability of that range, END included at depth 0."""

BOUNDARY = np.dtype([("path", "i4"), ("position", "i4"), ("log_weight", "f8"), ("stood", "f8")], align=True)
"""A token border at ``position`` that is not evaluated; ``stood``: stand-in log-probability of the text up to there."""

NODE = np.dtype([("parent", "i4"), ("token", "i4"), ("length", "i4")], align=True)
"""A token path is a node and its ancestors; node 0 is the prompt's ids. ``length`` counts them all."""

STATE = np.dtype(
    [
        ("n_leaves", "i4"), ("n_ghosts", "i4"), ("n_joined", "i4"), ("n_nodes", "i4"), ("here", "i4"),
        ("longest", "i4"), ("anchor_path", "i4"), ("anchor_position", "i4"), ("log_total", "f8"), ("ghost_share", "f8"),
    ],
    align=True,
)  # fmt: skip
"""Counts and sums; ``here``: bytes of text, ``longest``: tokens of the longest live path, ``anchor``: where the
heaviest leaf began. Ghosts before ``n_joined`` all lie at different positions."""

READY, NO_ROOM, NO_MASS, LOST = -1.0, -2.0, -3.0, -4.0
"""Instead of a cost: the law is summed up; grow the arrays and ask again; no hypothesis has mass; the symbol had
none."""


class Covers(NamedTuple):
    """All hypotheses of a text, with room to spare.

    state: STATE[1];  leaves: LEAF[n];  ghosts: BOUNDARY[n], costs: float64[n];  nodes: NODE[n]
    text: uint8[n], its bytes;  stood: float64[n + 1], cumulative stand-in log-probability at each position
    """

    state: Any
    leaves: Any
    ghosts: Any
    costs: F64
    nodes: Any
    text: U8
    stood: F64


class Pieces(NamedTuple):
    """What ``bridge.tables.ByteTables`` holds, as kernels read it."""

    representative: I32
    bytes: U8
    start: I64
    first_start: I32
    pair_start: I32


class Rows(NamedTuple):
    """Rows in slots.

    probs: float32[n, n_text], sums: float64[n, n_blocks], as ``softmax.row_masses`` writes them
    scale: float64[n], makes a row sum to 1 together with END;  first: float64[n, 257], its law of the first symbol
    """

    probs: F32
    sums: F64
    scale: F64
    first: F64


class Limits(NamedTuple):
    """What is left out.

    epsilon: bits that ghosts may cost;  log_keep: shares below are dropped;  escape: share always left to the stand-in
    merge: whether hypotheses that began at the same place are joined
    """

    epsilon: float
    log_keep: float
    escape: float
    merge: bool
