"""An expert without a model: its rows come from a function. For tests, examples and exact comparisons.

It keeps the whole protocol, the awkward parts included: rows are views into one buffer that the next call overwrites
(with NaN first, so that a kept view is noticed), paths have a limit, a resident path saves work, and a sticky variant
refuses to go back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gguf_fusion.arrays import F32, F64, I32
from gguf_fusion.errors import ClosedError, ContextOverflowError, ExpertFailedError
from gguf_fusion.experts.base import Progress
from gguf_fusion.experts.byte_law import ByteLaw, SegmentedLaw
from gguf_fusion.experts.prompt_cache import PromptCache, n_shared
from gguf_fusion.vocabulary import Kind, Vocabulary

TokenLaw = Callable[[tuple[int, ...]], F64]
"""Maps a token path to float64[n_vocab], the probabilities of the next token (any positive scale)."""


class TableExpert:
    """Fulfils ``experts.base.Expert`` with rows ``ln law(path)``; probability 0 becomes the logit -1e4."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        law: TokenLaw,
        *,
        name: str = "table",
        n_ctx: int = 4096,
        max_rows: int = 8,
        refuses_rollback: bool = False,
    ) -> None:
        """``refuses_rollback``: like a recurrent memory, going back means evaluating everything again."""
        self.name = name
        self.vocabulary = vocabulary
        self.n_ctx = n_ctx
        self.max_rows = max_rows
        self.n_decoded = 0
        self.decode_s = 0.0
        self.n_restarts = 0
        """How often a refused roll-back made it evaluate a whole path again."""
        self.threads = 1
        self.prompt_cache: PromptCache | None = None
        self._law = law
        self._sticky = refuses_rollback
        self._buffer = np.full((max_rows, vocabulary.n_vocab), np.nan, np.float32)
        self._resident: tuple[int, ...] = ()
        self._last: tuple[tuple[int, ...], int] = ((), 0)
        self._closed = False

    @classmethod
    def from_byte_law(
        cls,
        vocabulary: Vocabulary,
        law: ByteLaw,
        *,
        greedy: float = 1.0,
        name: str = "table",
        n_ctx: int = 4096,
        max_rows: int = 8,
        refuses_rollback: bool = False,
    ) -> TableExpert:
        """An expert whose byte marginal is ``law`` under any vocabulary; see ``byte_law.SegmentedLaw``."""
        segmented = SegmentedLaw(vocabulary, law, greedy=greedy)
        return cls(vocabulary, segmented, name=name, n_ctx=n_ctx, max_rows=max_rows, refuses_rollback=refuses_rollback)

    def tokenize(self, text: bytes) -> I32:
        """int32[n]: the longest piece at each place."""
        return self._longest(text, {Kind.TEXT})

    def tokenize_template(self, text: bytes) -> I32:
        """int32[n]: the longest piece at each place, control and END tokens included."""
        return self._longest(text, {Kind.TEXT, Kind.CONTROL, Kind.END})

    def evaluate(self, path: I32, n_rows: int = 1, *, branch: bool = False, progress: Progress | None = None) -> F32:
        """Rows after the last ``n_rows`` tokens of ``path``; see the protocol."""
        self._require_open()
        tokens = tuple(int(t) for t in path)
        if not 1 <= n_rows <= min(self.max_rows, len(tokens)):
            raise ValueError(f"n_rows: expected 1…{min(self.max_rows, len(tokens))}, got {n_rows}")
        if len(tokens) > self.n_ctx:
            raise ContextOverflowError(self.name, len(tokens), self.n_ctx)
        if not all(0 <= t < self.vocabulary.n_vocab for t in tokens):
            raise ValueError(f"path: token ids must lie in 0…{self.vocabulary.n_vocab - 1}")
        if self._last[0] == tokens and self._last[1] >= n_rows:
            return self._buffer[self._last[1] - n_rows : self._last[1]]
        n_shared = 0
        for ours, theirs in zip(self._resident, tokens, strict=False):
            if ours != theirs:
                break
            n_shared += 1
        start = min(n_shared, len(tokens) - n_rows)
        if self._sticky and start < len(self._resident):
            self.n_restarts += 1
            start = 0
        self.n_decoded += len(tokens) - start
        if not branch or self._sticky:
            self._resident = tokens
        self._buffer[:] = np.nan
        for i in range(n_rows):
            self._buffer[i] = self._logits(tokens[: len(tokens) - n_rows + 1 + i])
        self._last = (tokens, n_rows)
        if progress is not None:
            progress(len(tokens) - start, len(tokens) - start)
        return self._buffer[:n_rows]

    def probs(self, path: tuple[int, ...]) -> F64:
        """float64[n_vocab], sum 1: the law a reader of the float32 rows sees, for exact comparisons."""
        logits = self._logits(path).astype(np.float64)
        weights: F64 = np.exp(logits - logits.max())
        weights[logits <= _IMPOSSIBLE] = 0.0
        return weights / float(weights.sum())

    def set_threads(self, n: int) -> None:
        """Remember the number; a table computes nothing."""
        self.threads = n

    def bring_back(self, path: I32) -> int:
        """See the protocol; a state is the token path itself."""
        self._require_open()
        if self.prompt_cache is not None:
            resident = np.array(self._resident, np.int32)
            kept = self.prompt_cache.exchange(
                self.name, resident, path, lambda: resident.nbytes, lambda: resident.view(np.uint8), whole=self._sticky
            )
            if kept is not None:
                self._resident, self._last = tuple(kept.path.tolist()), ((), 0)
        return n_shared(np.array(self._resident, np.int32), path)

    def forget(self) -> None:
        """Drop the resident path, or keep it in the cache."""
        self.bring_back(np.zeros(0, np.int32))
        self._resident = ()
        self._last = ((), 0)

    def close(self) -> None:
        """Any other use afterwards raises ClosedError; views taken before turn into NaN."""
        self._closed = True
        self._buffer[:] = np.nan

    def _logits(self, path: tuple[int, ...]) -> F32:
        probs = np.asarray(self._law(path), np.float64)
        logits = np.full(self.vocabulary.n_vocab, _IMPOSSIBLE, np.float32)
        np.log(probs, out=logits, where=probs > 0.0, casting="same_kind")
        return logits

    def _longest(self, text: bytes, kinds: set[Kind]) -> I32:
        self._require_open()
        pieces = representatives(self.vocabulary, kinds)
        longest = max(map(len, pieces), default=0)
        ids, at = [], 0
        while at < len(text):
            for length in range(min(longest, len(text) - at), 0, -1):
                token = pieces.get(text[at : at + length])
                if token is not None:
                    break
            else:
                raise ExpertFailedError(self.name, f"its vocabulary has no token for the byte 0x{text[at]:02X}")
            ids.append(token)
            at += length
        return np.array(ids, np.int32)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"expert {self.name!r} was closed")


_IMPOSSIBLE = np.float32(-1e4)


def representatives(vocabulary: Vocabulary, kinds: set[Kind]) -> dict[bytes, int]:
    """The id that stands for each piece of these kinds: no byte fallback if there is another one, then the lowest."""
    found: dict[bytes, int] = {}
    order = np.lexsort((np.arange(vocabulary.n_vocab), vocabulary.byte_fallback))
    for token in order:
        if vocabulary.kinds[token] in kinds and vocabulary.piece(int(token)):
            found.setdefault(vocabulary.piece(int(token)), int(token))
    return found
