"""The only place that prints: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from gguf_fusion.errors import UsageError
from gguf_fusion.hub.quants import human_size

__all__ = [
    "ConsoleProgress",
    "human_size",
    "note",
    "print_json",
    "print_line",
    "print_pairs",
    "print_table",
    "size_in_bytes",
    "warn",
]


_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*\Z", re.IGNORECASE)


def print_line(text: str = "") -> None:
    """A line of the result."""
    click.echo(text)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """The result as one JSON document; without ``indent`` on one line."""
    click.echo(json.dumps(value, indent=indent, ensure_ascii=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left-aligned columns without borders; the last one is not padded."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())


def print_pairs(pairs: Mapping[str, str]) -> None:
    """One fact a line, the values below each other."""
    width = max(map(len, pairs), default=0)
    for key, value in pairs.items():
        click.echo(f"{key:<{width}}  {value}")


def note(message: str) -> None:
    """Something worth knowing, on stderr."""
    click.echo(message, err=True)


def warn(message: str) -> None:
    """Something to act on, on stderr."""
    click.echo(f"warning: {message}", err=True)


def size_in_bytes(option: str, text: str) -> int:
    """Bytes of a size as people write it; raises UsageError naming the option."""
    match = _SIZE.match(text)
    if not match:
        raise UsageError(f"{option}: expected a size such as 6GB, 512MB or 8GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


class ConsoleProgress:
    """Shows transfers on stderr: a bar on a terminal, one line at the begin and the end elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._draw = not quiet and sys.stderr.isatty() and os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") != "1"
        self._bar: Any = None
        self._label = ""
        self._total: int | None = None
        self._done = 0
        self._begin = 0.0

    def note(self, message: str) -> None:
        """Print one line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.clear()
        note(message)

    def start(self, label: str, total: int | None) -> None:
        """Begin a transfer."""
        self._label, self._total, self._done, self._begin = label, total, 0, time.monotonic()
        if self._draw:
            from tqdm import tqdm

            self._bar = tqdm(desc=label, total=total, unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True)
        elif not self._quiet:
            note(f"fetching {label}" + (f" ({human_size(total)})" if total else ""))

    def advance_to(self, done: int) -> None:
        """Show progress; it never goes backwards."""
        step = min(done, self._total or done) - self._done
        if step > 0:
            self._done += step
            if self._bar is not None:
                self._bar.update(step)

    def finish(self) -> None:
        """End the transfer."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif not self._quiet and self._label and (self._total is None or self._done >= self._total):
            note(f"fetched {self._label} in {time.monotonic() - self._begin:.1f} s")
        self._label = ""
