"""The protocol every expert fulfils."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gguf_fusion.arrays import F32, I32
from gguf_fusion.vocabulary import Vocabulary

Progress = Callable[[int, int], None]
"""Called as ``progress(n_done, n_total)`` with token counts during a long evaluation."""


class Expert(Protocol):
    """A language model seen through its own tokens.

    An expert belongs to one thread at a time. Rows are views into memory that the next ``evaluate`` overwrites:
    consume or copy them first.
    """

    name: str
    vocabulary: Vocabulary
    n_ctx: int
    """Most tokens a path may have."""
    max_rows: int
    """Most rows one ``evaluate`` call may ask for."""
    n_decoded: int
    """Tokens decoded since construction (a counter, for statistics)."""
    decode_s: float
    """Seconds spent in native decoding since construction."""

    def tokenize(self, text: bytes) -> I32:
        """Canonical ids of plain text: no BOS, no control tokens, and their pieces joined give exactly ``text``."""
        ...

    def tokenize_template(self, text: bytes) -> I32:
        """Ids of template scaffolding: the text of control tokens becomes these tokens; no BOS is added."""
        ...

    def evaluate(self, path: I32, n_rows: int = 1, *, branch: bool = False, progress: Progress | None = None) -> F32:
        """Raw logits float32[n_rows, n_vocab] after each of the last ``n_rows`` tokens of ``path``.

        Whatever prefix of ``path`` is already resident is reused. With ``branch`` the resident path stays as it is
        and the row is computed beside it, where the memory allows that (a hint, never a change of the result).
        Raises ContextOverflowError when the path is longer than ``n_ctx``, ExpertFailedError when decoding fails.
        """
        ...

    def forget(self) -> None:
        """Drop the resident path: the next ``evaluate`` decodes everything again.

        Rows differ a little with the batches a path was decoded in, so a text comes out the same every time only if
        it does not start from leftovers of another one.
        """
        ...

    def bring_back(self, path: I32) -> int:
        """Make the text resident that shares most with ``path``, of the resident one and those that were kept.

        Returns the number of tokens shared. The text that makes room for it is kept, if there is a cache.
        """
        ...

    def close(self) -> None:
        """Free everything; closing twice is harmless, any other use afterwards raises ClosedError."""
        ...
