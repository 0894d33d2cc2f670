"""Rows ahead of the text: several tokens in one batch where it is known, or guessed, what comes next.

An expert's row depends on its token path only, as long as every batch stays inside the class of sizes that give
bit-identical rows (``batches.BatchFacts.exact``). So a row that was computed early is the row that would have been
computed later: ``AheadExpert`` stands between a predictor and its expert, evaluates some tokens more than it was asked
for, keeps their rows, and hands them out when the predictor asks. The predictor does not notice.

What comes next is known where an expert lags behind the text (lazy experts), else it is guessed: the fastest expert
goes on by itself while it is sure, decoding what it will have to decode anyway if it is right; where it is not sure,
from the last place where the same bytes were seen, in the prompt, in the text so far, or in the text before this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gguf_fusion.arrays import F32, I32
from gguf_fusion.batches import SINGLE, BatchFacts
from gguf_fusion.cover.canonical import complete_length
from gguf_fusion.experts.base import Expert, Progress
from gguf_fusion.vocabulary import Kind, Vocabulary

LEVELS = ("off", "exact", "law")

CHUNK = 2
"""Tokens of the text that are decoded at once where nothing is ahead. With batches of any size a row would depend on
what happened to be resident; in chunks of this size it depends on the path only."""

_CONTEXT_BYTES = 12
"""Bytes that must be the same for what followed them to be a guess."""

_GUESS_BYTES = 48
_LEAST_GAIN = 0.05
"""Tokens that a batch must save at least."""

_MOST_DRAFTED = 3
"""Tokens that the fastest expert goes on by itself."""

_SURE = 0.6
"""Probability of a token that it must have for that."""

_LEAST_RATE = 0.5
"""Share of such tokens that must have been right lately."""

_STEP = 0.1
_RECOVERY = 0.01
_START_RATE = 0.7


class Draft:
    """The text that is being written, and a guess at what follows; shared by all experts of an engine."""

    def __init__(self) -> None:
        self.text = bytearray()
        """Bytes after the prompt."""
        self.guessing = False
        self._corpus = bytearray()
        self._last: dict[bytes, int] = {}
        """Last place after each run of ``_CONTEXT_BYTES``."""
        self._guess: tuple[int, bytes] = (-1, b"")
        self._proposed: tuple[int, bytes] = (0, b"")

    def begin(self, prompt: bytes, *, fresh: bool) -> None:
        """A new text after ``prompt``. Unless ``fresh``, guesses come from the text before it, too."""
        before = b"" if fresh else bytes(self._corpus[-4096:])
        self.text = bytearray()
        self._corpus, self._last, self._guess, self._proposed = bytearray(), {}, (-1, b""), (0, b"")
        for byte in before + prompt:
            self._add(byte)

    def push(self, data: bytes) -> None:
        """Bytes that were drawn."""
        self.text += data
        for byte in data:
            self._add(byte)

    def propose(self, text: bytes) -> None:
        """What an expert would write next."""
        self._proposed = len(self._corpus), text
        self._guess = (-1, b"")

    def guess(self) -> bytes:
        """What may follow the text; empty where nothing like it was seen."""
        if not self.guessing:
            return b""
        here = len(self._corpus)
        since, proposed = self._proposed
        if here - since < len(proposed) and self._corpus[since:] == proposed[: here - since]:
            return proposed[here - since :]
        if self._guess[0] != here:
            place = self._last.get(bytes(self._corpus[-_CONTEXT_BYTES:]), here)
            self._guess = here, bytes(self._corpus[place : place + _GUESS_BYTES])
        return self._guess[1]

    def _add(self, byte: int) -> None:
        if len(self._corpus) >= _CONTEXT_BYTES:
            self._last[bytes(self._corpus[-_CONTEXT_BYTES:])] = len(self._corpus)
        self._corpus.append(byte)


@dataclass(slots=True)
class _Rate:
    """How often a token ahead was asked for, lately."""

    value: float = _START_RATE

    def learn(self, hits: int, n: int) -> None:
        for i in range(min(hits + 1, n)):
            self.value += _STEP * ((i < hits) - self.value)

    def recover(self) -> None:
        """Nothing was tried: forget slowly, so that it is tried again some time."""
        self.value += _RECOVERY * (_START_RATE - self.value)


class AheadExpert:
    """An expert that reads ahead; see ``experts.base.Expert``. Everything else is that of the expert inside."""

    def __init__(self, expert: Expert, draft: Draft, facts: BatchFacts = SINGLE) -> None:
        self.inside = expert
        self.facts = facts
        self.level = "off"
        self.known = False
        self.drafts = False
        self.n_ahead = 0
        """Rows computed before they were asked for."""
        self.n_used = 0
        """Those of them that were asked for."""
        self._draft = draft
        self._base = -1
        """Tokens of the prompt; -1 before the first one."""
        self._tail = b""
        self._resident = np.zeros(0, np.int32)
        self._rows: dict[bytes, F32] = {}
        self._tried = (0, 0, _Rate())
        self._guessed, self._sure = _Rate(), _Rate(0.95)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    # ---- the Expert protocol ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.inside.name

    @property
    def vocabulary(self) -> Vocabulary:
        return self.inside.vocabulary

    @property
    def n_ctx(self) -> int:
        return self.inside.n_ctx

    @property
    def max_rows(self) -> int:
        return self.inside.max_rows

    @property
    def n_decoded(self) -> int:
        return self.inside.n_decoded

    @property
    def decode_s(self) -> float:
        return self.inside.decode_s

    def tokenize(self, text: bytes) -> I32:
        return self.inside.tokenize(text)

    def tokenize_template(self, text: bytes) -> I32:
        return self.inside.tokenize_template(text)

    def begin(self, n_prompt: int, tail: bytes, level: str, *, known: bool, drafts: bool) -> None:
        """A text begins with ``n_prompt`` tokens of prompt and a tail of bytes.

        ``level``: one of ``LEVELS``, for what is guessed; ``known``: whether the text may be ahead of the predictor,
        so that its tokens are read in one batch; ``drafts``: whether it goes on by itself, for the others to follow.
        """
        self._settle()
        self._base, self._tail = n_prompt, tail
        self.level, self.known, self.drafts = level, known, drafts

    def evaluate(self, path: I32, n_rows: int = 1, *, branch: bool = False, progress: Progress | None = None) -> F32:
        """See ``experts.base.Expert.evaluate``; the row may have been computed before."""
        if n_rows != 1 or len(path) < self._base or self._base < 0:
            self._rows.clear()
            rows = self.inside.evaluate(path, n_rows, branch=branch, progress=progress)
            self._resident = path.copy()
            return rows
        row = self._rows.get(path.tobytes())
        if row is not None:
            self.n_used += 1
            n, hits, rate = self._tried
            self._tried = n, hits + 1, rate
            return row[None]
        self._settle()
        start = self._through(path)
        more = self._more(path, len(path) - start)
        if not len(more):
            rows = self.inside.evaluate(path, progress=progress)
            self._resident = path.copy()
            if self.drafts:
                rows = rows.copy()
                self._go_on(path, rows[0])
            return rows
        longer = np.concatenate([path, more])
        rows = self.inside.evaluate(longer, len(more) + 1, progress=progress)
        self._resident = longer
        self.n_ahead += len(more)
        for i in range(1, len(rows)):
            self._rows[longer[: len(path) + i].tobytes()] = rows[i].copy()
        return rows[:1]

    def bring_back(self, path: I32) -> int:
        """See ``experts.base.Expert.bring_back``."""
        self._rows.clear()
        n = self.inside.bring_back(path)
        self._resident = path[:n].copy()
        return n

    def forget(self) -> None:
        """See ``experts.base.Expert.forget``."""
        self._rows.clear()
        self._resident = np.zeros(0, np.int32)
        self.inside.forget()

    def close(self) -> None:
        """See ``experts.base.Expert.close``."""
        self._rows.clear()
        self.inside.close()

    # ---- inside -----------------------------------------------------------------------------------------------

    def _through(self, path: I32) -> int:
        """Decode what lies before the last chunk of ``path``; returns the number of tokens resident then."""
        n = min(len(path) - 1, len(self._resident))
        different = np.flatnonzero(path[:n] != self._resident[:n])
        start = int(different[0]) if len(different) else n
        while start >= self._base and len(path) - start > CHUNK:
            start += CHUNK
            self.inside.evaluate(path[:start])
            self._resident = path[:start].copy()
        return start

    def _more(self, path: I32, n_due: int) -> I32:
        """int32[k]: tokens worth reading with the ``n_due`` last ones of ``path``."""
        nothing = path[:0]
        if self.level == "off" and not self.known:
            return nothing
        largest = self.facts.exact if self.level != "law" else len(self.facts.costs) - 1
        room = min(largest - n_due, self.max_rows - 1, self.n_ctx - len(path))
        if room < 1 or getattr(getattr(self.inside, "settings", None), "hidden", False):
            return nothing
        at = self._end_of(path)
        known = (self._tail + bytes(self._draft.text))[at:] if self.known or self.level != "off" else b""
        sure = len(known) > 0 and self.known
        text = known + (self._draft.guess() if self.level != "off" else b"")
        text = text[: complete_length(text)][:_GUESS_BYTES]
        if not text:
            return nothing
        rate = self._sure if sure else self._guessed
        n = self._worth(rate.value, n_due, room)
        if not n:
            rate.recover()
            return nothing
        ids = self.tokenize(text[: complete_length(text)])[:-1][:n]  # the last one may go on
        if len(ids):
            self._tried = len(ids), 0, rate
        return ids

    def _end_of(self, path: I32) -> int:
        """Bytes from the end of the prompt's tokens to the end of ``path``."""
        starts, ids = self.vocabulary.piece_start, path[self._base :]
        return int((starts[ids + 1] - starts[ids]).sum())

    def _go_on(self, path: I32, row: F32) -> None:
        """Decode the most probable tokens after ``path`` while they are sure, and propose their text."""
        if self._end_of(path) != len(self._tail) + len(self._draft.text):
            return
        if self._guessed.value < _LEAST_RATE:
            self._guessed.recover()
            return
        pieces: list[bytes] = []
        n = 0
        while True:
            token = int(row.argmax())
            sure = float(np.exp(row - row[token]).sum()) < 1.0 / _SURE
            if not sure or self.vocabulary.kinds[token] != Kind.TEXT:
                break
            pieces.append(self.vocabulary.piece(token))
            if n == _MOST_DRAFTED or len(path) >= self.n_ctx:
                break
            path = np.append(path, np.int32(token))
            row = self.inside.evaluate(path)[0].copy()
            self._resident = path
            self._rows[path.tobytes()] = row
            n += 1
        self.n_ahead += n
        self._tried = n, 0, self._guessed
        self._draft.propose(b"".join(pieces))

    def _worth(self, rate: float, n_due: int, room: int) -> int:
        """How many tokens ahead save most, each being asked for with probability ``rate`` if the one before was."""
        best, most, expected = 0, _LEAST_GAIN, 0.0
        for n in range(1, room + 1):
            expected += rate**n
            gain = expected - (self.facts.cost(n_due + n) - self.facts.cost(n_due))
            if gain > most:
                best, most = n, gain
        return best

    def _settle(self) -> None:
        """What was read ahead and not asked for by now is of no use."""
        n, hits, rate = self._tried
        if n:
            rate.learn(hits, n)
        self._tried = 0, 0, rate
        self._rows.clear()
