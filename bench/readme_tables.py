"""Fill the measured tables and the help texts of README.md, or check that they are up to date.

    python bench/readme_tables.py            write them
    python bench/readme_tables.py --check    say what is out of date, status 1 then

A block stands between ``<!-- table:NAME -->`` or ``<!-- help:COMMAND -->`` and ``<!-- end -->``. Table NAME is made of
bench/results/NAME.jsonl: one line of text per JSON object, by the description in ``TABLES``, or of all its plain
values where there is none. A table that was not measured yet says so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- (table|help):([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PROVENANCE = ("version", "llama_cpp_python", "commit", "date", "machine", "cpu", "cores")
"""Keys that say where a record comes from; they are told under the table."""

Record = Mapping[str, Any]


def percent(value: float) -> str:
    """A share with its sign."""
    return f"{100 * value:+.1f} %"


def megabytes(value: float) -> str:
    """Bytes in millions."""
    return f"{value / 1e6:.0f}"


def number(value: object) -> str:
    """Three digits for fractions, everything else as it is."""
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "/")


@dataclass(frozen=True, kw_only=True)
class Table:
    """How records become lines.

    identity : keys by which a record replaces an earlier one of the same file
    unfold   : key of a list of objects; each becomes a record of its own, with the outer values; no list: no line
    only     : key -> the values that are shown, where the file holds more than a reader of the table wants
    by       : keys of the first columns; records that agree in them are one line
    means    : key -> (heading, format) of further columns, the mean over those records
    largest  : the same, the largest of those records; after the means
    """

    identity: tuple[str, ...] = ()
    unfold: str = ""
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, tuple[str, Callable[[float], str]]] = field(default_factory=dict)
    largest: Mapping[str, tuple[str, Callable[[float], str]]] = field(default_factory=dict)


LEVELS = Table(
    identity=("level",),
    by={"level": "level", "made": "made"},
    means={
        "size_bytes": ("MB", megabytes),
        "bpw": ("bits per weight", "{:.2f}".format),
        "pp_ts": ("prompt, tokens/s", "{:.0f}".format),
        "tg_ts": ("writing, tokens/s", "{:.1f}".format),
        "peak_bytes": ("memory, MB", megabytes),
        "bpb": ("bits per byte", "{:.4f}".format),
        "ppl": ("perplexity", "{:.3f}".format),
        "kld_mean": ("KL divergence", "{:.4f}".format),
        "kld_se": ("± se", "{:.4f}".format),
        "kld_99": ("99 %", "{:.3f}".format),
        "same_top": ("same top token", lambda value: f"{100 * value:.1f} %"),
    },
)

TABLES = {
    "quants_smollm2": LEVELS,
    "quants_qwen": LEVELS,
    "quants_ensemble": Table(
        identity=("ensemble", "budget_bytes"),
        unfold="lines",
        by={"what": "choice", "choice": "levels"},
        means={
            "size_bytes": ("MB", megabytes),
            "bpb": ("bits per byte", "{:.4f}".format),
            "gain_of_best": ("the best gains", percent),
        },
    ),
    "quants_memory": Table(
        identity=("expert", "level"),
        by={"expert": "expert", "level": "level"},
        means={
            "model_bytes": ("model, MB", megabytes),
            "peak_bytes": ("peak, MB", megabytes),
            "above_model_bytes": ("above the model, MB", megabytes),
        },
    ),
    "preferences": Table(
        identity=("stage",),
        unfold="ways",
        by={"way": "way"},
        means={
            "bpb": ("bits per byte", "{:.4f}".format),
            "relative": ("gain over the best single expert", percent),
            "relative_low": ("95 % from", percent),
            "relative_high": ("to", percent),
        },
    ),
    "bench": Table(
        identity=("model", "test", "n_threads"),
        by={"model": "model", "n_threads": "threads", "test": "test"},
        means={
            "avg_ts": ("tokens/s", "{:.2f}".format),
            "stddev_ts": ("± sd", "{:.2f}".format),
            "bytes_per_s": ("bytes/s", "{:.1f}".format),
            "decodes_per_token": ("decodes per token", "{:.2f}".format),
            "experts_ms": ("experts, ms per token", "{:.1f}".format),
            "bridge_ms": ("bridge", "{:.2f}".format),
            "fusion_ms": ("fusion", "{:.2f}".format),
            "sampling_ms": ("sampling", "{:.2f}".format),
            "peak_rss_bytes": ("memory, MB", megabytes),
        },
    ),
    "fidelity": Table(
        identity=("expert", "domain"),
        unfold="bridge",
        by={"expert": "expert", "epsilon": "epsilon"},
        means={
            "bpb_own": ("bits per byte, own tokens", "{:.3f}".format),
            "bpb": ("through the bridge", "{:.3f}".format),
            "cost": ("cost", percent),
            "decodes_per_token": ("decodes per token", "{:.2f}".format),
        },
    ),
    "overhead": Table(
        identity=("threads", "cpu"),
        by={"cpu": "processor", "threads": "threads"},
        means={
            "bridge": ("bridge", percent),
            "fusion": ("fusion", percent),
            "sampling": ("sampling", percent),
            "overhead": ("all but the decodes", percent),
            "us_per_byte": ("microseconds per byte", "{:.0f}".format),
        },
    ),
    "kernel": Table(
        identity=("expert", "cpu"),
        by={"cpu": "processor", "expert": "expert", "n_vocab": "entries"},
        means={
            "kernel_us": ("kernel, µs", "{:.0f}".format),
            "numpy_us": ("NumPy softmax, µs", "{:.0f}".format),
            "times_faster": ("times as fast", "{:.2f}".format),
        },
    ),
    "lanes": Table(
        identity=("plan", "cpu"),
        by={"cpu": "processor", "plan": "lanes"},
        means={
            "serial_ms": ("in turn, ms", "{:.1f}".format),
            "lanes_ms": ("in lanes, ms", "{:.1f}".format),
            "times_faster": ("times as fast", "{:.2f}".format),
            "from": ("5 %", "{:.2f}".format),
            "to": ("95 %", "{:.2f}".format),
        },
    ),
    "decoding": Table(
        identity=("way", "threads", "context", "draw", "cpu"),
        only={
            "way": (
                "qwen2.5-coder-0.5b-instruct",
                "naive",
                "fused",
                "fused, default strategy",
                "fused, flash, prefetch exact",
                "fused, flash, lazy and prefetch exact",
                "fused, prefetch law",
            )
        },
        by={"cpu": "processor", "threads": "threads", "context": "context", "draw": "draw", "way": "way"},
        means={
            "bytes_per_s": ("bytes per second", "{:.1f}".format),
            "tokens_per_s": ("tokens per second", "{:.1f}".format),
            "decodes_per_token": ("decodes per token and expert", "{:.2f}".format),
            "to_naive": ("times the naive way", "{:.2f}".format),
            "to_naive_from": ("95 % from", "{:.2f}".format),
            "to_naive_to": ("to", "{:.2f}".format),
            "to_slowest": ("times the slowest expert alone", "{:.2f}".format),
        },
    ),
    "prefill": Table(
        identity=("way", "threads", "cpu"),
        by={"cpu": "processor", "threads": "threads", "way": "way"},
        means={
            "bytes_per_s": ("prompt bytes per second", "{:.0f}".format),
            "to_naive": ("times the naive way", "{:.2f}".format),
            "to_naive_from": ("95 % from", "{:.2f}".format),
            "to_naive_to": ("to", "{:.2f}".format),
        },
    ),
    "memory": Table(
        identity=("expert", "n_ctx"),
        by={"expert": "expert", "n_ctx": "context"},
        means={
            "predicted_bytes": ("predicted, MB", megabytes),
            "measured_bytes": ("measured, MB", megabytes),
            "error": ("error", percent),
        },
    ),
    "run_memory": Table(
        identity=("prompt",),
        by={"prompt": "read"},
        means={
            "files_bytes": ("files, MB", megabytes),
            "kv_bytes": ("caches, MB", megabytes),
            "beside_bytes": ("everything else, MB", megabytes),
            "peak_bytes": ("peak, MB", megabytes),
        },
    ),
    "soak": Table(
        identity=("experts",),
        by={"experts": "experts", "requests": "requests", "generated_bytes": "bytes written"},
        means={
            "before_bytes": ("before, MB", lambda value: f"{value / 1e6:.1f}"),
            "after_bytes": ("after, MB", lambda value: f"{value / 1e6:.1f}"),
            "growth_bytes": ("growth, MB", lambda value: f"{value / 1e6:+.2f}"),
        },
    ),
    "bridges": Table(
        identity=("domain", "document"),
        unfold="bridges",
        by={"bridge": "bridge", "strategy": "strategy"},
        means={
            "cost": ("cost to one expert", percent),
            "bpb_fused": ("fused, bits per byte", "{:.3f}".format),
            "gain": ("gain over the best expert", percent),
            "decodes_per_token": ("decodes per token", "{:.2f}".format),
            "seconds_per_kb": ("seconds per kB", "{:.1f}".format),
            "helped": ("steps it gives nothing to", percent),
        },
    ),
    "score_speed": Table(
        identity=("strategy",),
        by={"kind": "strategies"},
        means={
            "seconds": ("seconds, mean", "{:.1f}".format),
            "cpu_seconds": ("processor seconds, mean", "{:.1f}".format),
        },
        largest={
            "seconds": ("seconds, slowest", "{:.1f}".format),
            "cpu_seconds": ("processor seconds, slowest", "{:.1f}".format),
        },
    ),
    "domains": Table(
        identity=("domain",),
        unfold="summary",
        by={"domain": "kind of text", "strategy": "strategy"},
        means={
            "best_bpb": ("its bits per byte", "{:.3f}".format),
            "fused_bpb": ("fused", "{:.3f}".format),
            "gain": ("gain", percent),
            "low": ("95 % from", percent),
            "high": ("to", percent),
        },
    ),
}


def table(name: str) -> str:
    """The Markdown table of bench/results/NAME.jsonl."""
    path = RESULTS / f"{name}.jsonl"
    if not path.is_file():
        return f"Not measured yet: bench/results/{name}.jsonl does not exist.\n"
    records: list[Record] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    spec = TABLES.get(name)
    if spec is None:
        plain = [{k: v for k, v in r.items() if isinstance(v, (str, int, float))} for r in records]
        keys = [key for key in dict.fromkeys(k for r in plain for k in r) if key not in PROVENANCE]
        lines = [[number(record.get(key, "")) for key in keys] for record in plain]
        return markdown(keys, lines) + provenance(path, records)
    latest = {tuple(r[key] for key in spec.identity) if spec.identity else i: r for i, r in enumerate(records)}
    flat = [{**r, **inner} for r in latest.values() for inner in (r.get(spec.unfold, []) if spec.unfold else [{}])]
    flat = [r for r in flat if all(r[key] in shown for key, shown in spec.only.items())]
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in flat:
        groups.setdefault(tuple(record[key] for key in spec.by), []).append(record)
    lines = [
        [*map(number, group)]
        + [mean(members, key, show) for key, (_, show) in spec.means.items()]
        + [show(max(r[key] for r in members)) for key, (_, show) in spec.largest.items()]
        for group, members in groups.items()
    ]
    headings = [*spec.by.values(), *(heading for heading, _ in (*spec.means.values(), *spec.largest.values()))]
    return markdown(headings, lines) + provenance(path, list(latest.values()))


def mean(records: Iterable[Record], key: str, show: Callable[[float], str]) -> str:
    """The mean of a key over the records that have it, as it is shown; empty where none has."""
    values = [record[key] for record in records if record.get(key) is not None]
    return show(sum(values) / len(values)) if values else ""


def markdown(headings: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    headings = list(headings)
    rows = [headings, ["---"] * len(headings), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def provenance(path: Path, records: Iterable[Record]) -> str:
    """One line that says how many measurements of which version on which machine stand behind a table."""
    records = list(records)
    facts = []
    for key in PROVENANCE:
        values = dict.fromkeys(str(r[key]) for r in records if key in r)
        if values:
            facts.append(f"{key} {', '.join(values)}")
    n_bytes = sum(r.get("bytes", 0) for r in records)
    amount = f", {n_bytes:,} bytes of text" if n_bytes else ""
    return f"\n{len(records)} measurements{amount}; {'; '.join([*facts, f'`bench/results/{path.name}`'])}\n"


def help_text(command: str) -> str:
    """What ``gguf-fusion COMMAND --help`` prints."""
    from gguf_fusion.cli import main

    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main.main([command, "--help"], prog_name="gguf-fusion", standalone_mode=False)
    return f"```\n{printed.getvalue().strip()}\n```\n"


def filled(text: str) -> str:
    """``text`` with every block made anew."""
    make = {"table": table, "help": help_text}
    return BLOCK.sub(lambda m: m[1] + make[m[2]](m[3]) + m[5], text)


def stale(text: str) -> list[str]:
    """Names of the blocks that differ in more than line breaks, which releases of click place differently."""
    pairs = zip(BLOCK.finditer(text), BLOCK.finditer(filled(text)), strict=True)
    return [f"{old[2]}:{old[3]}" for old, new in pairs if old[4].split() != new[4].split()]


def main() -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    out_of_date = stale(text)
    if arguments.check and out_of_date:
        print(f"README.md is out of date: {', '.join(out_of_date)}; run: python bench/readme_tables.py")
        return 1
    if not arguments.check:
        README.write_text(filled(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
