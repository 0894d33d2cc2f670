"""Pictures of scores: gain by domain, weights over a text, reliability. Each function writes one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.evaluate import statistics
from gguf_fusion.evaluate.score import DocumentScore
from gguf_fusion.pictures import panels, write

_MOST = 6
"""Strategies in one picture: more cannot be told apart."""

_MOST_TEXTS = 6

_SMOOTH = 25
"""Bytes that a point of a weight curve is the mean of."""


def draw_all(
    scores: Sequence[DocumentScore], overall: DocumentScore, compared: Mapping[str, Mapping[str, Any]], folder: Path
) -> list[Path]:
    """Write all pictures; returns their paths.

    scores, overall : documents and their total;  compared : domain (and "all") -> ``report.comparison``
    """
    paths = [folder / name for name in ("gain.png", "weights.png", "reliability.png")]
    draw_gain(compared, paths[0])
    draw_weights(scores, next(iter(overall.fused)), paths[1])
    draw_reliability(overall, paths[2])
    return paths


def draw_gain(compared: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Gain over the best single expert, its own tokens on the left and its bridge on the right, 95 % intervals."""
    domains = [name for name, entries in compared.items() if entries]
    strategies = list(dict.fromkeys(name for domain in domains for name in compared[domain]))[:_MOST]
    height = 1.6 + len(domains) * (0.25 + 0.13 * len(strategies)) + 0.25 * len(strategies)
    figure, both = panels(2, width=5.4, height=height, sharex=True, sharey=True)
    titles = ("over the best single expert, own tokens", "over that expert through its bridge")
    for axes, title, key in zip(both, titles, (None, "against_bridge"), strict=True):
        axes.axvline(0.0, color="0.3", linewidth=1.0)
        for rank, name in enumerate(strategies):
            shift = 0.12 * (rank - (len(strategies) - 1) / 2)
            for row, domain in enumerate(domains):
                entry = compared[domain].get(name) or {}
                entry = entry if key is None else entry.get(key) or {}
                if entry.get("relative") is None:
                    continue
                at, low, high = (100.0 * (entry[k] if entry[k] is not None else entry["relative"])
                                 for k in ("relative", "relative_low", "relative_high"))  # fmt: skip
                label = _short(name) if row == 0 else None
                axes.errorbar(
                    [at], [row + shift], xerr=[[at - low], [high - at]], fmt="o", markersize=5, capsize=3,
                    color=f"C{rank}", label=label,
                )  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("fewer bits, %  (right of the line: fusion helps)")
    both[0].set_yticks(range(len(domains)), domains)
    both[0].set_ylim(len(domains) - 0.5, -0.5)
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=9)
    figure.suptitle("gain in bits per byte, with 95 % bootstrap intervals over documents", fontsize=10)
    write(figure, path)


def draw_weights(scores: Sequence[DocumentScore], strategy: str, path: Path) -> None:
    """How much each expert counted along a text: the longest document of every domain, means over a few bytes."""
    longest: dict[str, DocumentScore] = {}
    for score in scores:
        if score.n_bytes > (longest[score.domain].n_bytes if score.domain in longest else 0):
            longest[score.domain] = score
    shown = list(longest.values())[:_MOST_TEXTS]
    figure, every = panels(len(shown), width=4.4, height=2.8, sharey=True)
    for axes, score in zip(every, shown, strict=True):
        weights = _smooth(score.fused[strategy].weights.astype(np.float64))
        axes.stackplot(np.arange(len(weights)), 100.0 * weights.T, labels=list(score.experts), alpha=0.85)
        axes.set_title(
            f"{score.domain}: {Path(score.name).name}" if score.domain else Path(score.name).name, fontsize=9
        )
        axes.set_xlim(0, max(1, len(weights) - 1))
        axes.set_ylim(0, 100)
        axes.set_xlabel("scored bytes")
    every[0].set_ylabel("weight, %")
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle(f"weights of {_short(strategy)}", fontsize=10)
    write(figure, path)


def draw_reliability(overall: DocumentScore, path: Path) -> None:
    """How often the first choice came, against its probability: of all bytes, and of those that begin a word."""
    figure, both = panels(2, width=5.0, height=5.2, sharex=True, sharey=True)
    parts = (("all bytes", np.ones(overall.n_bytes, np.bool_)), ("bytes that begin a word", overall.word_first))
    for axes, (title, kept) in zip(both, parts, strict=True):
        axes.plot([0, 1], [0, 1], color="0.3", linewidth=1.0)
        axes.text(0.98, 0.02, "below the line: surer than right", ha="right", va="bottom", fontsize=8, color="0.3")
        for rank, (name, fused) in enumerate(list(overall.fused.items())[:_MOST]):
            if not kept.any():
                continue
            sure, right, sizes = statistics.reliability(fused.confidence[kept], fused.correct[kept])
            ece = float((sizes * np.abs(right - sure)).sum() / sizes.sum())
            axes.plot(sure, right, "o-", color=f"C{rank}", markersize=4, label=f"{_short(name)}: off by {ece:.3f}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("probability of the first choice")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.legend(frameon=False, fontsize=7, loc="upper left")
    both[0].set_ylabel("share in which it came")
    figure.suptitle("reliability: 15 bins of equal mass; on the line a law is right as often as it says", fontsize=10)
    write(figure, path)


def _short(strategy: str) -> str:
    """A long formula is cut: the tables have it in full."""
    return strategy if len(strategy) <= 48 else f"{strategy[:45]}…"


def _smooth(weights: F64) -> F64:
    """Running means of float64[n_bytes, n_experts] along the text."""
    width = min(_SMOOTH, len(weights))
    sums = np.cumsum(np.vstack([np.zeros((1, weights.shape[1])), weights]), axis=0)
    smoothed: F64 = (sums[width:] - sums[:-width]) / width
    return smoothed
