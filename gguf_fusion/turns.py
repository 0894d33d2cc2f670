"""One text at a time, whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gguf_fusion.errors import UsageError


class Turns:
    """One text at a time: other threads wait for the holder, the holder's own thread takes over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: object = None
        self._thread = 0

    @contextmanager
    def take(self) -> Iterator[Callable[[], None]]:
        """Wait for a turn; yields a check that raises UsageError once the turn was taken over."""
        me, thread = object(), threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None or self._thread == thread)
            self._holder, self._thread = me, thread

        def still_mine() -> None:
            if self._holder is not me:
                raise UsageError("a newer reply of this ensemble was started, so this one cannot go on")

        try:
            yield still_mine
        finally:
            with self._changed:
                if self._holder is me:
                    self._holder = None
                    self._changed.notify_all()
