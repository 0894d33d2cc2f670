"""How the hub tells what it does; it never prints itself."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives what a pull does. Amounts are bytes; a total of None is unknown."""

    def note(self, message: str) -> None:
        """One line worth reading: a source that failed, terms to accept."""
        ...

    def start(self, label: str, total: int | None) -> None:
        """A transfer begins; it ends with ``finish``."""
        ...

    def advance_to(self, done: int) -> None:
        """So many bytes of the transfer are here."""
        ...

    def finish(self) -> None:
        """The transfer is over, complete or not."""
        ...


class Silent:
    """A Progress that drops everything."""

    def note(self, message: str) -> None:
        pass

    def start(self, label: str, total: int | None) -> None:
        pass

    def advance_to(self, done: int) -> None:
        pass

    def finish(self) -> None:
        pass
