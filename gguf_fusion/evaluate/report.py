"""Reports: scores as one JSON object and as table rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from gguf_fusion.evaluate import statistics
from gguf_fusion.evaluate.score import BridgeScore, DocumentScore, ExpertScore, FusedScore, ratio, total

Row = tuple[str, ...]


def as_json(
    scores: Sequence[DocumentScore], *, dev: Sequence[DocumentScore] = (), per_document: bool = False
) -> dict[str, Any]:
    """One object; numbers that do not exist (nothing was scored, or a probability was 0) are null.

    All numbers are those of ``scores``; ``dev`` are other documents, on which the best single expert is chosen.
    """
    overall = total(scores)
    best = best_on(dev or scores)
    report = {
        **score_json(overall),
        "best_single": best,
        "chosen_on": "dev" if dev else "the scored documents",
        "document_oracle_bpb": finite(document_oracle(scores)),
        "comparison": comparison(scores, best),
        "domains": {
            domain: comparison([s for s in scores if s.domain == domain], best)
            for domain in dict.fromkeys(s.domain for s in scores)
        },
    }
    if per_document:
        report["documents"] = [{"name": score.name, "domain": score.domain, **score_json(score)} for score in scores]
    return report


def score_json(score: DocumentScore) -> dict[str, Any]:
    """The numbers of one document, or of a total."""
    return {
        "bytes": score.n_bytes,
        "total_bytes": score.total_bytes,
        "windows": score.n_windows,
        "experts": {name: _expert_json(expert) for name, expert in score.experts.items()},
        "fused": {name: _fused_json(fused) for name, fused in score.fused.items()},
        "oracle_bpb": finite(score.oracle_bits / score.n_bytes) if score.n_bytes else None,
        "floor_hits": score.floor_hits,
        "seconds": round(score.seconds, 3),
    }


def _expert_json(expert: ExpertScore) -> dict[str, Any]:
    first = expert.bridge[0]
    return {
        "bpb_own": finite(expert.bits_per_byte),
        "bpb_bridge": finite(first.bits_per_byte),
        "decodes_per_token": finite(first.decodes_per_token),
        "ghost_share": finite(first.ghost_share),
        "reanchors": first.n_reanchors,
        "tokens": expert.n_tokens,
        "own_bytes": expert.n_bytes,
        "decodes_per_token_joint": finite(expert.joint_decodes / expert.n_tokens) if expert.n_tokens else None,
        "ghost_share_joint": finite(expert.joint_share_sum / expert.n_bytes) if expert.n_bytes else None,
        "bridge": [_bridge_json(bridge) for bridge in expert.bridge],
    }


def _bridge_json(bridge: BridgeScore) -> dict[str, Any]:
    return {
        "epsilon": bridge.epsilon,
        "bpb": finite(bridge.bits_per_byte),
        "decodes_per_token": finite(bridge.decodes_per_token),
        "ghost_share": finite(bridge.ghost_share),
        "reanchors": bridge.n_reanchors,
        "floor_hits": bridge.floor_hits,
    }


def _fused_json(fused: FusedScore) -> dict[str, Any]:
    known = statistics.calibration(fused.confidence, fused.correct, fused.brier_sum)
    return {
        "bpb": finite(fused.bits_per_byte),
        "zero_hits": fused.zero_hits,
        "empty_pools": fused.empty_pools,
        **{key: finite(value) for key, value in asdict(known).items()},
    }


def best_on(scores: Sequence[DocumentScore]) -> str | None:
    """The expert that needs the fewest bits (own tokens) over these documents; None if no byte was scored."""
    overall = total(scores)
    return overall.best_single() if overall.n_bytes else None


def document_oracle(scores: Sequence[DocumentScore]) -> float:
    """Bits per byte if the best expert of every document were known beforehand: a bound and no result."""
    bits = sum(min(e.own_bits for e in s.experts.values()) for s in scores)
    return ratio(bits, sum(s.n_bytes for s in scores))


def comparison(scores: Sequence[DocumentScore], best: str | None = None) -> dict[str, Any]:
    """Every strategy against one expert with its own tokens, document by document.

    Without ``best`` the expert is chosen on these same documents, which favours it; documents without a scored byte
    are left out.
    """
    usable = [score for score in scores if score.n_bytes]
    if not usable:
        return {}
    best = best or total(usable).best_single()
    singles = np.array([[score.experts[name].own_bits for score in usable] for name in usable[0].experts])
    theirs = np.array([score.experts[best].own_bits for score in usable])
    n_bytes = np.array([score.n_bytes for score in usable], np.float64)
    domains = [score.domain for score in usable]
    # Own tokens against a fused law also measure the bridge: one expert "gains" over itself. This leaves fusion alone.
    through_bridge = sum(score.experts[best].bridge[0].bits for score in usable)
    found: dict[str, Any] = {}
    for name in usable[0].fused:
        ours = np.array([score.fused[name].bits for score in usable])
        if not np.isfinite(ours).all():
            continue
        won, tied = statistics.win_rate(ours, theirs)
        gain = statistics.bootstrap_gain(ours, theirs, n_bytes, domains)
        found[name] = {
            "best_single": best,
            **{key: finite(value) for key, value in asdict(gain).items()},
            "relative_to_bridge": finite(1.0 - float(ours.sum()) / through_bridge) if through_bridge else None,
            "win_rate": won,
            "ties": tied,
            "regret_bpb": finite(float(statistics.regret(ours, singles).sum() / n_bytes.sum())),
            "p_value": statistics.sign_flip(ours, theirs),
        }
    for name, p in zip(found, statistics.holm([entry["p_value"] for entry in found.values()]), strict=True):
        found[name]["p_holm"] = p
    return found


def finite(value: float) -> float | None:
    """The number, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


EXPERT_HEADER: Row = ("EXPERT", "OWN", "BRIDGE", "COST", "DECODES/TOKEN", "GHOSTS", "RE-ANCHORS")
FUSED_HEADER: Row = ("STRATEGY", "BITS/BYTE", "AGAINST BEST", "95 % INTERVAL", "AGAINST ITS BRIDGE", "WINS")


def expert_rows(score: DocumentScore) -> list[Row]:
    """One row per expert and epsilon: bits per byte with own tokens and through the bridge, and what that takes."""
    rows: list[Row] = []
    for name, expert in score.experts.items():
        for bridge in expert.bridge:
            label = name if len(expert.bridge) == 1 else f"{name} (ε {bridge.epsilon:g})"
            rows.append(
                (
                    label,
                    _number(expert.bits_per_byte),
                    _number(bridge.bits_per_byte),
                    percent(bridge.bits / expert.own_bits - 1.0 if expert.own_bits else math.nan),
                    _number(bridge.decodes_per_token, 2),
                    percent(bridge.ghost_share, sign=False),
                    str(bridge.n_reanchors),
                )
            )
    return rows


def fused_rows(score: DocumentScore, compared: Mapping[str, Any]) -> list[Row]:
    """One row per strategy; ``compared`` is what ``comparison`` found (may be empty)."""
    rows: list[Row] = []
    for name, fused in score.fused.items():
        entry = compared.get(name, {})
        best = score.experts[entry.get("best_single") or score.best_single()]
        low, high = entry.get("relative_low"), entry.get("relative_high")
        rows.append(
            (
                name,
                _number(fused.bits_per_byte),
                percent(fused.bits / best.own_bits - 1.0 if best.own_bits else math.nan),
                "" if low is None or high is None else f"{percent(-high)} … {percent(-low)}",
                "" if entry.get("relative_to_bridge") is None else percent(-entry["relative_to_bridge"]),
                "" if "win_rate" not in entry else percent(entry["win_rate"], sign=False),
            )
        )
    return rows


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def percent(value: float, *, sign: bool = True) -> str:
    """A share as a percentage."""
    return f"{100.0 * value:{'+' if sign else ''}.1f} %" if math.isfinite(value) else "–"
