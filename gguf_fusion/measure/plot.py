"""Pictures of a ladder: quality against size and against speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf_fusion.pictures import panels, write


def draw_ladder(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG: KL divergence of every level against its size and its speed; the Pareto front is filled."""
    figure, both = panels(2, sharey=True)
    pairs = (("size_bytes", 1e6, "size of the file, MB"), ("tg_ts", 1.0, "tokens per second, one at a time"))
    for axes, (key, unit, label) in zip(both, pairs, strict=True):
        for row in rows:
            if row["kld_mean"] is None:
                continue
            kld = max(row["kld_mean"], 1e-6)
            axes.scatter([row[key] / unit], [kld], s=45, facecolors="C0" if row["pareto"] else "none", edgecolors="C0")
            axes.annotate(str(row["quant"]), (row[key] / unit, kld), (5, 4), textcoords="offset points", fontsize=8)
        axes.set_yscale("log")
        axes.set_xlabel(label)
    both[0].set_ylabel("mean KL divergence from the reference, nats")
    figure.suptitle("filled: no other level is both smaller and closer to the reference", fontsize=9)
    write(figure, path)
