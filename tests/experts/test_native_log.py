"""The native library's log lines."""

from __future__ import annotations

import logging
import threading

import pytest

from gguf_fusion.experts import native_log
from gguf_fusion.experts.native_log import collected, reason, receive

DEBUG, INFO, WARN, ERROR, CONTINUE = 1, 2, 3, 4, 5


def test_errors_are_kept_in_quiet_mode(capfd: pytest.CaptureFixture[str]) -> None:
    """Warnings and errors are collected although nothing is printed; info is not; the words end the message."""
    with collected() as lines:
        receive(INFO, b"loading\n")
        receive(WARN, b"odd token\n")
        receive(ERROR, b"no ")
        receive(CONTINUE, b"memory\nsecond\n")
    assert list(lines) == ["odd token", "no memory", "second"]
    assert reason(lines) == "odd token | no memory | second"
    assert capfd.readouterr() == ("", "")


def test_nothing_said() -> None:
    """A failure without words says so."""
    with collected() as lines:
        pass
    assert "no reason" in reason(lines)


def test_lines_belong_to_their_thread() -> None:
    """Two loads at once do not mix their reasons."""
    found: dict[str, list[str]] = {}
    barrier = threading.Barrier(2)

    def load(name: str) -> None:
        with collected() as lines:
            barrier.wait()
            receive(ERROR, name.encode() + b" failed\n")
            barrier.wait()
            found[name] = list(lines)

    threads = [threading.Thread(target=load, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": ["a failed"], "b": ["b failed"]}


def test_verbose_uses_logging_with_the_right_levels(caplog: pytest.LogCaptureFixture) -> None:
    """Verbose lines reach the logger with ggml's levels, not with the binding's shifted ones."""
    native_log.set_verbose(True)
    try:
        for level in (DEBUG, INFO, WARN, ERROR):
            receive(level, b"line\n")
        receive(ERROR, b"bad \xff byte\n")
    finally:
        native_log.set_verbose(False)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.ERROR]
