"""Token space: a predictor whose symbols are token ids, for identical vocabularies and for one expert alone.

There is nothing to bridge here: one decode per token, a softmax over the ids that may be chosen, and no ghosts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gguf_fusion.arrays import F32, F64, I32
from gguf_fusion.cover.base import PredictorStats, Prompt
from gguf_fusion.cover.prefill import prefill
from gguf_fusion.errors import ContextOverflowError, ExpertFailedError
from gguf_fusion.experts.base import Expert, Progress
from gguf_fusion.vocabulary import Kind

_OBSERVED_BYTES = 256
"""Prompt bytes whose probability ``start`` reports."""

_ZIPF_OFFSET = 100.0
"""Vocabularies order ids by frequency: p(id) is about 1 / (id + offset) where nothing precedes."""


class TokenCursor:
    """Predictor over ``n_vocab`` symbols. See ``cover.base.Predictor`` for the order of calls.

    The law is the softmax of the expert's row without CONTROL and UNUSED ids; the mass of all END ids is moved to the
    first of them, ``end_symbol``. So the greedy choice is the model's own, excluded ids and END aside.
    """

    def __init__(self, expert: Expert) -> None:
        vocabulary = expert.vocabulary
        self.expert = expert
        self.n_symbols = vocabulary.n_vocab
        self.stats = PredictorStats()
        ends = vocabulary.end_ids
        self.end_symbol = int(ends[0]) if len(ends) else None
        """The id that stands for END, None where the vocabulary has none."""
        self._end_ids = ends
        self._excluded = np.flatnonzero((vocabulary.kinds == Kind.CONTROL) | (vocabulary.kinds == Kind.UNUSED))
        self._probs = np.zeros(self.n_symbols)
        self._path = np.zeros(expert.n_ctx + 1, np.int32)
        self._n = 0
        self._ready = False

    @property
    def due(self) -> bool:
        """True when ``prepare`` will decode."""
        return not self._ready and self._n > 0

    @property
    def n_tokens(self) -> int:
        """Tokens of the text so far, prompt included."""
        return self._n

    def start(self, prompt: Prompt, progress: Progress | None = None) -> F64:
        """Begin a new text; see ``cover.base.Predictor.start``. No border stays open: the tail becomes tokens."""
        prompt = closed(self.expert, prompt)
        n = len(prompt.ids)
        if n >= self.expert.n_ctx:
            raise ContextOverflowError(self.expert.name, n, self.expert.n_ctx)
        observed = prefill(self.expert, prompt, _OBSERVED_BYTES, progress)
        self._path[:n] = prompt.ids
        self._n = n
        self._ready = False
        return observed[-_OBSERVED_BYTES:]

    def prepare(self) -> None:
        """Evaluate the text so far, unless its law is there already."""
        if self._ready:
            return
        if self._n:
            row = self.expert.evaluate(self._path[: self._n])[0]
            self.stats.n_decodes += 1
            began = time.perf_counter()
            self._set_law(row)
            self.stats.bridge_s += time.perf_counter() - began
        else:
            self._probs[:] = 1.0 / (np.arange(self.n_symbols) + _ZIPF_OFFSET)
            self._probs[self._end_ids] = 0.0
            self._normalise()
        self._ready = True

    def law(self) -> tuple[F64, float]:
        """(probs float64[n_vocab], 0.0): nothing is left to a stand-in. A view, valid until ``push``."""
        self.prepare()
        return self._probs, 0.0

    def stand_in(self) -> F64:
        """float64[n_vocab], sum 1: uniform over the ids that may be chosen. Never needed, as there are no ghosts."""
        law = np.ones(self.n_symbols)
        law[self._excluded] = 0.0
        law[self._end_ids[1:]] = 0.0
        law /= law.sum()
        return law

    def push(self, symbol: int, stand_in_prob: float = 1.0) -> None:
        """Advance by one token id; after END only ``start`` and ``restore`` make sense."""
        if not 0 <= symbol < self.n_symbols:
            raise ValueError(f"symbol: expected a token id in 0…{self.n_symbols - 1}, got {symbol}")
        self.stats.n_pushed += 1
        if symbol == self.end_symbol:
            return
        if self._n >= len(self._path):
            raise ContextOverflowError(self.expert.name, self._n, self.expert.n_ctx)
        self._path[self._n] = symbol
        self._n += 1
        self._ready = False

    def amend(self, stand_in_probs: Sequence[float]) -> None:
        """Nothing to amend without ghosts."""

    def snapshot(self) -> I32:
        """The token path."""
        return self._path[: self._n].copy()

    def restore(self, snapshot: I32) -> None:
        """Return to the text of ``snapshot``."""
        self._n = len(snapshot)
        self._path[: self._n] = snapshot
        self._ready = False

    def _set_law(self, row: F32) -> None:
        top = float(row.max())
        if not np.isfinite(top):
            bad = int(np.count_nonzero(~np.isfinite(row)))
            reason = f"expected finite logits, got {bad} of {len(row)} that are NaN or infinite"
            raise ExpertFailedError(self.expert.name, f"{reason} (after token {self._n} of its text)")
        np.copyto(self._probs, row)
        self._probs -= top
        np.exp(self._probs, out=self._probs)
        self._normalise()

    def _normalise(self) -> None:
        """Drop what may not be chosen, gather END in one place, and make the rest sum to 1."""
        probs = self._probs
        probs[self._excluded] = 0.0
        if self.end_symbol is not None:
            end = float(probs[self._end_ids].sum())
            probs[self._end_ids] = 0.0
            probs[self.end_symbol] = end
        total = float(probs.sum())
        if total <= 0.0:
            reason = "all its probability lies on control tokens; this is no text-generation model"
            raise ExpertFailedError(self.expert.name, f"{reason} (after token {self._n} of its text)")
        probs /= total


def closed(expert: Expert, prompt: Prompt) -> Prompt:
    """The prompt without a tail: its last run of text, tail included, in the expert's canonical tokens."""
    if not prompt.tail:
        return prompt
    vocabulary = expert.vocabulary
    scaffold = np.flatnonzero(vocabulary.kinds[prompt.ids] != Kind.TEXT)
    n = int(scaffold[-1]) + 1 if len(scaffold) else 0
    ids = expert.tokenize(vocabulary.text(prompt.ids[n:]) + prompt.tail)
    return Prompt(
        ids=np.concatenate([prompt.ids[:n], ids]).astype(np.int32),
        observed=np.concatenate([prompt.observed[:n], np.ones(len(ids), np.bool_)]),
    )
