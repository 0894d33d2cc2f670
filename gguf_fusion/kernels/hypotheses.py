"""What one byte does to all hypotheses of one expert, in one call. ``cover.tree`` decides what is decoded."""

from __future__ import annotations

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.kernels._jit import kernel
from gguf_fusion.kernels.covers import LOST, NO_MASS, NO_ROOM, READY, Covers, Limits, Pieces, Rows
from gguf_fusion.kernels.leaves import close_leaf, narrow_leaf
from gguf_fusion.kernels.masses import child_masses
from gguf_fusion.kernels.standins import Learned, expected_bits, last_byte

_LATE_BITS = 1.0
"""Assumed loss of a stand-in for a boundary that lies some bytes back."""


@kernel
def advance(
    c: Covers, pieces: Pieces, rows: Rows, learned: Learned, limits: Limits, symbol: int, stand_in: float, probs: F64
) -> float:
    """Move past one byte; returns what ``plan`` does, LOST, or READY if nothing has to be decided.

    ``stand_in``: the stand-in law's probability of it;  probs : float64[257], the law before, and if READY the law
    after.
    """
    s = c.state[0]
    if s.here == len(c.text) or s.n_ghosts + s.n_leaves > len(c.ghosts) or s.n_nodes + s.n_leaves > len(c.nodes):
        return NO_ROOM
    lost = probs[symbol] + (s.ghost_share - limits.escape) * stand_in <= limits.escape
    kept = 0
    for i in range(s.n_leaves):
        c.leaves[kept] = c.leaves[i]
        kept += narrow_leaf(c, pieces, rows, kept, symbol)
    s.n_leaves = kept
    c.text[s.here] = symbol
    c.stood[s.here + 1] = c.stood[s.here] + np.log(max(stand_in, 1e-30))
    s.here += 1
    if lost:
        return LOST
    left = plan(c, pieces, rows, learned, limits)
    if s.n_leaves and 0.0 <= left <= limits.epsilon and (limits.epsilon or not s.n_ghosts):
        sum_law(c, pieces, rows, limits, probs)
        return READY
    return left


@kernel
def plan(c: Covers, pieces: Pieces, rows: Rows, learned: Learned, limits: Limits) -> float:
    """Close what ends here, join, drop what is negligible; returns what the ghosts are expected to cost, in bits.

    ``costs`` of the ghosts are filled in: a boundary's share times what a stand-in usually loses at such a place.
    NO_MASS if no hypothesis is left.
    """
    s = c.state[0]
    if s.n_ghosts + s.n_leaves > len(c.ghosts) or s.n_nodes + s.n_leaves > len(c.nodes):
        return NO_ROOM
    kept = 0
    for i in range(s.n_leaves):
        c.leaves[kept] = c.leaves[i]
        kept += close_leaf(c, pieces, rows, kept, s.here)
    s.n_leaves = kept
    if limits.merge:
        join(c)
    now, top = c.stood[s.here], -np.inf
    for i in range(kept):
        top = max(top, c.leaves[i].log_weight + np.log(c.leaves[i].mass))
    for i in range(s.n_ghosts):
        top = max(top, c.ghosts[i].log_weight + (now - c.ghosts[i].stood))
    if top == -np.inf:
        return NO_MASS
    total = 0.0
    for i in range(kept):
        total += np.exp(c.leaves[i].log_weight + np.log(c.leaves[i].mass) - top)
    for i in range(s.n_ghosts):
        total += np.exp(c.ghosts[i].log_weight + (now - c.ghosts[i].stood) - top)
    s.log_total = top + np.log(total)
    return drop(c, learned, limits)


@kernel
def join(c: Covers) -> None:
    """Join hypotheses that began at the same place: masses add up, an evaluated one or the heaviest speaks for all."""
    s, ghosts = c.state[0], c.ghosts
    kept = s.n_joined
    for k in range(s.n_joined, s.n_ghosts):
        new = ghosts[k]
        joined = False
        for i in range(s.n_leaves):
            leaf = c.leaves[i]
            if s.here - leaf.depth == new.position:
                leaf.log_weight = np.logaddexp(leaf.log_weight, new.log_weight)
                joined = True
                break
        for i in range(0 if joined else kept):
            old = ghosts[i]
            if old.position == new.position:
                both = np.logaddexp(old.log_weight, new.log_weight)
                if new.log_weight > old.log_weight:
                    old.path = new.path
                old.log_weight = both
                joined = True
                break
        if not joined:
            ghosts[kept] = new
            kept += 1
    s.n_ghosts = s.n_joined = kept


@kernel
def drop(c: Covers, learned: Learned, limits: Limits) -> float:
    """Drop negligible hypotheses, find the anchor, and return the expected cost of the ghosts that stay."""
    s = c.state[0]
    now, keep = c.stood[s.here], s.log_total + limits.log_keep
    longest, heaviest, kept = 0, -np.inf, 0
    for i in range(s.n_leaves):
        leaf = c.leaves[i]
        share = leaf.log_weight + np.log(leaf.mass)
        if share < keep:
            continue
        if share > heaviest:
            heaviest, s.anchor_path, s.anchor_position = share, leaf.path, s.here - leaf.depth
        longest = max(longest, c.nodes[leaf.path].length)
        c.leaves[kept] = leaf
        kept += 1
    s.n_leaves = kept
    last = last_byte(c.text, s.here)
    left, kept = 0.0, 0
    for i in range(s.n_ghosts):
        ghost = c.ghosts[i]
        log_share = ghost.log_weight + (now - ghost.stood) - s.log_total
        if log_share < limits.log_keep:
            continue
        bits = expected_bits(learned, last, log_share) if ghost.position == s.here else _LATE_BITS
        c.costs[kept] = np.exp(log_share) * bits
        left += c.costs[kept]
        longest = max(longest, c.nodes[ghost.path].length)
        c.ghosts[kept] = ghost
        kept += 1
    s.n_ghosts = s.n_joined = kept
    s.longest = longest
    return left


@kernel
def sum_law(c: Covers, pieces: Pieces, rows: Rows, limits: Limits, probs: F64) -> None:
    """Write the leaves' next-symbol masses to ``probs``; what the ghosts hold is left to the stand-in."""
    s = c.state[0]
    probs[:] = 0.0
    for i in range(s.n_leaves):
        leaf = c.leaves[i]
        weight = np.exp(leaf.log_weight - s.log_total)
        if leaf.depth == 0:
            probs += weight * rows.first[leaf.slot]
        else:
            child_masses(
                rows.probs[leaf.slot], rows.sums[leaf.slot], leaf.lo, leaf.hi, leaf.depth,
                pieces.bytes, pieces.start, pieces.pair_start, weight * rows.scale[leaf.slot], probs,
            )  # fmt: skip
    ghosts = 0.0
    for i in range(s.n_ghosts):
        ghost = c.ghosts[i]
        ghosts += np.exp(ghost.log_weight + (c.stood[s.here] - ghost.stood) - s.log_total)
    mass = probs.sum()
    s.ghost_share = limits.escape + (1.0 - limits.escape) * ghosts / (ghosts + mass)
    if mass > 0.0:
        probs *= (1.0 - s.ghost_share) / mass
