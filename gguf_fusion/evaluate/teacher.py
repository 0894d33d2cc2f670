"""An expert that reads a known text: its rows are computed in batches, before anybody asks for them.

When a text is given, most rows that a cover tree will ask for are those after the text's own tokens. Evaluating these
in batches is several times faster than one by one, as llama-perplexity does it too. Rows of other segmentations are
evaluated beside them. Batched rows differ from single ones by rounding (more on some machines: see ``Settings``); an
expert's own tokens and its bridge are scored with the same rows, so a comparison of the two is not touched by it.
"""

from __future__ import annotations

import math

import numpy as np

from gguf_fusion.arrays import F32, F64, I32, I64
from gguf_fusion.cover.prefill import token_logprob
from gguf_fusion.errors import ExpertFailedError
from gguf_fusion.experts.base import Expert, Progress
from gguf_fusion.vocabulary import Kind

REJOIN_BYTES = 16
"""A segmentation that left the text's own tokens and came back is read on from these after so many equal bytes."""

_MEMO = 32
"""Rows kept beside the batch: several trees ask for the same ones within a few bytes."""

_KEPT = 4
"""Last rows of a batch that are kept when the next one is computed: late questions concern the last few tokens."""


class TeacherForced:
    """Fulfils ``experts.base.Expert`` around another expert; ``begin`` names the text that will be asked for.

    With ``rejoin`` (bytes, None = never) two paths whose tokens agree over that many last bytes, and whose texts are
    equal, share their rows from there on: the two contexts differ only in how some earlier word was cut, and
    evaluating the rest of a text once per such cut would cost more than all the rest.
    """

    def __init__(self, expert: Expert, *, rejoin: int | None = REJOIN_BYTES) -> None:
        self.expert = expert
        self.name = expert.name
        self.vocabulary = expert.vocabulary
        self.n_ctx = expert.n_ctx
        self.max_rows = expert.max_rows
        self.n_decoded = expert.n_decoded
        self.decode_s = expert.decode_s
        self._rejoin = rejoin
        self._rows = np.zeros((expert.max_rows, expert.vocabulary.n_vocab), np.float32)
        self.begin(b"")

    def begin(self, text: bytes) -> None:
        """Take a new text: what follows are questions about covers of it."""
        bos = self.vocabulary.bos_id
        ids = self.expert.tokenize(text)
        self.n_before = int(bos is not None)
        """Tokens before the text."""
        self.ids: I32 = ids if bos is None else np.concatenate([[bos], ids]).astype(np.int32)
        """int32[n]: the text's own tokens, BOS first where the model wants one."""
        self.ends = self._ends(self.ids)
        """int64[n]: bytes of the text up to the end of each token."""
        self._own = np.full(len(self.ids), np.nan)
        self._first = self._n_rows = 0
        self._memo: dict[bytes, F32] = {}
        self.expert.forget()

    def tokenize(self, text: bytes) -> I32:
        return self.expert.tokenize(text)

    def tokenize_template(self, text: bytes) -> I32:
        return self.expert.tokenize_template(text)

    def bring_back(self, path: I32) -> int:
        """Nothing: ``begin`` has read the text."""
        return 0

    def forget(self) -> None:
        """Nothing: ``begin`` has done it."""

    def close(self) -> None:
        self.expert.close()

    def evaluate(self, path: I32, n_rows: int = 1, *, branch: bool = False, progress: Progress | None = None) -> F32:
        """Rows as the protocol says; a row after tokens of the known text comes from the batch."""
        path = np.asarray(path, np.int32)
        if n_rows > 1:
            return self._counted(self.expert.evaluate(path, n_rows, progress=progress))
        path = self._rejoined(path)
        last = len(path) - 1
        if last < len(self.ids) and np.array_equal(path, self.ids[: last + 1]):
            if not self._n_rows or last >= self._first + self._n_rows:
                self._fill_to(last)
            if last >= self._first:
                return self._rows[last - self._first : last - self._first + 1]
        key = path.tobytes()
        row = self._memo.get(key)
        if row is None:
            row = self._counted(self.expert.evaluate(path, branch=True)).copy()
            self._remember(key, row)
        return row

    def own_logprobs(self, first: int, stop: int) -> F64:
        """float64[stop - first]: ln p of the text's own tokens ``first`` … ``stop - 1``, softmax over all ids.

        ``first`` must not lie before the first row that was asked for.
        """
        if stop > first:
            self._fill_to(stop - 2)
        logprobs: F64 = self._own[first:stop]
        if np.isnan(logprobs).any():
            raise ExpertFailedError(
                self.name, f"no probability for its own token {first + int(np.isnan(logprobs).argmax())}"
            )
        return logprobs

    def _fill_to(self, last: int) -> None:
        """Compute batches until the row after token ``last`` is there; the first batch begins with it."""
        if not self._n_rows:
            self._first = max(0, last)
        while last >= self._first + self._n_rows:
            for i in range(max(0, self._n_rows - _KEPT), self._n_rows):
                self._remember(self.ids[: self._first + i + 1].tobytes(), self._rows[i : i + 1].copy())
            self._first += self._n_rows
            stop = min(self._first + self.max_rows, len(self.ids))
            self._n_rows = stop - self._first
            self._rows[: self._n_rows] = self._counted(self.expert.evaluate(self.ids[:stop], self._n_rows))
            for i in range(min(self._n_rows, len(self.ids) - 1 - self._first)):
                token = self._first + i + 1
                self._own[token] = self._logprob(self._rows[i], token)

    def _logprob(self, row: F32, token: int) -> float:
        logprob = token_logprob(row, int(self.ids[token]))
        if not math.isfinite(logprob):
            raise ExpertFailedError(
                self.name, f"expected finite logits, got NaN or infinite ones before token {token} of the text"
            )
        return logprob

    def _remember(self, key: bytes, row: F32) -> None:
        while len(self._memo) >= _MEMO:
            self._memo.pop(next(iter(self._memo)))
        self._memo[key] = row

    def _counted(self, rows: F32) -> F32:
        self.n_decoded, self.decode_s = self.expert.n_decoded, self.expert.decode_s
        return rows

    def _ends(self, ids: I32) -> I64:
        starts = self.vocabulary.piece_start
        lengths = np.where(self.vocabulary.kinds[ids] == Kind.TEXT, starts[ids + 1] - starts[ids], 0)
        ends: I64 = np.cumsum(lengths, dtype=np.int64)
        return ends

    def _rejoined(self, path: I32) -> I32:
        """The path with its part before the last place where it meets the text's own tokens replaced by these."""
        n = min(len(path), len(self.ids))
        differs = np.flatnonzero(path[:n] != self.ids[:n])
        if self._rejoin is None or not len(differs):
            return path
        ends = self._ends(path)
        met = np.flatnonzero((ends <= ends[-1] - self._rejoin) & np.isin(ends, self.ends))
        if not len(met) or met[-1] < differs[0]:
            return path
        kept = int(np.searchsorted(self.ends, ends[met[-1]], side="right"))
        return np.concatenate([self.ids[:kept], path[met[-1] + 1 :]]).astype(np.int32)
