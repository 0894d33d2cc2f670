"""The cover tree: one expert's next-byte law, marginal over every way its tokens can continue the text.

A cover of a text is a token sequence whose bytes start with the text and whose last token is the first to reach its
end. The tree holds covers grouped by where their last token began:

* a **leaf** is an evaluated beginning: token path, its row of probabilities, and the range of pieces that still
  agree with the bytes seen since;
* a **ghost** is a beginning whose weight did not justify a decode; a stand-in law speaks for it until it does.

All weights are natural logarithms of joint probabilities, so that nothing has to be rescaled and a ghost's stand-in
factors can be exchanged for true ones when it is evaluated late. Given right leaf weights the law is within the ghost
share of the exact marginal in total variation; with ``epsilon = 0`` there are no ghosts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import exp, inf, log
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64, I32
from gguf_fusion.bridge.tables import ByteTables
from gguf_fusion.cover.base import PredictorStats, Prompt
from gguf_fusion.cover.canonical import border_holds, word_start
from gguf_fusion.cover.ghosts import Surprise, WordStarts, piece_starts
from gguf_fusion.cover.hypotheses import Boundary, Leaf, Row, log_sum, merged
from gguf_fusion.cover.prefill import prefill
from gguf_fusion.errors import ExpertFailedError
from gguf_fusion.experts.base import Expert, Progress
from gguf_fusion.kernels.masses import child_masses, exact_end, narrow, range_sum
from gguf_fusion.kernels.softmax import BLOCK, row_masses
from gguf_fusion.records import END, N_SYMBOLS

DEFAULT_EPSILON = 0.15
"""Measured on SmolLM2 alone: about +1.4 % bits per byte against its own tokens at 1.26 decodes per token."""

EXACT_EPSILON = 0.01

_NEGLIGIBLE = 1e-6
"""Shares below this are dropped."""

_SUSPECT_BYTES = 3
"""A boundary that the canonical tokenization denies is given up when it is older: by then the text settles it."""

_LATE_BITS = 1.0
"""Assumed loss of a stand-in for a boundary that lies some bytes back."""

_ESCAPE = 1e-7
"""Share always left to the stand-in: no symbol has probability 0, whatever the expert's tokens say."""

_TINY = 1e-30
"""Smallest stand-in probability reckoned with, so that logarithms stay finite."""

_OBSERVED_BYTES = 256
"""Prompt bytes whose probability ``start`` reports."""


class CoverTree:
    """Predictor over 257 symbols: 256 byte values and END. See ``cover.base.Predictor`` for the order of calls."""

    n_symbols = N_SYMBOLS

    def __init__(
        self,
        expert: Expert,
        tables: ByteTables,
        *,
        epsilon: float = DEFAULT_EPSILON,
        merge: bool = True,
        escape: float = _ESCAPE,
    ) -> None:
        """``epsilon``: bits per byte that unevaluated boundaries may be expected to cost; 0 evaluates all.

        ``merge`` joins covers that end at the same place (their rows may differ a little); ``escape`` is the share
        always left to the stand-in law, 0 only for exact comparisons.
        """
        if not 0.0 <= epsilon < 1.0:
            raise ValueError(f"epsilon: expected a number in [0, 1), got {epsilon}")
        self.expert = expert
        self.tables = tables
        self.epsilon = epsilon
        self.stats = PredictorStats()
        self._merge = merge
        self._escape = escape
        self._log_keep = log(_NEGLIGIBLE) if epsilon else -inf
        self._word_starts = WordStarts(piece_starts(tables.first_start))
        self._surprise = Surprise()
        self._probs = np.zeros(N_SYMBOLS)
        self._begin(np.zeros(0, np.int32))

    def _begin(self, base: I32) -> None:
        self._text = bytearray()
        self._stood = [0.0]
        """Cumulative stand-in log-probability at each position of the text."""
        self._leaves: list[Leaf] = []
        self._ghosts: list[Boundary] = []
        self._pending = [Boundary(base, 0.0, 0)]
        self._anchor = self._pending[0]
        self._log_total = 0.0
        self._ghost_share = 0.0
        self._reanchored_at = -1
        self._ready = False

    # ---- the Predictor protocol -------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """True when ``prepare`` will decode."""
        return bool(self._pending)

    @property
    def n_tokens(self) -> int:
        """Tokens of the longest live path."""
        paths = [leaf.path for leaf in self._leaves] + [b.path for b in (*self._ghosts, *self._pending)]
        return max(map(len, paths), default=0)

    def start(self, prompt: Prompt, progress: Progress | None = None) -> F64:
        """Begin a new text. Probabilities of prompt tokens are spread evenly over their bytes."""
        observed = prefill(self.expert, prompt, _OBSERVED_BYTES, progress)
        self._begin(prompt.ids)
        tail = np.zeros(len(prompt.tail))
        for i, byte in enumerate(prompt.tail):
            probs, ghost_share = self.law()
            stand_in = float(self.stand_in()[byte])
            tail[i] = log(probs[byte] + ghost_share * stand_in)
            self.push(byte, stand_in)
        return np.concatenate([observed, tail])[-_OBSERVED_BYTES:]

    def prepare(self) -> None:
        """Evaluate the boundaries whose share exceeds epsilon, and those that their replay opens."""
        while self._pending:
            pending, self._pending = self._pending, []
            for boundary in sorted(pending, key=self._weight):  # the heaviest last: its path stays resident
                self._open(boundary)
            self._plan()
        if not self._ready:
            self._sum_law()

    def law(self) -> tuple[F64, float]:
        """(probs float64[257], ghost_share); probs sum to 1 - ghost_share. Valid until ``push``."""
        self.prepare()
        return self._probs, self._ghost_share

    def stand_in(self) -> F64:
        """float64[257], sum 1: half what usually follows a fresh boundary, half what the evaluated covers say.

        The first is right where a word ends, the second where a word goes on in another segmentation; flattened,
        since another segmentation is the likelier the less the evaluated ones foresee.
        """
        expected = self._word_starts.expect(self._last_byte(len(self._text)))
        others = np.sqrt(self._probs)
        mass = float(others.sum())
        return 0.5 * expected + others * (0.5 / mass) if mass > 0.0 else expected

    def push(self, symbol: int, stand_in_prob: float = 1.0) -> None:
        """Advance by one observed symbol; after END only ``start`` and ``restore`` make sense."""
        self.prepare()
        self.stats.n_pushed += 1
        self.stats.ghost_share_sum += self._ghost_share
        if symbol == END:
            return
        started = time.perf_counter()
        lost = self._probs[symbol] + (self._ghost_share - self._escape) * stand_in_prob <= self._escape
        self._leaves = [kept for leaf in self._leaves if (kept := self._narrowed(leaf, symbol)) is not None]
        self._text.append(symbol)
        self._stood.append(self._stood[-1] + log(max(stand_in_prob, _TINY)))
        if lost:
            self._reanchor()
        else:
            self._plan()
        self.stats.bridge_s += time.perf_counter() - started

    def amend(self, stand_in_probs: Sequence[float]) -> None:
        """See ``cover.base.Predictor.amend``."""
        first = len(self._stood) - len(stand_in_probs)
        for i, prob in enumerate(stand_in_probs, first):
            self._stood[i] = self._stood[i - 1] + log(max(prob, _TINY))

    def snapshot(self) -> Any:
        """Hypotheses are immutable, so a snapshot copies a few short lists and the word-start law."""
        hypotheses = (list(self._leaves), list(self._ghosts), list(self._pending), self._anchor)
        numbers = (bytes(self._text), list(self._stood), self._log_total)
        return hypotheses, numbers, (self._word_starts.copy(), self._surprise.copy())

    def restore(self, snapshot: Any) -> None:
        """Return to the text of ``snapshot``."""
        (leaves, ghosts, pending, self._anchor), (text, stood, self._log_total), (word_starts, surprise) = snapshot
        self._leaves, self._ghosts, self._pending = list(leaves), list(ghosts), list(pending)
        self._text, self._stood = bytearray(text), list(stood)
        self._word_starts, self._surprise = word_starts.copy(), surprise.copy()
        self._ready = False

    # ---- hypotheses -------------------------------------------------------------------------------------------

    def _last_byte(self, position: int) -> int:
        return self._text[position - 1] if position else END

    def _weight(self, boundary: Boundary) -> float:
        """Joint log-probability of a boundary, stand-in factors since its position included."""
        return boundary.log_weight + (self._stood[-1] - self._stood[boundary.position])

    def _narrowed(self, leaf: Leaf, byte: int) -> Leaf | None:
        """The leaf after one more byte, or None if no piece with mass agrees."""
        tables = self.tables
        if leaf.depth == 0:
            lo, hi = int(tables.first_start[byte]), int(tables.first_start[byte + 1])
        else:
            lo, hi = narrow(leaf.lo, leaf.hi, leaf.depth, byte, tables.piece_bytes, tables.piece_start)
        mass = range_sum(leaf.row.probs, leaf.row.sums, lo, hi) * leaf.row.scale if lo < hi else 0.0
        if mass <= 0.0:
            return None
        return Leaf(leaf.path, leaf.log_weight, leaf.row, lo, hi, leaf.depth + 1, mass)

    def _closed(self, leaf: Leaf, position: int) -> tuple[Leaf | None, Boundary | None]:
        """Split a leaf at ``position`` into its longer pieces and the boundary behind the piece that ends there."""
        if leaf.depth == 0:
            return leaf, None
        lo, mass = exact_end(leaf.row.probs, leaf.lo, leaf.hi, leaf.depth, self.tables.piece_start)
        if lo == leaf.lo:
            return leaf, None
        mass *= leaf.row.scale
        boundary = None
        if mass > 0.0:
            path = np.append(leaf.path, self.tables.representative[leaf.lo])
            boundary = Boundary(path, leaf.log_weight + log(mass), position)
        rest = range_sum(leaf.row.probs, leaf.row.sums, lo, leaf.hi) * leaf.row.scale if lo < leaf.hi else 0.0
        return (replace(leaf, lo=lo, mass=rest) if rest > 0.0 else None), boundary

    def _plan(self) -> None:
        """Close what ends here, merge, drop what is negligible, and decide what to evaluate."""
        self._ready = False
        here = len(self._text)
        leaves: list[Leaf] = []
        boundaries = self._ghosts
        for leaf in self._leaves:
            kept, boundary = self._closed(leaf, here)
            if kept is not None:
                leaves.append(kept)
            if boundary is not None:
                boundaries = [*boundaries, boundary]
        if self._merge:
            leaves, boundaries = merged(leaves, boundaries, here)

        weights = [self._weight(b) for b in boundaries]
        shares = [leaf.log_weight + log(leaf.mass) for leaf in leaves]
        total = log_sum(shares + weights)
        if total == -inf:
            self._reanchor()
            return
        self._log_total = total
        keep = total + self._log_keep
        self._leaves = [leaf for leaf, share in zip(leaves, shares, strict=True) if share >= keep]
        log_shares = [weight - total for weight in weights]
        self._pending, denied = self._worth_evaluating(boundaries, log_shares)
        no_ghosts = {id(boundary) for boundary in (*self._pending, *denied)}
        self._ghosts = [
            boundary
            for boundary, log_share in zip(boundaries, log_shares, strict=True)
            if log_share >= self._log_keep and id(boundary) not in no_ghosts
        ]
        if self._leaves:
            heaviest = max(self._leaves, key=lambda leaf: leaf.log_weight + log(leaf.mass))
            self._anchor = Boundary(heaviest.path, heaviest.log_weight, here - heaviest.depth)

    def _worth_evaluating(
        self, boundaries: list[Boundary], log_shares: list[float]
    ) -> tuple[list[Boundary], list[Boundary]]:
        """(the costliest boundaries, until what is left is expected to cost at most epsilon bits; what to give up).

        A boundary's cost is its share times what a stand-in usually loses at such a place. A boundary that the
        canonical tokenization denies waits; denied for some bytes it is given up. In an ensemble the stand-in is often
        a better law than the expert's own: spurious boundaries would grow and multiply without end.
        """
        here = len(self._text)
        costs = []
        for boundary, log_share in zip(boundaries, log_shares, strict=True):
            expected = (
                self._surprise.expect(self._last_byte(here), log_share) if boundary.position == here else _LATE_BITS
            )
            costs.append(exp(log_share) * expected)
        left = sum(costs)
        chosen: list[Boundary] = []
        denied: list[Boundary] = []
        for i in sorted(range(len(boundaries)), key=lambda i: -costs[i]):
            if left <= self.epsilon and (chosen or self._leaves):
                break
            boundary = boundaries[i]
            age = here - boundary.position
            if not age or not self.epsilon or border_holds(self.expert, bytes(self._text), boundary.position):
                chosen.append(boundary)
            elif age > _SUSPECT_BYTES:
                denied.append(boundary)
            left -= costs[i]
        if not chosen and not self._leaves:
            chosen.append(max(boundaries, key=self._weight))
        return chosen, denied

    def _open(self, boundary: Boundary) -> None:
        """Evaluate a boundary and replay the bytes since it; what ends on the way becomes a ghost."""
        row = self._evaluate(boundary.path)
        fresh = Leaf(boundary.path, boundary.log_weight, row, 0, self.tables.n_text, 0, 1.0)
        self._learn(fresh, boundary.position)
        leaf: Leaf | None = fresh
        here = len(self._text)
        for position in range(boundary.position, here):
            leaf = self._narrowed(leaf, self._text[position]) if leaf is not None else None
            if leaf is not None and position + 1 < here:
                leaf, nested = self._closed(leaf, position + 1)
                if nested is not None:
                    self._ghosts.append(nested)
        if leaf is not None:
            self._leaves.append(leaf)

    def _evaluate(self, path: I32) -> Row:
        tables = self.tables
        if not len(path):
            return self._first_row()
        logits = self.expert.evaluate(path)[0]
        started = time.perf_counter()
        probs = np.empty(tables.n_text, np.float32)
        sums = np.empty(-(-tables.n_text // BLOCK))
        try:
            text, end = row_masses(logits, tables.order, tables.end_ids, probs, sums)
        except ValueError as error:
            raise ExpertFailedError(self.expert.name, f"{error} (at byte {len(self._text)} of the text)") from error
        self.stats.n_decodes += 1
        self.stats.bridge_s += time.perf_counter() - started
        return Row(probs, sums, 1.0 / (text + end), end)

    def _first_row(self) -> Row:
        """The law of a first token without anything before it: Zipf over ids, which vocabularies order by frequency."""
        probs = (1.0 / (self.tables.order + 100.0)).astype(np.float32)
        sums = np.add.reduceat(probs, np.arange(0, len(probs), BLOCK), dtype=np.float64)
        return Row(probs, sums, 1.0 / float(probs.sum(dtype=np.float64)), 0.0)

    def _learn(self, leaf: Leaf, position: int) -> None:
        """Remember what followed this boundary, and how well that was expected."""
        law = np.zeros(N_SYMBOLS)
        self._add_masses(leaf, 1.0, law)
        last = self._last_byte(position)
        self._surprise.learn(last, leaf.log_weight - self._log_total, law, self._word_starts.expect(last))
        self._word_starts.learn(last, law)

    def _add_masses(self, leaf: Leaf, weight: float, law: F64) -> None:
        """Add a leaf's next-symbol masses, times ``weight``, to ``law``."""
        t, row, scale = self.tables, leaf.row, weight * leaf.row.scale
        child_masses(
            row.probs, row.sums, leaf.lo, leaf.hi, leaf.depth,
            t.piece_bytes, t.piece_start, t.first_start, t.pair_start, scale, law,
        )  # fmt: skip
        if leaf.depth == 0:
            law[END] += scale * row.end

    def _sum_law(self) -> None:
        """Sum the leaves' next-symbol masses; what the ghosts hold is left to the stand-in."""
        started = time.perf_counter()
        self._probs[:] = 0.0
        for leaf in self._leaves:
            self._add_masses(leaf, exp(leaf.log_weight - self._log_total), self._probs)
        mass = float(self._probs.sum())
        ghosts = sum(exp(self._weight(g) - self._log_total) for g in self._ghosts)
        self._ghost_share = self._escape + (1.0 - self._escape) * ghosts / (ghosts + mass)
        self._probs *= (1.0 - self._ghost_share) / mass if mass > 0.0 else 0.0
        self._ready = True
        self.stats.bridge_s += time.perf_counter() - started

    def _reanchor(self) -> None:
        """The text went where no hypothesis put mass: start again from the canonical tokens of the recent text.

        The last canonical token stays open; if even that has no mass, a border is assumed right here.
        """
        text, here = bytes(self._text), len(self._text)
        path, end = self._anchor.path, self._anchor.position
        starts = self.expert.vocabulary.piece_start
        while end > word_start(text, here):
            end -= int(starts[path[-1] + 1] - starts[path[-1]])
            path = path[:-1]
        ids = self.expert.tokenize(text[end:])
        if self._reanchored_at != here:
            self.stats.n_reanchors += 1
            here -= int(starts[ids[-1] + 1] - starts[ids[-1]])
            ids = ids[:-1]
        self._reanchored_at = len(text)
        self._leaves, self._ghosts = [], []
        self._pending = [Boundary(np.concatenate([path, ids]), 0.0, here)]
