"""What the engine asks of an expert's reading of the shared text: the Predictor protocol and its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gguf_fusion.arrays import F64, I32, Bool
from gguf_fusion.experts.base import Expert, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One expert's own rendering of the prompt.

    ids      : int32[n], tokens to prefill, BOS included where the model wants one; may be empty
    observed : bool[n], True where the token is the user's text (evidence counts it), False for scaffolding
    tail     : bytes after ``ids`` whose token border is left open: they are pushed through the cover tree
    """

    ids: I32
    observed: Bool
    tail: bytes = b""


@dataclass(slots=True, kw_only=True)
class PredictorStats:
    """Counters since construction; subtract two copies to get an interval."""

    n_pushed: int = 0
    n_decodes: int = 0
    """Rows the predictor asked for (one per evaluated boundary)."""
    n_reanchors: int = 0
    ghost_share_sum: float = 0.0
    """Sum over symbols of the share filled by stand-ins; divide by n_pushed for the mean."""
    bridge_s: float = 0.0
    """Seconds spent in row processing and tree work, native decoding excluded."""


class Predictor(Protocol):
    """One expert reading the shared text symbol by symbol.

    The order of calls at each step: ``prepare`` (may decode; run by the expert's lane), ``law``, then ``push`` of the
    symbol that was drawn or observed. Not thread-safe: one owner at a time.
    """

    expert: Expert
    n_symbols: int
    stats: PredictorStats

    @property
    def due(self) -> bool:
        """True when ``prepare`` will decode."""
        ...

    @property
    def n_tokens(self) -> int:
        """Tokens of the heaviest path: what the text costs of the expert's context so far."""
        ...

    def start(self, prompt: Prompt, progress: Progress | None = None) -> F64:
        """Begin a new text; returns float64[n], ln p of the last observed prompt bytes (n <= 512), oldest first.

        A resident prefix is reused. Bytes whose probability is unknown (nothing precedes them) are left out.
        """
        ...

    def prepare(self) -> None:
        """Evaluate what must be evaluated before the next law."""
        ...

    def law(self) -> tuple[F64, float]:
        """(probs float64[n_symbols], ghost_share): probs sum to 1 - ghost_share; a view, valid until ``push``."""
        ...

    def stand_in(self) -> F64:
        """float64[n_symbols], sum 1: what to assume for the ghost share when no other expert can say."""
        ...

    def push(self, symbol: int, stand_in_prob: float = 1.0) -> None:
        """Advance by one observed symbol; ``stand_in_prob`` is what the stand-in law gave it."""
        ...

    def amend(self, stand_in_probs: Sequence[float]) -> None:
        """Tell what the stand-in law gave to the last symbols, oldest first, where ``push`` was told a makeshift.

        Only while there were no ghosts at these symbols, so that nothing has been made of the makeshift.
        """
        ...

    def snapshot(self) -> Any:
        """An opaque, cheap copy of the state, for ``restore``."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Return to the text of ``snapshot``; later laws are as if the pushes since then had not happened."""
        ...
