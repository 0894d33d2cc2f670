"""``gguf-fusion bench``: speed of experts and of their ensemble, in llama-bench's columns."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Mapping
from typing import Any

import click

from gguf_fusion.cli._output import ConsoleProgress, human_size, note, print_json, print_line
from gguf_fusion.cli._registry import registry_option
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.errors import UsageError
from gguf_fusion.experts import native
from gguf_fusion.measure.bench import bench as measured

_HEADER = (
    "MODEL", "SIZE", "PARAMS", "BACKEND", "THREADS", "TEST", "T/S", "BYTES/S", "DECODES PER TOKEN", "MS PER TOKEN",
    "PEAK RAM", "PEAK VRAM",
)  # fmt: skip
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
    Memory is the peak since before loading, the process as a whole; VRAM is that of all GPUs together.
    Rows appear as they are measured; Ctrl-C keeps those that are there.
    """
    writer = _Writer(output)
    try:
        for row in measured(
            models or (DEFAULT_ENSEMBLE,),
            n_threads=_numbers("--threads", given["threads"], 1) if given["threads"] else (),
            n_ctx=_numbers("--n-ctx", given["n_ctx"], 0),
            type_k=_words("--type-k", given["type_k"]),
            type_v=_words("--type-v", given["type_v"]),
            n_gpu_layers=_numbers("--n-gpu-layers", given["n_gpu_layers"], -1),
            n_prompt=_numbers("--n-prompt", given["n_prompt"], 0),
            n_gen=_numbers("--n-gen", given["n_gen"], 0),
            repetitions=given["repetitions"],
            fused=given["fused"],
            strategy=given["strategy"],
            registry=registry,
            offline=offline,
            progress=ConsoleProgress(),
            tell=note,
        ):
            writer.add(row)
    finally:
        writer.close()


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
        self._rows: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        if self._output == "jsonl":
            print_json(row, indent=None)
        elif self._output == "csv":
            writer = csv.DictWriter(sys.stdout, _CSV, extrasaction="ignore", lineterminator="\n")
            if len(self._rows) == 1:
                writer.writeheader()
            writer.writerow({**row, **{f"{part}_ms": ms for part, ms in row.get("ms_per_token", {}).items()}})
            sys.stdout.flush()

    def close(self) -> None:
        if self._output == "json":
            print_json(self._rows)
        elif self._output == "md" and self._rows:
            for cells in (_HEADER, ["---"] * len(_HEADER), *map(_cells, self._rows)):
                print_line("| " + " | ".join(cells) + " |")


_CSV = (
    "build_commit", "cpu_info", "backends", "model_filename", "model_type", "model_size", "model_n_params", "n_batch",
    "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "n_ctx", "n_prompt", "n_gen", "n_depth", "test",
    "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "peak_rss_bytes", "peak_vram_bytes", "bytes_per_s",
    "decodes_per_token", "experts_ms", "bridge_ms", "fusion_ms", "sampling_ms",
)  # fmt: skip


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    parts = row.get("ms_per_token", {})
    name = row["ensemble"] if parts else row["expert"]
    return (
        f"{name} ({row['model_type']})", human_size(row["model_size"]), f"{row['model_n_params'] / 1e6:.0f} M",
        row["backends"], str(row["n_threads"]), row["test"], f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        f"{row['bytes_per_s']:.1f}" if parts else "", f"{row['decodes_per_token']:.2f}" if parts else "",
        " + ".join(f"{value:.1f} {part}" for part, value in parts.items()),
        human_size(row["peak_rss_bytes"]), human_size(row["peak_vram_bytes"]),
    )  # fmt: skip
