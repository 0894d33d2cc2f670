"""Pictures: the front of a search (bits per byte against decodes and size), and what a router was compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gguf_fusion.discover.candidates import Scored
from gguf_fusion.discover.routing import Compared
from gguf_fusion.discover.search import Found
from gguf_fusion.pictures import panels, write

_MARKERS = {1: "o", 2: "s", 3: "^"}


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
                [getattr(one, key) for one in members], [one.fit_bpb for one in members], s=40, color=f"C{tier - 1}",
                marker=_MARKERS[tier], label=f"front, tier {tier}",
            )  # fmt: skip
        winner = next(one for one in found.front if one.expression == found.winner)
        axes.scatter(
            [getattr(winner, key)], [winner.fit_bpb], s=160, facecolors="none", edgecolors="black", label="winner"
        )
        axes.set_xlabel(label)
        axes.locator_params(axis="x", nbins=6)
    both[0].set_ylabel("bits per byte, fit documents")
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(labels), loc="outside upper center")
    write(figure, path)


def draw_compared(compared: Sequence[Compared], path: Path) -> None:
    """Write a PNG: the gain over the best single expert of every way to combine, with 95 % intervals; better is up."""
    known = [(one.name, one.gain) for one in compared if one.gain is not None]
    known.sort(key=lambda pair: pair[1].relative)
    figure, (axes,) = panels(1, width=8.0, height=1.2 + 0.3 * len(known))
    for row, (name, gain) in enumerate(known):
        color = "C0" if name.startswith("fusionroute") else "0.45"
        low, high = 100 * gain.relative_low, 100 * gain.relative_high
        axes.plot([low, high], [row, row], color=color, linewidth=2)
        axes.plot([100 * gain.relative], [row], "o", color=color)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(known)), [name for name, _ in known])
    axes.set_xlabel("gain over the best single expert, %, with 95 % interval")
    write(figure, path)
