"""Four rules that turn the token laws of several experts into one law over the next piece.

* ``Union``      every piece of every vocabulary; an expert gives nothing to a piece it lacks (GaC, arXiv 2406.12585)
* ``FirstPiece`` the vocabulary of one expert, the pivot; a token it lacks counts for the first piece it is spelled with
* ``TopUnion``   the k best tokens of each; an expert speaks for a piece it lacks by the first token it would spell it
                 with (UniTE, arXiv 2410.03777)
* ``Matched``    the pivot's vocabulary; the k best tokens of each other expert, spread evenly over all pieces that the
                 pivot spells them with, small sums cut off (the matcher of the project llm-fusion, average strategy)

The original programs weigh experts linearly; the geometric mean is there to compare pools, and gives nothing to a piece
that one expert gives nothing to. Where the originals have flaws beyond the rule, the rule counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from gguf_fusion.arrays import F64, I64
from gguf_fusion.errors import UsageError
from gguf_fusion.piecewise.space import PieceSpace, Speller


def weighed(mapped: Sequence[F64], weights: F64) -> F64:
    """The weighted mean of laws, float64[n]; those of weight 0 are not read."""
    law = np.zeros(len(mapped[0]))
    for one, weight in zip(mapped, weights.tolist(), strict=True):
        if weight:
            law += weight * one
    return law


def geometric(mapped: Sequence[F64], weights: F64) -> F64:
    """The weighted geometric mean of laws, scaled to sum 1, float64[n]; 0 where no piece has mass from everybody."""
    present = [(one, weight) for one, weight in zip(mapped, weights.tolist(), strict=True) if weight]
    support = np.flatnonzero(np.logical_and.reduce([one > 0.0 for one, _ in present]))
    law = np.zeros(len(mapped[0]))
    if len(support):
        logs = np.sum([weight * np.log(one[support]) for one, weight in present], axis=0)
        mass = np.exp(logs - logs.max())
        law[support] = mass / mass.sum()
    return law


PiecePool = Callable[[Sequence[F64], F64], F64]


class PieceBridge(Protocol):
    """One rule, for the experts of a space."""

    name: str
    space: PieceSpace
    complete: bool
    """Whether every text has a probability above 0; the others need ``text_law.ESCAPE``."""

    def mapped(self, masses: Sequence[F64]) -> list[F64]:
        """Per expert float64[space.n], its law over pieces; ``masses``: per expert float64[n_vocab], sum 1."""
        ...

    def fused(self, mapped: Sequence[F64], weights: F64, pool: PiecePool = weighed) -> F64:
        """float64[space.n], sum 1 (0 where nothing is left); ``weights``: float64[n_experts], sum 1."""
        ...


class Union:
    """Every piece of every vocabulary."""

    name = "GaC"
    complete = True

    def __init__(self, space: PieceSpace) -> None:
        self.space = space

    def mapped(self, masses: Sequence[F64]) -> list[F64]:
        return [self.space.collected(i, own) for i, own in enumerate(masses)]

    def fused(self, mapped: Sequence[F64], weights: F64, pool: PiecePool = weighed) -> F64:
        return pool(mapped, weights)


class FirstPiece:
    """The pivot's vocabulary, by first pieces."""

    name = "token bridge"
    complete = True

    def __init__(self, space: PieceSpace, pivot: int) -> None:
        self.space, self._pivot = space, pivot

    @cached_property
    def _maps(self) -> list[I64]:
        """Per expert int64[n_vocab]: the pivot's entry for each id."""
        spelled = Spelled(self.space, self._pivot)
        found = [entries.copy() for entries in self.space.of]
        for i, entries in enumerate(found):
            if i == self._pivot:
                continue
            for token in self.space.experts[i].vocabulary.text_ids:
                pieces = spelled(int(entries[token]))
                entries[token] = pieces[0] if len(pieces) else self.space.dropped
        return found

    def mapped(self, masses: Sequence[F64]) -> list[F64]:
        return [self.space.collected(i, own, self._maps[i]) for i, own in enumerate(masses)]

    def fused(self, mapped: Sequence[F64], weights: F64, pool: PiecePool = weighed) -> F64:
        return pool(mapped, weights)


class TopUnion:
    """The k best tokens of each expert."""

    name = "UniTE"
    complete = False

    def __init__(self, space: PieceSpace, k: int = 10) -> None:
        self.space, self._k = space, _positive(k)
        self._spelled = [Spelled(space, i) for i in range(len(space.experts))]

    def mapped(self, masses: Sequence[F64]) -> list[F64]:
        own = [self.space.collected(i, mass) for i, mass in enumerate(masses)]
        words = np.unique(np.concatenate([best(law, self._k) for law in own]))
        laws = []
        for spelled, law in zip(self._spelled, own, strict=True):
            found = np.zeros(self.space.n)
            has = spelled.has[words]
            found[words[has]] = law[words[has]]
            spent = set(words[has].tolist())
            for word in words[~has].tolist():
                # One token speaks for one piece only: its mass must not count twice.
                first = spelled(word)[0] if word != self.space.end else word
                if first not in spent:
                    spent.add(first)
                    found[word] = law[first]
            laws.append(found / max(float(found.sum()), np.finfo(np.float64).tiny))
        return laws

    def fused(self, mapped: Sequence[F64], weights: F64, pool: PiecePool = weighed) -> F64:
        return pool(mapped, weights)


class Matched:
    """The pivot's vocabulary, by matched tokens."""

    name = "llm-fusion"
    complete = False

    def __init__(self, space: PieceSpace, pivot: int, k: int = 30, threshold: float = 0.01) -> None:
        self.space, self._pivot = space, pivot
        self._k, self._threshold = _positive(k), threshold
        self._spelled = Spelled(space, pivot)

    def mapped(self, masses: Sequence[F64]) -> list[F64]:
        laws = []
        for i, mass in enumerate(masses):
            own = self.space.collected(i, mass)
            top = best(own, self._k)
            shares = own[top] / float(own[top].sum())
            law = np.zeros(self.space.n)
            if i == self._pivot:
                law[top] = shares
            else:
                for entry, share in zip(top.tolist(), shares, strict=True):
                    pieces = self._match(entry)
                    law[pieces] += share / max(1, len(pieces))
            laws.append(law)
        return laws

    def _match(self, entry: int) -> list[int]:
        """The pivot's pieces for an entry: itself, itself without a leading blank, or its spelling; each once."""
        if entry == self.space.end or self._spelled.has[entry]:
            return [entry]
        bare = self.space.entry.get(self.space.pieces[entry].removeprefix(b" "))
        if bare is not None and self._spelled.has[bare]:
            return [bare]
        return list(dict.fromkeys(self._spelled(entry)))

    def fused(self, mapped: Sequence[F64], weights: F64, pool: PiecePool = weighed) -> F64:
        law = pool(mapped, weights)
        law[law < self._threshold] = 0.0
        left = float(law.sum())
        return law / left if left else law


class Spelled:
    """How one expert spells the pieces of all. ``has``: bool[space.n], the entries that it has itself."""

    def __init__(self, space: PieceSpace, expert: int) -> None:
        self._space, self._expert, self._of = space, space.experts[expert], space.of[expert]
        self._memo: dict[int, tuple[int, ...]] = {}
        self.has = np.zeros(space.n + 1, np.bool_)
        self.has[self._of] = True
        self.has = self.has[: space.n]

    def __call__(self, entry: int) -> tuple[int, ...]:
        """Entries of the tokens that an entry (not END) is spelled with: one where the expert has the piece."""
        if self.has[entry]:
            return (entry,)
        if entry not in self._memo:
            ids = self._expert.tokenize(self._space.pieces[entry])
            self._memo[entry] = tuple(self._of[ids].tolist())
        return self._memo[entry]


def best(law: F64, k: int) -> I64:
    """int64[k]: the entries with most mass, in no order."""
    k = min(k, len(law))
    return np.argpartition(law, len(law) - k)[len(law) - k :]


def other_bridges(experts: Sequence[Speller], pivot: int) -> list[PieceBridge]:
    """All four, on one space."""
    space = PieceSpace(experts)
    return [FirstPiece(space, pivot), TopUnion(space), Union(space), Matched(space, pivot)]


def _positive(k: int) -> int:
    if k < 1:
        raise UsageError(f"k: expected at least one token per expert, got {k}")
    return k
