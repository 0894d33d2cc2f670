"""Single hypotheses of a cover tree: a leaf goes on by a byte, ends, or is added; a ghost is taken out."""

from __future__ import annotations

import numpy as np

from gguf_fusion.arrays import I32, I64
from gguf_fusion.kernels._jit import kernel
from gguf_fusion.kernels.covers import Covers, Pieces, Rows
from gguf_fusion.kernels.masses import exact_end, first_masses, narrow, range_sum


@kernel
def narrow_leaf(c: Covers, pieces: Pieces, rows: Rows, i: int, byte: int) -> bool:
    """Restrict leaf ``i`` to pieces that go on with ``byte``; False if none with mass does."""
    leaf = c.leaves[i]
    if leaf.depth == 0:
        lo, hi = pieces.first_start[byte], pieces.first_start[byte + 1]
        mass = rows.first[leaf.slot, byte]
    else:
        lo, hi = narrow(leaf.lo, leaf.hi, leaf.depth, byte, pieces.bytes, pieces.start)
        mass = (
            range_sum(rows.probs[leaf.slot], rows.sums[leaf.slot], lo, hi) * rows.scale[leaf.slot] if lo < hi else 0.0
        )
    leaf.lo, leaf.hi, leaf.mass = lo, hi, mass
    leaf.depth += 1
    return bool(mass > 0.0)


@kernel
def close_leaf(c: Covers, pieces: Pieces, rows: Rows, i: int, position: int) -> bool:
    """Make the piece of leaf ``i`` that ends at ``position`` a ghost; False if no longer piece has mass."""
    leaf, s = c.leaves[i], c.state[0]
    if leaf.depth == 0:
        return True
    row, scale = rows.probs[leaf.slot], rows.scale[leaf.slot]
    lo, mass = exact_end(row, leaf.lo, leaf.hi, leaf.depth, pieces.start)
    if lo == leaf.lo:
        return True
    if mass > 0.0:
        node, ghost = c.nodes[s.n_nodes], c.ghosts[s.n_ghosts]
        node.parent, node.token = leaf.path, pieces.representative[leaf.lo]
        node.length = c.nodes[leaf.path].length + 1
        ghost.path, ghost.position = s.n_nodes, position
        ghost.log_weight, ghost.stood = leaf.log_weight + np.log(mass * scale), c.stood[position]
        s.n_nodes += 1
        s.n_ghosts += 1
    leaf.lo = lo
    leaf.mass = range_sum(row, rows.sums[leaf.slot], lo, leaf.hi) * scale if lo < leaf.hi else 0.0
    return bool(leaf.mass > 0.0)


@kernel
def add_row(pieces: Pieces, rows: Rows, slot: int, text: float, end: float) -> None:
    """Finish a row whose ``probs`` and ``sums`` are in their slot: they sum to ``text``, END's mass is ``end``."""
    rows.scale[slot] = 1.0 / (text + end)
    first_masses(rows.probs[slot], rows.sums[slot], pieces.first_start, rows.scale[slot], rows.first[slot])
    rows.first[slot, 256] = end * rows.scale[slot]


@kernel
def replay(c: Covers, pieces: Pieces, rows: Rows, path: int, log_weight: float, position: int, slot: int) -> bool:
    """Add a leaf for a boundary that was evaluated, and read the text since it; what ends on the way is a ghost.

    False where there is no room for what may be added.
    """
    s = c.state[0]
    n = s.here - position
    if s.n_leaves == len(c.leaves) or s.n_ghosts + n > len(c.ghosts) or s.n_nodes + n > len(c.nodes):
        return False
    i = s.n_leaves
    leaf = c.leaves[i]
    leaf.path, leaf.slot, leaf.log_weight = path, slot, log_weight
    leaf.lo, leaf.hi, leaf.depth, leaf.mass = 0, len(pieces.representative), 0, 1.0
    for at in range(position, s.here):
        if not narrow_leaf(c, pieces, rows, i, c.text[at]):
            return True
        if at + 1 < s.here and not close_leaf(c, pieces, rows, i, at + 1):
            return True
    s.n_leaves += 1
    return True


@kernel
def token_path(c: Covers, base: I32, path: int) -> I32:
    """int32[n]: the prompt's ids and the tokens of a node."""
    ids = np.empty(c.nodes[path].length, np.int32)
    ids[: len(base)] = base
    for at in range(len(ids) - 1, len(base) - 1, -1):
        ids[at] = c.nodes[path].token
        path = c.nodes[path].parent
    return ids


@kernel
def remove(c: Covers, which: I64) -> None:
    """Take ghosts out: int64[n], their indices."""
    s = c.state[0]
    kept = 0
    for i in range(s.n_ghosts):
        stays = True
        for k in which:
            if k == i:
                stays = False
        if stays:
            c.ghosts[kept] = c.ghosts[i]
            kept += 1
    s.n_ghosts = s.n_joined = kept
