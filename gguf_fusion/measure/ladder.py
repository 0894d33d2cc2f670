"""A ladder of quantization levels: every level measured once, and remembered by the hash of its file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_fusion.config import ExpertSpec
from gguf_fusion.errors import GgufFusionError
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.gguf_info import read
from gguf_fusion.hub.digests import model_digest, read_json, write_json
from gguf_fusion.hub.store import cache_dir
from gguf_fusion.load import load_expert
from gguf_fusion.measure import child
from gguf_fusion.measure.making import made
from gguf_fusion.measure.quality import compare, pareto, tokens_of
from gguf_fusion.options import Options

_VERSION = 3

Tell = Callable[[str], None]
Obtain = Callable[[str], Path | None]
"""Gives a file of a level from elsewhere, such as a repository; None where it is to be made here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How levels are measured.

    chunk, chunks : tokens per chunk of text, and how many are read
    n_ctx, n_prompt, n_gen, repetitions : of the speed test;  n_threads : 0 = the usable cores
    requantize : levels may be made from a file that is quantized already
    """

    chunk: int = 512
    chunks: int = 4
    n_ctx: int = 1024
    n_threads: int = 0
    n_prompt: int = 128
    n_gen: int = 32
    repetitions: int = 3
    requantize: bool = False


@dataclass(frozen=True, slots=True)
class Ladder:
    """rows : one plain record per level, sorted by size;  problems : levels that could not be had, and why."""

    rows: list[dict[str, Any]]
    problems: list[str]


def measure(name: str, level: str, file: Path, reference: Path, text: bytes, plan: Plan, tell: Tell) -> dict[str, Any]:
    """One row: size, quality against the reference, speed and memory; from the cache what was measured before.

    Quality comes first: it is what finds a text too short or another vocabulary.
    """
    info = read(file)
    quality = _kept(
        [
            "quality", model_digest(file), model_digest(reference), hashlib.sha256(text).hexdigest(), plan.chunk,
            plan.chunks,
        ],
        lambda: _quality(level, file, reference, text, plan, tell),
    )  # fmt: skip
    numbers = (plan.n_ctx, plan.n_threads, plan.n_prompt, plan.n_gen, plan.repetitions)

    def speed() -> dict[str, Any]:
        tell(f"{level}: speed")
        found: dict[str, Any] = child.call("gguf_fusion.measure.speed", "speed_of", str(file), *numbers)
        return found

    facts = {
        "name": name, "quant": level, "file": str(file), "size_bytes": info.size_bytes, "bpw": info.bpw,
        "n_ctx": plan.n_ctx,
    }  # fmt: skip
    return facts | _kept(["speed", model_digest(file), *numbers], speed) | quality


def _quality(level: str, file: Path, reference: Path, text: bytes, plan: Plan, tell: Tell) -> dict[str, Any]:
    with _loaded(reference, plan) as base, _loaded(file, plan) as other:
        tokens = tokens_of(base, text, plan.chunk, plan.chunks)
        found = compare(base, other, tokens, lambda done, total: tell(f"{level}: chunk {done} of {total}"))
    return found.as_json()


def _loaded(path: Path, plan: Plan) -> LlamaExpert:
    options = Options(n_ctx=max(256, plan.chunk), n_threads=plan.n_threads or None)
    return load_expert(ExpertSpec(name=path.stem, sources=()), path, options, max_rows=min(16, plan.chunk // 2))


def _kept(facts: Sequence[object], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make`` gives, remembered under ``facts``."""
    key = hashlib.sha256(json.dumps([_VERSION, *facts]).encode()).hexdigest()[:32]
    path = cache_dir() / "quants" / "rows" / f"{key}.json"
    known = read_json(path)
    if known is None:
        known = make()
        write_json(path, known)
    return known


def ladder(
    name: str, reference: Path, levels: Sequence[str], text: bytes, plan: Plan, tell: Tell,
    obtain: Obtain = lambda level: None, others: Sequence[Path] = (),
) -> Ladder:  # fmt: skip
    """Measure the reference (against itself: the noise floor), ``others`` and all levels.

    A level that cannot be had does not end the others. Raises UsageError for a text shorter than one chunk.
    """
    label = read(reference).quant
    rows = [_row(measure(name, label, reference, reference, text, plan, tell), is_reference=True)]
    problems: list[str] = []
    rows += [
        _row(measure(name, read(file).quant, file, reference, text, plan, tell)) for file in others
    ]  # fmt: skip
    have = {row["quant"] for row in rows}
    for level in levels:
        if level in have:
            continue
        try:
            obtained, twice = obtain(level), False
            if obtained is None:
                obtained, twice = made(
                    reference, level, requantize=plan.requantize, n_threads=plan.n_threads, tell=tell
                )  # fmt: skip
            row = measure(name, level, obtained, reference, text, plan, tell)
        except GgufFusionError as error:
            problems.append(f"{level}: {error}")
            continue
        rows.append(_row(row, requantized=twice))
    rows.sort(key=lambda row: (row["size_bytes"], row["quant"]))
    front = pareto(rows)
    return Ladder([{**row, "pareto": best} for row, best in zip(rows, front, strict=True)], problems)


def _row(measured: dict[str, Any], *, is_reference: bool = False, requantized: bool = False) -> dict[str, Any]:
    return {**measured, "is_reference": is_reference, "requantized": requantized}


def recommend(rows: Sequence[Mapping[str, Any]], fit: int | None, min_tg: float | None) -> str:
    """One line: the level nearest to the reference within the memory and at the speed asked for."""
    limits = [
        *([f"within {fit / 1e9:.2f} GB"] if fit is not None else []),
        *([f"at {min_tg:g} tokens/s or more"] if min_tg is not None else []),
    ]
    within = [
        row for row in rows if (fit is None or row["peak_bytes"] <= fit) and (min_tg is None or row["tg_ts"] >= min_tg)
    ]
    asked = f" {' and '.join(limits)}" if limits else ""
    if not within:
        least = min(rows, key=lambda row: row["peak_bytes"])
        quickest = max(rows, key=lambda row: row["tg_ts"])
        return (
            f"no level runs{asked}: the smallest, {least['quant']}, takes {least['peak_bytes'] / 1e9:.2f} GB, and the "
            f"fastest, {quickest['quant']}, writes {quickest['tg_ts']:.1f} tokens/s"
        )
    best = min(within, key=lambda row: (_distance(row), row["size_bytes"]))
    if not limits:
        # Without a limit the reference always wins; the smallest level close to it is the better advice.
        close = [row for row in within if _distance(row) <= CLOSE]
        best = min(close or within, key=lambda row: row["size_bytes"])
    return (
        f"{best['quant']}{asked}: {best['size_bytes'] / 1e6:.0f} MB in a file, {best['peak_bytes'] / 1e6:.0f} MB in "
        f"memory with a context of {best['n_ctx']}, {best['tg_ts']:.1f} tokens/s, KL divergence "
        f"{_distance(best):.4f} from the reference"
    )


def _distance(row: Mapping[str, Any]) -> float:
    """Mean KL divergence; infinite where no row of the model was finite."""
    return float("inf") if row["kld_mean"] is None else float(row["kld_mean"])


CLOSE = 0.02
"""Mean KL divergence (nats) up to which a level is called close: about that of Q5 and Q6 levels made from F16."""
