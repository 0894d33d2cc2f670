"""A picture of the front: bits per byte against decodes and against size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gguf_fusion.discover.candidates import Scored
from gguf_fusion.discover.search import Found
from gguf_fusion.pictures import panels, write


def draw_front(found: Found, scored: Sequence[Scored], path: Path) -> None:
    """Write a PNG: all candidates in grey, the front in colour by tier, the winner ringed."""
    figure, both = panels(2, sharey=True)
    for axes, key, label in zip(
        both,
        ("nodes", "decodes"),
        ("nodes of the formula", "decodes per byte"),
        strict=True,
    ):
        best = min(one.fit_bpb for one in found.front)
        near = [one for one in scored if one.bpb < best * 1.15]
        axes.scatter([getattr(one, key) for one in near], [one.bpb for one in near], s=12, color="0.8", label="tried")
        for tier in (1, 2, 3):
            members = [one for one in found.front if one.tier == tier]
            axes.scatter(
                [getattr(one, key) for one in members], [one.fit_bpb for one in members], s=36, color=f"C{tier - 1}",
                label=f"front, tier {tier}",
            )  # fmt: skip
        winner = next(one for one in found.front if one.expression == found.winner)
        axes.scatter(
            [getattr(winner, key)], [winner.fit_bpb], s=160, facecolors="none", edgecolors="black", label="winner"
        )
        axes.set_xlabel(label)
    both[0].set_ylabel("bits per byte, fit documents")
    both[1].legend(frameon=False)
    write(figure, path)
