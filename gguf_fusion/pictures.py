"""What all pictures have in common: panels side by side, light grids, PNG files. Needs the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def panels(n: int, *, width: float = 5.0, height: float = 4.2, across: int = 3, **shared: Any) -> tuple[Any, list[Any]]:
    """(figure, n axes) in rows of ``across``; sizes in inches; ``shared``: sharex and sharey."""
    from matplotlib.figure import Figure

    columns = min(n, across)
    rows = -(-n // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False, **shared).ravel().tolist()
    for axes in every:
        axes.set_axisbelow(True)
        axes.grid(visible=True, color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in every[n:]:
        axes.set_visible(False)
    return figure, every[:n]


def write(figure: Any, path: Path) -> None:
    """Write a PNG, with its folder where that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
