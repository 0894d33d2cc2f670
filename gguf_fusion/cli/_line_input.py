"""Where the lines of a conversation come from: a terminal with history and completion, or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gguf_fusion.errors import UsageError

QUOTES = '"""'
"""Begins and ends a text of several lines."""


class Lines(Protocol):
    """A source of lines."""

    def read(self, prompt: str, default: str = "") -> str | None:
        """The next line without its end, None at the end of input; a terminal raises KeyboardInterrupt for Ctrl-C."""
        ...


class Pipe:
    """Lines of stdin, without any prompt."""

    def read(self, prompt: str, default: str = "") -> str | None:
        """The next line; see the protocol. Raises UsageError for what is no UTF-8."""
        line = sys.stdin.buffer.readline()
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin: expected UTF-8, got byte {line[error.start]:#x}") from None
        return text.rstrip("\r\n") if text else None


class Terminal:
    """A line editor: history over sessions, completion of commands, Alt-Enter for a line break."""

    def __init__(self, commands: Sequence[str], history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        if history is not None:
            history.parent.mkdir(parents=True, exist_ok=True)
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            key_bindings=keys,
        )

    def read(self, prompt: str, default: str = "") -> str | None:
        """The next line; see the protocol."""
        try:
            return self._session.prompt(prompt, default=default)
        except EOFError:
            return None


def read_text(lines: Lines) -> str | None:
    """The next line, or all lines of a text between triple quotes; None at the end of input."""
    line = lines.read(">>> ")
    if line is None or not line.startswith(QUOTES):
        return line
    parts = [line.removeprefix(QUOTES)]
    while not parts[-1].rstrip().endswith(QUOTES):
        more = lines.read("... ")
        if more is None:
            return "\n".join(parts)
        parts.append(more)
    return "\n".join(parts).rstrip().removesuffix(QUOTES)
