"""From bytes to text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from gguf_fusion.errors import SamplingError


class TextStream:
    """Turns pushed bytes into text that may be shown.

    Withheld are at most 3 bytes of a character that is not complete yet, and the longest end of the text that could
    begin a stop string. What is shown in total is the same however the bytes are split: the bytes before the stop
    string that is complete first (of several that end at one place, before the longest), decoded as UTF-8, with
    U+FFFD for bytes that belong to no character.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """``stops`` are matched on bytes. Raises SamplingError for an empty one, which would end every text."""
        self._stops = [_stop_bytes(stop) for stop in stops]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self.n_sure = 0
        """Bytes that belong to the text for sure, the beginning of a character among them."""
        self.stopped: str | None = None
        """The stop string that ended the text; None while it goes on."""

    def push(self, data: bytes) -> str:
        """Text that becomes certain with these bytes; after a stop string nothing more comes."""
        if self.stopped is not None:
            return ""
        self._held += data
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            # The first to be complete: a stop that began earlier but is still open cannot be waited for.
            end, at = min(found)
            self.stopped = self._held[at:end].decode("utf-8", "surrogateescape")
            sure, self._held = self._held[:at], b""
            self.n_sure += at
            return self._decoder.decode(sure, final=True)
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.n_sure += len(sure)
        return self._decoder.decode(sure)

    def finish(self) -> str:
        """The rest at the end of the text; a character that never became complete is replaced."""
        rest, self._held = self._held, b""
        self.n_sure += len(rest)
        return self._decoder.decode(rest, final=True)

    def _overlap(self, stop: bytes) -> int:
        """Length of the longest end of the held bytes that could begin ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


def _stop_bytes(stop: str) -> bytes:
    """Bytes of a stop string; raw bytes of a command line (surrogate escapes) stay what they were."""
    if not stop:
        raise SamplingError("stop: expected texts of at least one character, got an empty one")
    try:
        return stop.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SamplingError(f"stop: expected text that has UTF-8 bytes, got {stop!r}") from error
