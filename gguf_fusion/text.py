"""From bytes to text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from gguf_fusion.errors import SamplingError


class TextStream:
    """Turns pushed bytes into text that may be shown: withholds half characters and possible beginnings of stops."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise SamplingError("stop: expected texts of at least one character, got an empty one")
        self._stops = [stop.encode() for stop in stops]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self.stopped: str | None = None
        """The stop string that ended the text, None while it goes on."""

    def push(self, data: bytes) -> str:
        """Text that becomes certain with these bytes; after a stop string nothing more comes."""
        if self.stopped is not None:
            return ""
        self._held += data
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)
            self.stopped = stop.decode()
            sure, self._held = self._held[:at], b""
            return self._decoder.decode(sure, final=True)
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return self._decoder.decode(sure)

    def finish(self) -> str:
        """The rest at the end of the text; a character that never became complete is replaced."""
        rest, self._held = self._held, b""
        return self._decoder.decode(rest, final=True)

    def _overlap(self, stop: bytes) -> int:
        """Length of the longest end of the held bytes that could begin ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
