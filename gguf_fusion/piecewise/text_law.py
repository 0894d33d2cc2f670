"""The probability of a text under a bridge that writes piece by piece, summed over all ways to write it.

Such a bridge fuses, chooses a piece, appends its bytes, and every expert reads the text anew with its own tokenizer.
The next law then depends on the bytes alone, and the probability that an output begins with a text is a sum over paths:

    A(0) = 1,    A(q) = sum over p < q with text[p:q] a piece of A(p) f(text[p:q] | text[:p])

plus, at the end, the pieces that go beyond it. This is the same question that the byte bridge answers, so the figures
can be compared; a single path, such as the pivot's own tokens, gives less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gguf_fusion.arrays import F32, F64, I32, I64
from gguf_fusion.errors import UsageError
from gguf_fusion.piecewise.bridges import PieceBridge, PiecePool, Union, weighed
from gguf_fusion.piecewise.space import Speller, token_masses

ESCAPE = 0.01
"""Share of the union law in the law of a bridge that is not complete: without it most texts have probability 0."""

NEGLIGIBLE = 1e-4
"""Positions with a smaller share of all paths, whatever the bridge, are passed over; costs at most so much per byte."""


class Reading(Speller, Protocol):
    """An expert that can be asked for rows; see ``experts.base.Expert``."""

    def evaluate(self, path: I32, n_rows: int = 1, *, branch: bool = False) -> F32: ...


@dataclass(frozen=True, slots=True)
class Way:
    """A bridge, a pool and weights, float64[n_experts], > 0 for those that take part, sum 1.

    eta, gamma : with ``eta`` the weights follow evidence, as those of the byte bridge do: w_i ∝ weights_i exp(eta c_i),
        c_i ← gamma c_i + ln of what expert i, alone through this bridge, gave to the byte that came
    """

    bridge: PieceBridge
    weights: F64
    pool: PiecePool = weighed
    eta: float = 0.0
    gamma: float = 1.0

    @property
    def complete(self) -> bool:
        """Whether every text has a probability above 0."""
        return self.bridge.complete and self.pool is weighed

    def mixed(self, credit: F64) -> F64:
        """float64[n_experts]: the weights after evidence float64[n_experts]."""
        raised = self.weights * np.exp(self.eta * (credit - credit.max()))
        weights: F64 = raised / raised.sum()
        return weights


@dataclass(frozen=True, slots=True)
class Found:
    """What one way says about a text.

    bits  : -log2 of the probability that an output begins with it
    path  : int64[n], borders of the most probable single path, the first byte asked for included
    path_bits : -log2 of the probability of that path
    n_escaped : steps of it to which the bridge itself gives nothing, however little it costs with the escape
    """

    bits: float
    path: I64
    path_bits: float
    n_escaped: int


def context_of(expert: Speller, text: bytes) -> I32:
    """int32[n]: the ids an expert reads a text with, BOS included where it wants one."""
    ids = expert.tokenize(text)
    bos = expert.vocabulary.bos_id
    return ids if bos is None else np.concatenate([[bos], ids]).astype(np.int32)


def laws_at(experts: Sequence[Reading], text: bytes) -> list[F64]:
    """Per expert float64[n_vocab]: masses of its next token after a text that it reads anew."""
    return [token_masses(expert, expert.evaluate(context_of(expert, text))[0]) for expert in experts]


def text_laws(
    experts: Sequence[Reading],
    ways: Sequence[Way],
    text: bytes,
    first: int,
    tell: Callable[[int], None] = lambda _: None,
) -> list[Found]:
    """What every way says about ``text[first:]`` after ``text[:first]``; all of them share the experts' rows.

    ``tell`` hears of every byte passed. A way with evidence needs the ways of every single expert through its bridge
    among ``ways``. Raises UsageError unless these are there, 0 < first < len(text), and all ways share one space.
    """
    n = len(text) - first
    space = ways[0].bridge.space if ways else None
    if space is None or not 0 < first < len(text) or any(way.bridge.space is not space for way in ways):
        raise UsageError("expected ways over one list of pieces, and a text with bytes before and after the first one")
    alone = [_alone(way, ways) if way.eta else [] for way in ways]
    credit_of = np.zeros((len(ways), len(experts)))
    union, bridges = Union(space), list(dict.fromkeys(way.bridge for way in ways))
    log_at, log_cover = np.full((len(ways), n + 1), -np.inf), np.full((len(ways), n + 1), -np.inf)
    log_at[:, 0] = log_cover[:, 0] = 0.0
    paths = [_Paths(n) for _ in ways]
    for at in range(n):
        tell(at)
        if at:
            came = log_cover[:, at] - log_cover[:, at - 1]  # of every way, ln of what it gave to the byte before
            for w, way in enumerate(ways):
                if way.eta:
                    credit_of[w] = way.gamma * credit_of[w] + came[alone[w]]
        with np.errstate(invalid="ignore"):
            share = np.nan_to_num(log_at[:, at] - log_cover[:, at], nan=-np.inf)
        if float(share.max()) < np.log(NEGLIGIBLE):
            continue
        entries = space.agreeing(text[first + at :])
        masses = laws_at(experts, text[: first + at])
        whole = union.mapped(masses)
        mapped = {bridge: bridge.mapped(masses) for bridge in bridges}
        for w, way in enumerate(ways):
            weights = way.mixed(credit_of[w]) if way.eta else way.weights
            law = way.bridge.fused(mapped[way.bridge], weights, way.pool)[entries]
            escaped = law == 0.0
            if not way.complete:
                law = (1.0 - ESCAPE) * law + ESCAPE * weighed([one[entries] for one in whole], weights)
            with np.errstate(divide="ignore"):
                logs = np.log(law)
            for entry, log_law, gap in zip(entries, logs.tolist(), escaped.tolist(), strict=True):
                end = at + len(space.pieces[entry])
                log_path = log_at[w, at] + log_law
                cover = log_cover[w, at + 1 : min(end, n) + 1]
                np.logaddexp(cover, log_path, out=cover)
                if end <= n:
                    log_at[w, end] = np.logaddexp(log_at[w, end], log_path)
                paths[w].offer(at, min(end, n), log_law, gap)
    return [Found(float(-log_cover[w, n] / np.log(2.0)), *path.best(first)) for w, path in enumerate(paths)]


def _alone(way: Way, ways: Sequence[Way]) -> list[int]:
    """Per expert the index of the way in which it alone goes through the bridge of ``way``."""
    places = {
        (other.bridge, int(other.weights.argmax())): k
        for k, other in enumerate(ways)
        if not other.eta and other.weights.max() == 1.0
    }
    try:
        return [places[way.bridge, i] for i in range(len(way.weights))]
    except KeyError:
        raise UsageError("expected, for weights by evidence, the ways of each single expert too") from None


class _Paths:
    """The most probable single path to every position."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._log: F64 = np.full(n + 1, -np.inf)
        self._log[0] = 0.0
        self._from: I64 = np.zeros(n + 1, np.int64)
        self._gap = np.zeros(n + 1, np.bool_)

    def offer(self, at: int, end: int, log_law: float, gap: bool) -> None:
        if self._log[at] + log_law > self._log[end]:
            self._log[end], self._from[end], self._gap[end] = self._log[at] + log_law, at, gap

    def best(self, first: int) -> tuple[I64, float, int]:
        borders, gaps = [self._n], 0
        while borders[-1]:
            gaps += int(self._gap[borders[-1]])
            borders.append(int(self._from[borders[-1]]))
        return np.array(borders[::-1]) + first, float(-self._log[self._n] / np.log(2.0)), gaps
