"""The cover tree: one expert's next-byte law, marginal over every way its tokens can continue the text.

A cover of a text is a token sequence whose bytes start with the text and whose last token is the first to reach its
end. The tree holds covers grouped by where their last token began:

* a **leaf** is an evaluated beginning: token path, its row of probabilities, and the range of pieces that still
  agree with the bytes seen since;
* a **ghost** is a beginning whose weight did not justify a decode; a stand-in law speaks for it until it does.

All weights are natural logarithms of joint probabilities, so that nothing has to be rescaled and a ghost's stand-in
factors can be exchanged for true ones when it is evaluated late. Given right leaf weights the law is within the ghost
share of the exact marginal in total variation; with ``epsilon = 0`` there are no ghosts.

What a byte does to the hypotheses is one call of ``kernels.hypotheses``; what is decoded is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf, log
from typing import Any
from weakref import WeakSet

import numpy as np

from gguf_fusion.arrays import F64, I32
from gguf_fusion.bridge.tables import ByteTables
from gguf_fusion.cover.base import PredictorStats, Prompt
from gguf_fusion.cover.canonical import border_holds, word_start
from gguf_fusion.cover.ghosts import nothing_learned
from gguf_fusion.cover.hypotheses import (
    Boundary,
    Hold,
    append_path,
    copied,
    empty,
    larger,
    more_rows,
    no_rows,
    pieces_of,
)
from gguf_fusion.cover.prefill import prefill
from gguf_fusion.errors import ExpertFailedError
from gguf_fusion.experts.base import Expert, Progress
from gguf_fusion.kernels.covers import LOST, NO_MASS, NO_ROOM, READY, Limits
from gguf_fusion.kernels.hypotheses import advance, plan, sum_law
from gguf_fusion.kernels.leaves import add_row, remove, replay, token_path
from gguf_fusion.kernels.softmax import BLOCK, row_masses
from gguf_fusion.kernels.standins import Learned, learn, stand_in_alone
from gguf_fusion.records import END, N_SYMBOLS

DEFAULT_EPSILON = 0.15
"""Measured on SmolLM2 alone: about +1.4 % bits per byte against its own tokens at 1.26 decodes per token."""

EXACT_EPSILON = 0.01

_NEGLIGIBLE = 1e-6
"""Shares below this are dropped."""

_SUSPECT_BYTES = 3
"""A boundary that the canonical tokenization denies is given up when it is older: by then the text settles it."""

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
        self._limits = Limits(epsilon, log(_NEGLIGIBLE) if epsilon else -inf, escape, merge)
        self._pieces = pieces_of(tables)
        self._rows = no_rows(tables.n_text)
        self._holds: WeakSet[Hold] = WeakSet()
        self._learned = nothing_learned(tables.first_start)
        self._probs = np.zeros(N_SYMBOLS)
        self._begin(np.zeros(0, np.int32))

    def _begin(self, base: I32) -> None:
        self._base = base
        """The prompt's ids: the path of node 0."""
        self._covers = empty(len(base))
        self._pending = [Boundary(0, 0, 0.0)]
        self._reanchored_at = -1
        self._ready = False
        """Whether ``_probs`` is the law of the next symbol."""

    # ---- the Predictor protocol -------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """True when ``prepare`` will decode."""
        return bool(self._pending)

    @property
    def n_tokens(self) -> int:
        """Tokens of the longest live path."""
        return int(self._covers.state["longest"][0])

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
            self._settle()
        if not self._ready:
            began = time.perf_counter()
            sum_law(self._covers, self._pieces, self._rows, self._limits, self._probs)
            self._ready = True
            self.stats.bridge_s += time.perf_counter() - began

    def law(self) -> tuple[F64, float]:
        """(probs float64[257], ghost_share); probs sum to 1 - ghost_share. Valid until ``push``."""
        if not self._ready:
            self.prepare()
        return self._probs, float(self._covers.state["ghost_share"][0])

    def stand_in(self) -> F64:
        """float64[257], sum 1: see ``kernels.standins.stand_in_alone``."""
        law = np.empty(N_SYMBOLS)
        stand_in_alone(self._learned, self._last_byte(self._here), self._probs, law)
        return law

    def push(self, symbol: int, stand_in_prob: float = 1.0) -> None:
        """Advance by one observed symbol; after END only ``start`` and ``restore`` make sense."""
        if not self._ready:
            self.prepare()
        self.stats.n_pushed += 1
        self.stats.ghost_share_sum += float(self._covers.state["ghost_share"][0])
        if symbol == END:
            return
        began = time.perf_counter()
        left = NO_ROOM
        while left == NO_ROOM:
            left = advance(
                self._covers, self._pieces, self._rows, self._learned, self._limits, symbol, stand_in_prob, self._probs
            )
            if left == NO_ROOM:
                self._covers = larger(self._covers)
        self._ready = left == READY
        if not self._ready:
            self._decide(left)
        self.stats.bridge_s += time.perf_counter() - began

    def amend(self, stand_in_probs: Sequence[float]) -> None:
        """See ``cover.base.Predictor.amend``."""
        covers, here = self._covers, self._here
        for i, prob in enumerate(stand_in_probs, here + 1 - len(stand_in_probs)):
            covers.stood[i] = covers.stood[i - 1] + log(max(prob, _TINY))
        ghosts = covers.ghosts[: int(covers.state["n_ghosts"][0])]
        ghosts["stood"] = covers.stood[ghosts["position"]]
        self._ready = False

    def snapshot(self) -> Any:
        """A copy of the hypotheses and of what was learned; rows are kept, not copied."""
        hold = Hold(frozenset(self._slots_in_use()))
        if hold.slots:
            self._holds.add(hold)
        learned = Learned._make(array.copy() for array in self._learned)
        return self._base, copied(self._covers), list(self._pending), learned, hold

    def restore(self, snapshot: Any) -> None:
        """Return to the text of ``snapshot``."""
        self._base, covers, pending, learned, _ = snapshot
        self._covers, self._pending = copied(covers), list(pending)
        self._learned = Learned._make(array.copy() for array in learned)
        self._ready = False

    # ---- hypotheses -------------------------------------------------------------------------------------------

    @property
    def _here(self) -> int:
        return int(self._covers.state["here"][0])

    def _last_byte(self, position: int) -> int:
        return int(self._covers.text[position - 1]) if position else END

    def _text(self) -> bytes:
        return self._covers.text[: self._here].tobytes()

    def _weight(self, boundary: Boundary) -> float:
        """Joint log-probability of a boundary, stand-in factors since its position included."""
        stood = self._covers.stood
        return boundary.log_weight + float(stood[self._here] - stood[boundary.position])

    def _settle(self) -> None:
        """Weigh the hypotheses anew after some were evaluated."""
        self._ready = False
        left = NO_ROOM
        while left == NO_ROOM:
            left = plan(self._covers, self._pieces, self._rows, self._learned, self._limits)
            if left == NO_ROOM:
                self._covers = larger(self._covers)
        self._decide(left)

    def _decide(self, left: float) -> None:
        """What follows from the expected cost of the ghosts, or from what stands in its place."""
        if left in (LOST, NO_MASS):
            self._reanchor()
        elif left > self.epsilon or not self.epsilon or not int(self._covers.state["n_leaves"][0]):
            self._choose()

    def _choose(self) -> None:
        """Take up the costliest boundaries, until what is left is expected to cost at most epsilon bits.

        A boundary that the canonical tokenization denies waits; denied for some bytes it is given up. In an ensemble
        the stand-in is often a better law than the expert's own: spurious boundaries would grow and multiply without
        end.
        """
        covers, here = self._covers, self._here
        n, n_leaves = int(covers.state["n_ghosts"][0]), int(covers.state["n_leaves"][0])
        costs = covers.costs[:n]
        left = float(costs.sum())
        text = self._text()
        chosen: list[int] = []
        denied: list[int] = []
        for i in np.argsort(-costs, kind="stable").tolist():
            if self.epsilon and left <= self.epsilon and (chosen or n_leaves):
                break
            position = int(covers.ghosts["position"][i])
            if position == here or not self.epsilon or border_holds(self.expert, text, position):
                chosen.append(i)
            elif here - position > _SUSPECT_BYTES:
                denied.append(i)
            left -= float(costs[i])
        if not chosen and not n_leaves:
            chosen.append(max(range(n), key=lambda i: self._weight(Boundary(*covers.ghosts[i].item()[:3]))))
        if chosen or denied:
            self._pending = [Boundary(*covers.ghosts[i].item()[:3]) for i in chosen]
            remove(covers, np.array(chosen + denied))

    def _open(self, boundary: Boundary) -> None:
        """Evaluate a boundary and replay the bytes since it; what ends on the way becomes a ghost."""
        path, position, log_weight = boundary
        slot = self._evaluate(path)
        log_share = log_weight - float(self._covers.state["log_total"][0])
        learn(self._learned, self._last_byte(position), log_share, self._rows.first[slot])
        while not replay(self._covers, self._pieces, self._rows, path, log_weight, position, slot):
            self._covers = larger(self._covers)

    def _evaluate(self, path: int) -> int:
        """The slot of a row that follows a token path."""
        tables = self.tables
        ids = token_path(self._covers, self._base, path)
        logits = self.expert.evaluate(ids)[0] if len(ids) else None
        began = time.perf_counter()
        slot = self._free_slot()
        probs, sums = self._rows.probs[slot], self._rows.sums[slot]
        if logits is None:
            # A first token without anything before it: Zipf over ids, which vocabularies order by frequency.
            probs[:] = 1.0 / (tables.order + 100.0)
            sums[:] = np.add.reduceat(probs, np.arange(0, len(probs), BLOCK), dtype=np.float64)
            text, end = float(sums.sum()), 0.0
        else:
            try:
                text, end = row_masses(logits, tables.order, tables.end_ids, probs, sums)
            except ValueError as error:
                raise ExpertFailedError(self.expert.name, f"{error} (at byte {self._here} of the text)") from error
            self.stats.n_decodes += 1
        add_row(self._pieces, self._rows, slot, text, end)
        self.stats.bridge_s += time.perf_counter() - began
        return slot

    def _slots_in_use(self) -> set[int]:
        return set(self._covers.leaves["slot"][: int(self._covers.state["n_leaves"][0])].tolist())

    def _free_slot(self) -> int:
        used = self._slots_in_use()
        if self._holds:
            used = used.union(*(hold.slots for hold in self._holds))
        if len(used) == len(self._rows.scale):
            self._rows = more_rows(self._rows)
        return next(slot for slot in range(len(self._rows.scale)) if slot not in used)

    def _reanchor(self) -> None:
        """The text went where no hypothesis put mass: start again from the canonical tokens of the recent text.

        The last canonical token stays open; if even that has no mass, a border is assumed right here.
        """
        text, here, nodes, state = self._text(), self._here, self._covers.nodes, self._covers.state
        path, end = int(state["anchor_path"][0]), int(state["anchor_position"][0])
        starts = self.expert.vocabulary.piece_start
        while end > word_start(text, here):
            path, token, _ = nodes[path].item()
            end -= int(starts[token + 1] - starts[token])
        ids = self.expert.tokenize(text[end:])
        position = here
        if self._reanchored_at != here:
            self.stats.n_reanchors += 1
            position -= int(starts[ids[-1] + 1] - starts[ids[-1]])
            ids = ids[:-1]
        self._reanchored_at = here
        self._covers, path = append_path(self._covers, path, ids)
        state = self._covers.state
        state["n_leaves"] = state["n_ghosts"] = state["n_joined"] = 0
        state["longest"] = self._covers.nodes["length"][path]
        self._pending = [Boundary(path, position, 0.0)]
        self._ready = False
