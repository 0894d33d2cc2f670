"""Which level for which expert: fused bits per byte of every combination within a budget, without new decodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64, I64
from gguf_fusion.errors import UsageError
from gguf_fusion.strategy import Strategy

_MOST = 4096
"""Combinations that are all tried; beyond, one expert after the other is improved."""

_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Laws:
    """One expert at one level on the text: logs float64[n_bytes, n_symbols], size of its file."""

    level: str
    size_bytes: int
    logs: F64


@dataclass(frozen=True, slots=True)
class Combination:
    """One level per expert, in the order of the experts."""

    levels: tuple[str, ...]
    size_bytes: int
    bpb: float


@dataclass(frozen=True, slots=True)
class Single:
    """One model alone, at one level."""

    name: str
    level: str
    size_bytes: int
    bpb: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """The best combination within the budget, and what it is compared with. ``exhaustive``: all were tried.

    even   : the largest levels within an equal share of the budget each; None where an expert has none
    single : the best model alone that fits the budget
    """

    best: Combination
    even: Combination | None
    single: Single | None
    tried: tuple[Combination, ...]
    exhaustive: bool

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def choose(
    experts: Sequence[str], laws: Mapping[str, Sequence[Laws]], came: I64, scored: np.ndarray, strategy: Strategy,
    weights: F64, budget: int, rivals: Mapping[str, Sequence[Laws]] | None = None,
) -> Chosen:  # fmt: skip
    """Search the levels of all experts for the fewest fused bits per byte of a text within ``budget`` bytes of files.

    came, scored : int64[n_bytes], bool[n_bytes];  rivals : further models, compared alone
    Raises UsageError where not even the smallest levels fit.
    """
    n_scored = max(1, int(scored.sum()))
    options = [sorted(laws[name], key=lambda one: (one.size_bytes, one.level)) for name in experts]
    least = sum(choices[0].size_bytes for choices in options)
    if least > budget:
        raise UsageError(
            f"--budget: the smallest levels together take {least / 1e6:.0f} MB, more than {budget / 1e6:.0f} MB"
        )
    known: dict[tuple[int, ...], Combination] = {}

    def score(at: tuple[int, ...]) -> Combination:
        if at not in known:
            picked = [choices[i] for choices, i in zip(options, at, strict=True)]
            bits = _fused_bits(picked, experts, came, scored, strategy, weights)
            size = sum(one.size_bytes for one in picked)
            known[at] = Combination(tuple(one.level for one in picked), size, bits / n_scored)
        return known[at]

    def size_of(at: tuple[int, ...]) -> int:
        return sum(choices[i].size_bytes for choices, i in zip(options, at, strict=True))

    every = [at for at in itertools.product(*(range(len(choices)) for choices in options)) if size_of(at) <= budget]
    exhaustive = len(every) <= _MOST
    if exhaustive:
        best = min((score(at) for at in every), key=lambda c: (c.bpb, c.size_bytes, c.levels))
    else:
        best = _improved(options, budget, score, size_of)
    share = budget / len(experts)
    fitting = [[i for i, one in enumerate(choices) if one.size_bytes <= share] for choices in options]
    even = score(tuple(fit[-1] for fit in fitting)) if all(fitting) else None
    singles = [
        Single(name, one.level, one.size_bytes, _bits(one.logs, came, scored) / n_scored)
        for name, several in {**laws, **(rivals or {})}.items()
        for one in several
        if one.size_bytes <= budget
    ]
    single = min(singles, key=lambda one: (one.bpb, one.size_bytes), default=None)
    return Chosen(best, even, single, tuple(sorted(known.values(), key=lambda c: (c.bpb, c.size_bytes))), exhaustive)


def _improved(
    options: Sequence[Sequence[Laws]], budget: int, score: Callable[[tuple[int, ...]], Combination],
    size_of: Callable[[tuple[int, ...]], int],
) -> Combination:  # fmt: skip
    """From the smallest levels, change one or two experts at a time as long as the bits fall."""
    at = (0,) * len(options)
    best = score(at)
    improved = True
    while improved:
        improved = False
        for a, b in itertools.combinations_with_replacement(range(len(options)), 2):
            for i, j in itertools.product(range(len(options[a])), range(len(options[b]))):
                trial = list(at)
                trial[a], trial[b] = i, j
                if size_of(tuple(trial)) <= budget and (found := score(tuple(trial))).bpb < best.bpb:
                    at, best, improved = tuple(trial), found, True
    return best


def _fused_bits(
    picked: Sequence[Laws], names: Sequence[str], came: I64, scored: np.ndarray, strategy: Strategy, weights: F64
) -> float:
    fuser = strategy.bind(len(picked), picked[0].logs.shape[1], weights, names)
    bits = 0.0
    for first in range(0, len(came), _BLOCK):
        at = slice(first, first + _BLOCK)
        logs = np.stack([one.logs[at] for one in picked])
        law, _, _ = fuser.fuse_block(logs, came[at])
        bits += _bits(law, came[at], scored[at])
    return bits


def _bits(logs: F64, came: I64, scored: np.ndarray) -> float:
    """Bits of the scored bytes under laws float64[n_bytes, n_symbols]."""
    given = logs[np.arange(len(came)), came]
    return -float(given[scored].sum()) / float(np.log(2.0))
