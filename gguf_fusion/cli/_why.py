"""Who carried an answer, piece by piece: as coloured text on a terminal, as a table elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from gguf_fusion.session import Shares

_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")

_HALF = 0.5
"""A piece that its strongest expert carried by less than this is shown faintly."""


def coloured() -> bool:
    """Whether stdout takes colours: a terminal, and neither NO_COLOR nor a dumb one."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shown(text: str) -> str:
    """Text that is safe on a terminal: control characters, with which a model could take it over, are replaced."""
    return "".join(c if c.isprintable() or c in "\n\t" or ord(c) > 0x9F else "\ufffd" for c in text)


def in_colour(pieces: Sequence[Shares], experts: Sequence[str]) -> str:
    """The answer, every piece in the colour of the expert that carried most of it, and a line that explains them."""
    text = "".join(
        click.style(shown(piece), fg=_colour(_strongest(shares)), dim=max(shares) < _HALF) for piece, shares in pieces
    )
    key = "  ".join(
        click.style(f"{name} {100 * share:.0f} %", fg=_colour(i))
        for i, (name, share) in enumerate(zip(experts, means(pieces, len(experts)), strict=True))
    )
    return f"{text}\n{key}"


def table(pieces: Sequence[Shares], experts: Sequence[str]) -> list[list[str]]:
    """Rows (piece, the expert that carried most of it, everybody's share), the whole answer last."""
    rows = [[repr(piece), experts[_strongest(shares)], *_percent(shares)] for piece, shares in pieces]
    overall = means(pieces, len(experts))
    return [*rows, ["(all)", experts[_strongest(overall)], *_percent(overall)]]


def means(pieces: Sequence[Shares], n_experts: int) -> tuple[float, ...]:
    """Each expert's mean share, weighted by the bytes of the pieces; a piece without bytes (the end) counts as one."""
    sizes = [max(1, len(text.encode())) for text, _ in pieces]
    total = max(1, sum(sizes))
    return tuple(
        sum(size * shares[i] for size, (_, shares) in zip(sizes, pieces, strict=True)) / total for i in range(n_experts)
    )


def _strongest(shares: Sequence[float]) -> int:
    return max(range(len(shares)), key=shares.__getitem__)


def _percent(shares: Sequence[float]) -> list[str]:
    return [f"{100 * share:.0f} %" for share in shares]


def _colour(expert: int) -> str:
    return _COLOURS[expert % len(_COLOURS)]
