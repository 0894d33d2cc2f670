"""Reports: scores as one JSON object and as table rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64, Bool
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
        "comparison": comparison(scores, best, chosen_here=not dev),
        "domains": {
            domain: comparison([s for s in scores if s.domain == domain], best, chosen_here=not dev)
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
        "larger": {name: _expert_json(expert) for name, expert in score.larger.items()},
        "fused": {name: _fused_json(fused, score.word_first) for name, fused in score.fused.items()},
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


def _fused_json(fused: FusedScore, word_first: Bool) -> dict[str, Any]:
    known = statistics.calibration(fused.confidence, fused.correct, fused.brier)
    first = statistics.calibration(fused.confidence[word_first], fused.correct[word_first], fused.brier[word_first])
    return {
        "bpb": finite(fused.bits_per_byte),
        "zero_hits": fused.zero_hits,
        "empty_pools": fused.empty_pools,
        **{key: finite(value) for key, value in asdict(known).items()},
        "word_first": {key: finite(value) for key, value in asdict(first).items()},
    }


def best_on(scores: Sequence[DocumentScore]) -> str | None:
    """The expert that needs the fewest bits (own tokens) over these documents; None if no byte was scored."""
    overall = total(scores)
    return overall.best_single() if overall.n_bytes else None


def document_oracle(scores: Sequence[DocumentScore]) -> float:
    """Bits per byte if the best expert of every document were known beforehand: a bound and no result."""
    bits = sum(min(e.own_bits for e in s.experts.values()) for s in scores)
    return ratio(bits, sum(s.n_bytes for s in scores))


def comparison(
    scores: Sequence[DocumentScore], best: str | None = None, *, chosen_here: bool = False
) -> dict[str, Any]:
    """Every strategy against one expert, document by document: with its own tokens, and through its bridge.

    Own tokens against a fused law also measure the bridge: one expert "gains" over itself. ``against_bridge`` leaves
    fusion alone; ``larger`` holds the same for single models that are no members, with their own tokens. Without
    ``best``, or where it was ``chosen_here``, on these same documents, there are no p-values against it: the choice
    favours it. Holm's correction is over the strategies, apart for each of these baselines. Documents without a scored
    byte are left out.
    """
    usable = [score for score in scores if score.n_bytes]
    if not usable:
        return {}
    named = len(usable[0].experts) == 1 or not (best is None or chosen_here)
    best = best or total(usable).best_single()
    singles = np.array([[score.experts[name].own_bits for score in usable] for name in usable[0].experts])
    through_bridge = np.array([score.experts[best].bridge[0].bits for score in usable])
    n_bytes = np.array([score.n_bytes for score in usable], np.float64)
    ours = {name: np.array([score.fused[name].bits for score in usable]) for name in usable[0].fused}
    ours = {name: bits for name, bits in ours.items() if np.isfinite(bits).all()}
    domains = [score.domain for score in usable]

    def against(theirs: F64, *, tested: bool = True) -> dict[str, dict[str, Any]]:
        return _against(ours, theirs, n_bytes, domains, tested=tested) if np.isfinite(theirs).all() else {}

    own = against(np.array([score.experts[best].own_bits for score in usable]), tested=named)
    bridge = against(through_bridge, tested=named)
    larger = {name: against(np.array([score.larger[name].own_bits for score in usable])) for name in usable[0].larger}
    return {
        name: {
            "best_single": best,
            **entry,
            "regret_bpb": finite(float(statistics.regret(ours[name], singles).sum() / n_bytes.sum())),
            "relative_to_bridge": bridge.get(name, {}).get("relative"),
            "against_bridge": bridge.get(name),
            "larger": {model: found[name] for model, found in larger.items()},
        }
        for name, entry in own.items()
    }


def _against(
    ours: Mapping[str, F64], theirs: F64, n_bytes: F64, domains: Sequence[str], *, tested: bool
) -> dict[str, dict[str, Any]]:
    """Gains with intervals, wins and, where ``tested``, p-values of strategies against one baseline."""
    found: dict[str, dict[str, Any]] = {}
    for name, bits in ours.items():
        won, tied = statistics.win_rate(bits, theirs)
        gain = statistics.bootstrap_gain(bits, theirs, n_bytes, domains)
        found[name] = {
            **{key: finite(value) for key, value in asdict(gain).items()},
            "win_rate": won,
            "ties": tied,
            "p_value": statistics.sign_flip(bits, theirs) if tested else None,
            "p_holm": None,
        }
    if tested:
        for entry, p in zip(found.values(), statistics.holm([e["p_value"] for e in found.values()]), strict=True):
            entry["p_holm"] = p
    return found


def finite(value: float) -> float | None:
    """The number, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


EXPERT_HEADER: Row = ("EXPERT", "OWN", "BRIDGE", "COST", "DECODES/TOKEN", "GHOSTS", "RE-ANCHORS")


def fused_header(score: DocumentScore) -> Row:
    """Headings of ``fused_rows``."""
    return (
        *("STRATEGY", "BITS/BYTE", "AGAINST BEST", "95 % INTERVAL", "P"),
        *("AGAINST ITS BRIDGE", "95 % INTERVAL", "P", "WINS"),
        *(part for name in score.larger for part in (f"AGAINST {name}", "95 % INTERVAL")),
    )  # fmt: skip


def expert_rows(score: DocumentScore) -> list[Row]:
    """One row per expert and epsilon: bits per byte with own tokens and through the bridge, and what that takes."""
    rows: list[Row] = []
    larger = {f"{name} (no member)": expert for name, expert in score.larger.items()}
    for name, expert in {**score.experts, **larger}.items():
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
    """One row per strategy, fewer bits being negative; ``compared`` is what ``comparison`` found (may be empty).

    p-values are Holm's.
    """
    rows: list[Row] = []
    for name, fused in score.fused.items():
        entry = compared.get(name) or {}
        bridge = entry.get("against_bridge") or {}
        best = score.experts[entry.get("best_single") or score.best_single()]
        against = [entry.get("larger", {}).get(model) or {} for model in score.larger]
        rows.append(
            (
                name,
                _number(fused.bits_per_byte),
                percent(fused.bits / best.own_bits - 1.0 if best.own_bits else math.nan),
                _interval(entry),
                _p(entry),
                _change(bridge),
                _interval(bridge),
                _p(bridge),
                "" if "win_rate" not in entry else percent(entry["win_rate"], sign=False),
                *(cell for found in against for cell in (_change(found), _interval(found))),
            )
        )
    return rows


def _change(entry: Mapping[str, Any]) -> str:
    return "" if entry.get("relative") is None else percent(-entry["relative"])


def _interval(entry: Mapping[str, Any]) -> str:
    low, high = entry.get("relative_low"), entry.get("relative_high")
    return "" if low is None or high is None else f"{percent(-high)} … {percent(-low)}"


def _p(entry: Mapping[str, Any]) -> str:
    return "" if entry.get("p_holm") is None else f"{entry['p_holm']:.2g}"


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def percent(value: float, *, sign: bool = True) -> str:
    """A share as a percentage."""
    return f"{100.0 * value:{'+' if sign else ''}.1f} %" if math.isfinite(value) else "–"
