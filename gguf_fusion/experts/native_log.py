"""Where the native library's log lines go: to Python logging, and to whoever waits for the reason of a failure."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("gguf_fusion.native")

# The numbers are ggml's own; the binding's table is shifted, which hides errors in quiet mode.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5
_QUIET = logging.CRITICAL + 1
_KEPT_LINES = 40

logger.setLevel(_QUIET)

_lock = threading.Lock()
_collectors: dict[int, deque[str]] = {}
"""Lines kept per thread that is inside ``collected``."""
_partial: dict[int, tuple[int, str]] = {}
"""Level and text of the unfinished line of each thread."""


def set_verbose(verbose: bool) -> None:
    """Pass native lines on to the logger ``gguf_fusion.native`` (stderr unless logging is set up otherwise)."""
    logger.setLevel(logging.DEBUG if verbose else _QUIET)
    if verbose and not logger.handlers and not logging.getLogger().handlers:
        logger.addHandler(logging.StreamHandler())


@contextmanager
def collected() -> Iterator[deque[str]]:
    """Collect warnings and errors that the native library logs meanwhile in this thread, quiet or not."""
    thread = threading.get_ident()
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    with _lock:
        before = _collectors.get(thread)
        _collectors[thread] = lines
    try:
        yield lines
    finally:
        with _lock:
            if before is None:
                del _collectors[thread]
            else:
                _collectors[thread] = before


def receive(level: int, text: bytes) -> None:
    """Take one call of the native callback; whole lines go on. Never raises: native code could not handle it."""
    thread = threading.get_ident()
    with _lock:
        before_level, before = _partial.pop(thread, (level, ""))
        if level == _CONTINUE:
            level = before_level
        elif before:
            _deliver(thread, before_level, before)
            before = ""
        *lines, rest = (before + text.decode("utf-8", "replace")).split("\n")
        if rest:
            _partial[thread] = (level, rest)
        for line in lines:
            _deliver(thread, level, line)


def _deliver(thread: int, level: int, line: str) -> None:
    severity = _LEVELS.get(level, logging.DEBUG)
    if not line.strip():
        return
    if severity >= logging.WARNING:
        # A line of a native worker thread may belong to any load in progress.
        for lines in [_collectors[thread]] if thread in _collectors else list(_collectors.values()):
            lines.append(line.strip())
    if logger.isEnabledFor(severity):
        logger.log(severity, "%s", line.rstrip())


def reason(lines: deque[str]) -> str:
    """The last few distinct lines as one text, for the end of an error message."""
    return " | ".join(list(dict.fromkeys(lines))[-4:]) or "(it gave no reason)"
