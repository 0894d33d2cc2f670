"""A ladder of quantization levels: every level obtained, measured once, and remembered by the hash of its file."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_fusion.errors import GgufFusionError, LoadError, NoSpaceError, UsageError
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.native_quantize import FILE_TYPES, quantize
from gguf_fusion.gguf_info import read
from gguf_fusion.hub.digests import model_digest
from gguf_fusion.hub.store import MARGIN_BYTES, cache_dir
from gguf_fusion.measure.quality import Tokens, compare, tokens_of

FULL = ("F32", "F16", "BF16")
"""Levels that are no quantization."""

_VERSION = 2

_SPEED = """
import json, sys
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.gguf_info import read
from gguf_fusion.measure.speed import Case, expert_rows
path, n_ctx, threads, n_prompt, n_gen, repetitions = sys.argv[1], *map(int, sys.argv[2:7])
case = Case(n_prompt=n_prompt, n_gen=n_gen, n_threads=threads, n_ctx=n_ctx, type_k="f16", type_v="f16", n_gpu_layers=0)
with LlamaExpert.load(path, n_ctx=n_ctx, n_threads=threads) as expert:
    rows = list(expert_rows(expert, read(path), case, repetitions, lambda text: None, "CPU"))
print(json.dumps([[row.avg_ts, row.stddev_ts, row.peak_rss_bytes] for row in rows]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How levels are measured. chunks, chunk : text that is read;  n_ctx : context of the speed test."""

    chunk: int = 512
    chunks: int = 4
    n_ctx: int = 1024
    n_threads: int = 0
    n_prompt: int = 128
    n_gen: int = 32
    repetitions: int = 3
    requantize: bool = False


def check_levels(levels: Sequence[str]) -> list[str]:
    """Levels in capitals; raises UsageError naming the nearest for one that does not exist."""
    from gguf_fusion.config import nearest

    found = [level.strip().upper() for level in levels if level.strip()]
    for level in found:
        if level not in FILE_TYPES:
            raise UsageError(f"unknown level {level!r}{nearest(level, FILE_TYPES)}; known: {', '.join(FILE_TYPES)}")
    return list(dict.fromkeys(found))


def made(reference: Path, level: str, plan: Plan, tell: Callable[[str], None]) -> tuple[Path, bool]:
    """(file of a level made from ``reference``, whether it was quantized twice).

    Raises UsageError where that would be needed and was not asked for, NoSpaceError, LoadError for what the native
    library cannot write.
    """
    info = read(reference)
    if info.quant == level:
        return reference, False
    twice = info.quant not in FULL
    if twice and not plan.requantize:
        raise UsageError(
            f"{reference.name} is quantized already ({info.quant}): levels made from it are worse than from F16; "
            f"give an unquantized file (--reference), or accept that (--requantize)"
        )
    target = cache_dir() / "quants" / model_digest(reference)[:16] / f"{reference.stem}-{level}.gguf"
    if target.is_file():
        return target, twice
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    need = int(info.n_params * 1.2 * (4 if level == "F32" else 2 if level in FULL else 1.1))
    if need + MARGIN_BYTES > free:
        raise NoSpaceError(str(target.parent), need + MARGIN_BYTES, free)
    tell(f"{level}: quantizing {reference.name}")
    partial = target.with_name(target.name + ".partial")
    quantize(reference, partial, level, n_threads=plan.n_threads, requantize=twice)
    partial.replace(target)
    return target, twice


def measure(
    name: str, level: str, file: Path, reference: Path, text: bytes, plan: Plan, tell: Callable[[str], None]
) -> dict[str, Any]:
    """One row: size, speed, memory, and quality against the reference; from the cache where it was measured before."""
    key = _key(file, reference, text, plan)
    path = cache_dir() / "quants" / "rows" / f"{key}.json"
    known = _known(path)
    if known is not None:
        return {**known, "quant": level}
    info = read(file)
    tell(f"{level}: speed")
    speed = _speed(file, plan)
    row: dict[str, Any] = {
        "name": name, "quant": level, "file": str(file), "size_bytes": info.size_bytes, "bpw": info.bpw,
        "pp_ts": speed[0][0], "pp_sd": speed[0][1], "tg_ts": speed[1][0], "tg_sd": speed[1][1],
        "peak_bytes": max(part[2] for part in speed), "n_ctx": plan.n_ctx,
    }  # fmt: skip
    with _loaded(reference, plan) as base, _loaded(file, plan) as other:
        tokens: Tokens = tokens_of(base, text, plan.chunk, plan.chunks)
        quality = compare(base, other, tokens, lambda done, total: tell(f"{level}: chunk {done} of {total}"))
    row |= quality.as_json()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(row), encoding="utf-8")
    partial.replace(path)
    return row


def _loaded(path: Path, plan: Plan) -> LlamaExpert:
    return LlamaExpert.load(
        path, n_ctx=max(256, plan.chunk), n_threads=plan.n_threads or None, max_rows=min(16, plan.chunk // 2)
    )


def _speed(file: Path, plan: Plan) -> list[list[float]]:
    """Measured in a process of its own, so that memory is that of one model alone."""
    numbers = (plan.n_ctx, plan.n_threads, plan.n_prompt, plan.n_gen, plan.repetitions)
    command = [sys.executable, "-c", _SPEED, str(file), *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise LoadError(f"{file.name}: its speed could not be measured: {said}")
    rows: list[list[float]] = json.loads(lines[-1])
    return rows


def _key(file: Path, reference: Path, text: bytes, plan: Plan) -> str:
    facts = [
        _VERSION, model_digest(file), model_digest(reference), hashlib.sha256(text).hexdigest(), plan.chunk,
        plan.chunks, plan.n_ctx, plan.n_threads, plan.n_prompt, plan.n_gen, plan.repetitions,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _known(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def ladder(
    name: str, reference: Path, levels: Sequence[str], text: bytes, plan: Plan, tell: Callable[[str], None],
    obtain: Callable[[str], Path | None] = lambda level: None,
) -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """(rows sorted by size, what could not be measured and why). The reference itself is the first to be measured.

    ``obtain``: a file of a level from elsewhere, such as a repository; None where it is to be made here. A level that
    cannot be had does not end the others.
    """
    label = read(reference).quant
    rows = [
        {**measure(name, label, reference, reference, text, plan, tell), "is_reference": True, "requantized": False}
    ]
    problems: list[str] = []
    for level in levels:
        if level == label:
            continue
        try:
            found = obtain(level)
            file, twice = (found, False) if found is not None else made(reference, level, plan, tell)
            row = measure(name, level, file, reference, text, plan, tell)
        except UsageError:
            raise
        except GgufFusionError as error:
            problems.append(f"{level}: {error}")
            continue
        rows.append({**row, "is_reference": False, "requantized": twice})
    return sorted(rows, key=lambda row: (row["size_bytes"], row["quant"])), problems


def recommend(rows: Sequence[Mapping[str, Any]], fit: int | None, min_tg: float | None) -> str:
    """One line: the level nearest to the reference within the memory and at the speed asked for."""
    limits = [
        *([f"{fit / 1e9:.1f} GB"] if fit is not None else []),
        *([f"{min_tg:g} tokens/s"] if min_tg is not None else []),
    ]
    within = [
        row for row in rows if (fit is None or row["peak_bytes"] <= fit) and (min_tg is None or row["tg_ts"] >= min_tg)
    ]
    asked = f" within {' and at '.join(limits)}" if limits else ""
    if not within:
        least = min(rows, key=lambda row: row["peak_bytes"])
        return f"no level fits{asked}; the smallest, {least['quant']}, takes {least['peak_bytes'] / 1e9:.2f} GB"
    best = min(within, key=lambda row: (row.get("kld_mean", 0.0), row["size_bytes"]))
    if not limits:
        # Without a limit the reference always wins; the smallest level close to it is the better advice.
        close = [row for row in within if row.get("kld_mean", 0.0) <= _CLOSE]
        best = min(close, key=lambda row: row["size_bytes"]) if close else best
    return (
        f"{best['quant']}{asked}: {best['size_bytes'] / 1e6:.0f} MB, {best['tg_ts']:.1f} tokens/s, "
        f"KL divergence {best.get('kld_mean', 0.0):.4f} from the reference"
    )


_CLOSE = 0.02
"""Mean KL divergence (nats) up to which a level is called close: about that of Q5 and Q6 levels."""
