"""``run --show``: what every step tells about the experts, piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.insight import Insight, mean
from gguf_fusion.records import Piece, Step

TOPICS = ("divergence", "gain", "route", "entropy")


def topics_of(text: str) -> tuple[str, ...]:
    """The topics of ``divergence,gain,route,entropy``. Raises UsageError for another word."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    unknown = [word for word in found if word not in TOPICS]
    if unknown or not found:
        raise UsageError(f"--show: expected some of {','.join(TOPICS)}, got {text!r}")
    return found


class Insights:
    """Groups steps into the pieces of the heaviest expert, with the mean of what their steps tell."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._view = ensemble.piece_view()
        self._names = ensemble.names
        self._waiting: deque[tuple[int, Insight]] = deque()
        self.rows: list[tuple[Piece, dict[str, Any]]] = []

    def push(self, step: Step) -> list[tuple[Piece, dict[str, Any]]]:
        """Pieces that are complete with this step, and what they tell."""
        if step.insight is not None:
            self._waiting.append((len(step.data), step.insight))
        return self._take(self._view.push(step))

    def finish(self) -> list[tuple[Piece, dict[str, Any]]]:
        """The last pieces."""
        return self._take(self._view.finish())

    def _take(self, pieces: Sequence[Piece]) -> list[tuple[Piece, dict[str, Any]]]:
        found = []
        for piece in pieces:
            parts, n = [], 0
            while self._waiting and (n < len(piece.data) or (not piece.data and not self._waiting[0][0])):
                size, insight = self._waiting.popleft()
                parts.append(insight)
                n += size
                if not piece.data:
                    break
            found.append((piece, as_json(mean(parts), self._names)))
        self.rows += found
        return found


def as_json(insight: Insight | None, names: Sequence[str]) -> dict[str, Any]:
    """Plain data; infinite numbers are null."""
    if insight is None:
        return {}
    return {
        "kl": {
            f"{a} || {b}": _finite(insight.kl[i, j])
            for i, a in enumerate(names) for j, b in enumerate(names) if i != j
        },
        "jsd": insight.jsd,
        "entropy": insight.entropy,
        "entropies": dict(zip(names, insight.entropies.tolist(), strict=True)),
        "gain": _finite(insight.gain),
        "agreement": insight.agreement,
        "route": names[insight.route],
        "steps": insight.n,
    }  # fmt: skip


def legend(names: Sequence[str], topics: Sequence[str]) -> str:
    """Which numbers belong to which experts, for the lines below it."""
    parts = [f"experts: {', '.join(names)}; bits"]
    if "divergence" in topics and len(names) > 1:
        pairs = [f"{a + 1}||{b + 1}" for a in range(len(names)) for b in range(len(names)) if a != b]
        parts.append(f"KL {', '.join(pairs)}")
    if "entropy" in topics:
        parts.append("H fused (each expert)")
    return "; ".join(parts)


def line(piece: Piece, told: dict[str, Any], topics: Sequence[str]) -> str:
    """One line for people."""
    if not told:
        return repr(piece.text)
    parts = []
    if "divergence" in topics:
        kl = ", ".join("inf" if bits is None else f"{bits:.2f}" for bits in told["kl"].values())
        parts.append(f"JSD {told['jsd']:.3f}" + (f" (KL {kl})" if kl else ""))
    if "entropy" in topics:
        parts.append(f"H {told['entropy']:.2f} ({', '.join(f'{h:.2f}' for h in told['entropies'].values())})")
    if "gain" in topics:
        parts.append("gain ruled out" if told["gain"] is None else f"gain {told['gain']:+.2f}")
    if "route" in topics:
        parts.append(f"{told['route']}{' (all agree)' if told['agreement'] == 1.0 else ''}")
    return f"{piece.text!r:20} " + "  ".join(parts)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
