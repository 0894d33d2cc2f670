"""What an expert has read already, so that a prompt that begins like an earlier text costs only what is new.

The weights ask how well each expert foresaw the last bytes of a prompt. Of tokens that were read before, and of bytes
that were generated, that is known: only tokens that are new are asked for their rows. So the next turn of a
conversation decodes its new tokens, and its evidence is what it would be after reading everything again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gguf_fusion.arrays import F64, I32, Bool
from gguf_fusion.cover.base import Prompt
from gguf_fusion.cover.prefill import token_logprob
from gguf_fusion.experts.base import Expert, Progress
from gguf_fusion.experts.prompt_cache import n_shared
from gguf_fusion.vocabulary import Kind

_TEXTS = 16
"""Texts that are remembered: conversations that a server may lead in turn."""


@dataclass(slots=True)
class _Text:
    """A prompt in tokens, what followed in bytes, and ln p of both."""

    ids: I32
    logs: F64
    """float64[n_ids]: ln p of each token of the prompt, NaN where it was not asked for."""
    bytes: bytearray = field(default_factory=bytearray)
    byte_logs: list[float] = field(default_factory=list)


class Recall:
    """The last texts of one expert."""

    def __init__(self, expert: Expert) -> None:
        self._expert = expert
        self._texts: list[_Text] = []
        """The one that is being written last."""
        self._writing = False

    def leave(self) -> None:
        """The next bytes belong to a text that is not remembered."""
        self._writing = False

    def read(self, prompt: Prompt, n_bytes: int, progress: Progress | None = None) -> F64:
        """Evaluate what is new of a prompt's ids; returns float64[n], ln p of its last ``n_bytes`` observed bytes.

        A token's log-probability is spread evenly over its bytes, oldest first. The tail of the prompt is left to the
        predictor; ``add`` tells what came of it.
        """
        ids, starts = prompt.ids, self._expert.vocabulary.piece_start
        lengths = (starts[ids + 1] - starts[ids]) * prompt.observed
        after = np.cumsum(lengths[::-1])[::-1] - lengths
        logs = np.full(len(ids), np.nan)
        known = max((self._known(text, ids) for text in self._texts), key=len, default=logs[:0])
        logs[: len(known)] = known
        wanted = (lengths > 0) & (after < n_bytes)
        wanted[:1] = False  # nothing precedes the first token
        self._ask(ids, logs, wanted, progress)
        self._texts = [*self._texts[1 - _TEXTS :], _Text(ids.copy(), logs)]
        self._writing = True
        chosen = np.flatnonzero(wanted)
        return np.repeat(logs[chosen] / lengths[chosen], lengths[chosen])[-n_bytes:]

    def add(self, data: bytes, logprob: float) -> None:
        """Bytes that follow, ``logprob`` (nats) for all of them together."""
        if self._writing:
            self._texts[-1].bytes += data
            self._texts[-1].byte_logs += [logprob / max(1, len(data))] * len(data)

    def _known(self, text: _Text, ids: I32) -> F64:
        """float64[k]: ln p of the first ``k`` ids, those that were read before or whose bytes were generated."""
        shared = n_shared(ids, text.ids)
        if shared < len(text.ids):
            return text.logs[:shared]
        n, logs, at = shared, text.logs.tolist(), 0
        vocabulary = self._expert.vocabulary
        for token in ids[n:].tolist():
            piece = vocabulary.piece(token)
            if vocabulary.kinds[token] != Kind.TEXT or text.bytes[at : at + len(piece)] != piece:
                break
            logs.append(sum(text.byte_logs[at : at + len(piece)]))
            at += len(piece)
        return np.array(logs)

    def _ask(self, ids: I32, logs: F64, wanted: Bool, progress: Progress | None) -> None:
        """Fill in ``logs`` wherever it is wanted and unknown."""
        missing = np.flatnonzero(wanted & np.isnan(logs))
        if not len(missing):
            return
        first = int(missing[0])
        self._expert.evaluate(ids[:first], progress=progress)
        for start in range(first, int(missing[-1]) + 1, self._expert.max_rows):
            stop = min(start + self._expert.max_rows, int(missing[-1]) + 1)
            rows = self._expert.evaluate(ids[: stop - 1], stop - start)
            for i, row in zip(range(start, stop), rows, strict=True):
                if wanted[i]:
                    logs[i] = token_logprob(row, int(ids[i]))
