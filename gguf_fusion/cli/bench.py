"""``gguf-fusion bench``: speed of experts and of their ensemble, in llama-bench's columns."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from gguf_fusion import hub
from gguf_fusion.cli._output import ConsoleProgress, human_size, note, print_json, print_line
from gguf_fusion.cli._registry import registry_option
from gguf_fusion.config import DEFAULT_ENSEMBLE, ExpertSpec, Registry
from gguf_fusion.devices import usable_cores
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.experts import native, native_devices
from gguf_fusion.gguf_info import read
from gguf_fusion.load import Options, load_expert
from gguf_fusion.measure.speed import Case, Row, cases, ensemble_row, expert_rows
from gguf_fusion.members import Member, members_from, members_of

_HEADER = ("MODEL", "SIZE", "PARAMS", "BACKEND", "THREADS", "TEST", "T/S", "BYTES/S", "MS PER TOKEN", "PEAK")
_RANGE = re.compile(r"(\d+)-(\d+)(?:\+(\d+)|\*(\d+))?\Z")


@click.command()
@click.argument("models", metavar="[ENSEMBLE|EXPERT]...", nargs=-1)
@click.option("-p", "--n-prompt", default="512", show_default=True, help="Tokens of the prompt test; 0 leaves it out.")
@click.option("-n", "--n-gen", default="128", show_default=True, help="Tokens of the generation test; 0 leaves it out.")
@click.option("-r", "--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("-t", "--threads", help="Threads: 2, or 1,2 or 1-4 or 1-8*2.  [default: all cores]")
@click.option("-c", "--n-ctx", default="0", show_default=True, help="Contexts; 0 = what the tests need.")
@click.option("--type-k", default="f16", show_default=True, help="Cache types of K.")
@click.option("--type-v", default="f16", show_default=True, help="Cache types of V.")
@click.option("-ngl", "--n-gpu-layers", default="0", show_default=True, help="Layers on a GPU.")
@click.option("-o", "--output", type=click.Choice(["md", "csv", "json", "jsonl"]), default="md", show_default=True)
@click.option("--fused/--no-fused", default=True, show_default=True, help="Also measure an ensemble as a whole.")
@click.option("--strategy", help="pool(weight rule) of the ensemble.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@registry_option
def bench(registry: Registry, models: tuple[str, ...], output: str, offline: bool, **given: Any) -> None:
    """Tokens per second: reading a prompt (pp), writing (tg), and writing with all experts fused.

    Lists and ranges are multiplied with one another. Unlike llama-bench the fused rows include fusing and sampling.
    Rows appear as they are measured; Ctrl-C keeps those that are there.
    """
    names = models or (DEFAULT_ENSEMBLE,)
    members, ensemble = _members(names, registry)
    ranges: dict[str, Sequence[Any]] = {
        "n_threads": _numbers("--threads", given["threads"] or str(usable_cores()), 1),
        "n_ctx": _numbers("--n-ctx", given["n_ctx"], 0),
        "type_k": _words("--type-k", given["type_k"]),
        "type_v": _words("--type-v", given["type_v"]),
        "n_gpu_layers": _numbers("--n-gpu-layers", given["n_gpu_layers"], -1),
        "n_prompt": _numbers("--n-prompt", given["n_prompt"], 0),
        "n_gen": _numbers("--n-gen", given["n_gen"], 0),
    }
    if not any(ranges["n_prompt"]) and not any(ranges["n_gen"]):
        raise UsageError("nothing to measure: both -p and -n are 0")
    transfers = ConsoleProgress()
    for member in members:
        hub.pull(member.ref, registry, progress=transfers, offline=offline)
    fused = ensemble if given["fused"] else None
    writer = _Writer(output)
    try:
        for row in _rows(members, fused, registry, cases(**ranges), given["repetitions"], given["strategy"]):
            writer.add(row)
    finally:
        writer.close()


def _members(names: Sequence[str], registry: Registry) -> tuple[list[Member], list[Member] | None]:
    """(experts to measure one by one, the ensemble to measure as a whole)."""
    members: list[Member] = []
    ensemble: list[Member] | None = None
    for name in names:
        if name in registry.ensembles:
            found = members_of(registry.ensemble(name), registry)
            ensemble = [member for member in found if member.weight > 0.0]
        else:
            found = members_from([name], registry)
        members += [member for member in found if member.ref not in {m.ref for m in members}]
    return members, ensemble


def _rows(
    members: Sequence[Member], ensemble: Sequence[Member] | None, registry: Registry, wanted: Sequence[Case],
    repetitions: int, strategy: str | None,
) -> Iterator[Row]:  # fmt: skip
    infos = {member.ref: read(hub.locate(member.ref, registry)) for member in members}
    backends = "GPU" if native_devices.supports_gpu_offload() else "CPU"
    for case in wanted:
        n_ctx = case.n_ctx or max(256, case.n_prompt + 8, case.n_gen + 72)
        options = Options(n_ctx=n_ctx, n_threads=case.n_threads, n_gpu_layers=case.n_gpu_layers)
        for member in members:
            with load_expert(_with_types(member.spec, case), infos[member.ref].path, options) as expert:
                yield from expert_rows(expert, infos[member.ref], case, repetitions, note, backends)
        if ensemble and len(ensemble) > 1 and case.n_gen:
            refs = [member.ref for member in ensemble]
            with Ensemble.from_files(
                refs, weights=[m.weight for m in ensemble], registry=registry, offline=True, n_ctx=max(n_ctx, 512),
                n_threads=case.n_threads, n_gpu_layers=case.n_gpu_layers, strategy=strategy,
            ) as loaded:  # fmt: skip
                yield ensemble_row(loaded, [infos[ref] for ref in refs], case, repetitions, note, backends)


def _with_types(spec: ExpertSpec, case: Case) -> ExpertSpec:
    return replace(spec, type_k=case.type_k, type_v=case.type_v)


def _numbers(option: str, text: str, low: int) -> list[int]:
    """``4``, ``1,2``, ``1-4``, ``2-8+2``, ``1-8*2``."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match:
            value, last = int(match[1]), int(match[2])
            while value <= last and (match[4] is None or (int(match[4]) > 1 and value)):
                found.append(value)
                value = value * int(match[4]) if match[4] else value + int(match[3] or 1)
        else:
            try:
                found.append(int(part))
            except ValueError:
                raise UsageError(f"{option}: expected numbers such as 512, 1,2 or 1-8*2, got {text!r}") from None
    if not found or min(found) < low:
        raise UsageError(f"{option}: expected numbers of at least {low}, got {text!r}")
    return found


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in native.CACHE_TYPES]
    if unknown:
        raise UsageError(f"{option}: expected cache types ({', '.join(native.CACHE_TYPES)}), got {unknown[0]!r}")
    return words


class _Writer:
    """Rows in one of four formats; those that can be streamed are."""

    def __init__(self, output: str) -> None:
        self._output = output
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if self._output == "jsonl":
            print_json(row.as_json(), indent=None)
        elif self._output == "csv":
            writer = csv.DictWriter(sys.stdout, _CSV, extrasaction="ignore", lineterminator="\n")
            if len(self._rows) == 1:
                writer.writeheader()
            writer.writerow(row.as_json())
            sys.stdout.flush()

    def close(self) -> None:
        if self._output == "json":
            print_json([row.as_json() for row in self._rows])
        elif self._output == "md" and self._rows:
            rows = [_cells(row) for row in self._rows]
            print_line("| " + " | ".join(_HEADER) + " |")
            print_line("| " + " | ".join("---" for _ in _HEADER) + " |")
            for cells in rows:
                print_line("| " + " | ".join(cells) + " |")


_CSV = (
    "build_commit", "cpu_info", "backends", "model_filename", "model_type", "model_size", "model_n_params", "n_batch",
    "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "n_ctx", "n_prompt", "n_gen", "n_depth", "test",
    "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "peak_rss_bytes", "bytes_per_s", "decodes_per_token",
)  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    extra = row.extra
    parts = extra.get("ms_per_token")
    split = " + ".join(f"{value:.1f} {name}" for name, value in parts.items()) if parts else ""
    name = " + ".join(extra["experts"]) if parts else str(extra["expert"])
    return (
        f"{name} ({row.model_type})", human_size(row.model_size), f"{row.model_n_params / 1e6:.0f} M", row.backends,
        str(row.case.n_threads), row.test, f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
        f"{extra['bytes_per_s']:.1f}" if parts else "", split, human_size(row.peak_rss_bytes),
    )  # fmt: skip
