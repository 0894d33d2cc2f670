"""Hypotheses of a cover tree: evaluated leaves, unevaluated boundaries, and how those of one place are joined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, inf, log

from gguf_fusion.arrays import F32, F64, I32


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Unnormalised probabilities after one token path; ``scale`` makes them sum to 1 together with END."""

    probs: F32
    sums: F64
    scale: float
    end: float


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """An evaluated boundary: the pieces in [lo, hi) still agree with the ``depth`` bytes since it.

    ``mass`` is the probability of that range under the row, END included at depth 0.
    """

    path: I32
    log_weight: float
    row: Row
    lo: int
    hi: int
    depth: int
    mass: float


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """A token border at ``position`` that is not evaluated: a ghost, or about to become a leaf."""

    path: I32
    log_weight: float
    position: int


def log_sum(logs: list[float]) -> float:
    """ln of the sum of exponentials; -inf for nothing."""
    top = max(logs, default=-inf)
    return top + log(sum(exp(x - top) for x in logs)) if top > -inf else -inf


def merged(leaves: list[Leaf], boundaries: list[Boundary], here: int) -> tuple[list[Leaf], list[Boundary]]:
    """Join hypotheses that began at the same place: masses add up, an evaluated one or the heaviest speaks for all."""
    if len(boundaries) + len(leaves) < 2 or not boundaries:
        return leaves, boundaries
    groups: dict[int, list[Boundary]] = {}
    for boundary in boundaries:
        groups.setdefault(boundary.position, []).append(boundary)
    joined = []
    for leaf in leaves:
        same = groups.pop(here - leaf.depth, [])
        weights = [leaf.log_weight, *(b.log_weight for b in same)]
        joined.append(replace(leaf, log_weight=log_sum(weights)) if same else leaf)
    rest = []
    for same in groups.values():
        heaviest = max(same, key=lambda b: b.log_weight)
        rest.append(replace(heaviest, log_weight=log_sum([b.log_weight for b in same])) if len(same) > 1 else heaviest)
    return joined, rest
