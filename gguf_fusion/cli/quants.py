"""``gguf-fusion quants``: compare quantization levels of a model, or choose them for an ensemble."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gguf_fusion.cli._output import (
    ConsoleProgress,
    human_size,
    note,
    print_json,
    print_line,
    print_table,
    size_in_bytes,
    warn,
)
from gguf_fusion.cli._registry import registry_option, require_extra
from gguf_fusion.config import Registry
from gguf_fusion.errors import UsageError
from gguf_fusion.measure.ladder import Plan, recommend
from gguf_fusion.measure.making import check_levels
from gguf_fusion.measure.quality import NOISE_FLOOR
from gguf_fusion.measure.quants import LEVELS, ensemble_quants
from gguf_fusion.measure.quants import quants as measured

_HEADER = (
    "", "QUANT", "SIZE", "BITS/WEIGHT", "PP T/S", "TG T/S", "PEAK", "BITS/BYTE", "PPL", "KLD MEAN", "MEDIAN", "99 %",
    "MAX", "SAME TOP", "ΔP RMS", "NON-FINITE",
)  # fmt: skip


@click.command()
@click.argument("ref", required=False)
@click.option("--ensemble", metavar="NAME", help="Choose levels for the experts of an ensemble instead.")
@click.option("--budget", metavar="SIZE", help="With --ensemble: bytes of all files together, such as 3GB.")
@click.option("--quants", "levels", default=",".join(LEVELS), show_default=True, help="Levels, separated by commas.")
@click.option(
    "--reference", metavar="LEVEL|FILE", help="What levels are compared with and made from.  [default: REF itself]"
)
@click.option("--requantize", is_flag=True, help="Make levels from a file that is quantized already (worse; labelled).")
@click.option("--text", "texts", multiple=True, type=click.Path(path_type=Path), help="Text to read (repeatable).")
@click.option("--chunk", type=click.IntRange(min=16), default=512, show_default=True, help="Tokens per chunk.")
@click.option("--chunks", type=click.IntRange(min=1), default=4, show_default=True, help="Chunks that are read.")
@click.option("-p", "--n-prompt", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("-n", "--n-gen", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("-r", "--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "-c", "--n-ctx", type=click.IntRange(min=64), default=1024, show_default=True, help="Context of the speed test."
)
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Threads.")
@click.option("--fit", metavar="SIZE", help="Recommend for so much memory.")
@click.option("--min-tg", type=float, help="Recommend for so many tokens per second.")
@click.option(
    "--rival", "rivals", metavar="REF", multiple=True, help="With --ensemble: a model compared alone (repeatable)."
)
@click.option("--strategy", help="With --ensemble: pool(weight rule).")
@click.option(
    "--max-bytes", type=click.IntRange(min=256), default=2048, show_default=True, help="With --ensemble: bytes of text."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Folder for a picture.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="A list of rows (or with --ensemble one object).")
@registry_option
@click.pass_context
def quants(
    context: click.Context, /, registry: Registry, ref: str | None, ensemble: str | None, offline: bool, **given: Any
) -> None:
    """Compare quantization levels of REF: size, speed, memory, and distance from the reference.

    Levels come from REF's repository where it has them, else they are made here from the reference. Every level is
    remembered by the hash of its file: an interrupted run goes on where it stopped. Levels that cannot be had are named
    on stderr; the exit status is 1 if none could.
    """
    if (ref is None) == (ensemble is None):
        raise UsageError("give either REF, or --ensemble NAME with --budget SIZE")
    if given["plot"] is not None:
        require_extra("plot", "matplotlib")
    levels = check_levels(given["levels"].split(","))
    text = _text(given["texts"])
    plan = Plan(
        chunk=given["chunk"], chunks=given["chunks"], n_ctx=given["n_ctx"], n_threads=given["threads"] or 0,
        n_prompt=given["n_prompt"], n_gen=given["n_gen"], repetitions=given["repetitions"],
        requantize=given["requantize"],
    )  # fmt: skip
    common: dict[str, Any] = {
        "text": text, "plan": plan, "registry": registry, "offline": offline, "progress": ConsoleProgress(),
    }  # fmt: skip
    if ensemble is not None:
        _for_ensemble(ensemble, levels, common, given)
        return
    assert ref is not None
    fit = None if given["fit"] is None else size_in_bytes("--fit", given["fit"])
    done = measured(ref, levels, reference=given["reference"], tell=_Teller(len(levels) + 1), **common)
    for problem in done.problems:
        warn(problem)
    advice = recommend(done.rows, fit, given["min_tg"])
    if given["plot"] is not None:
        from gguf_fusion.measure.plot import draw_ladder

        draw_ladder(done.rows, given["plot"] / "quants.png")
    if given["as_json"]:
        print_json(done.rows)
        note(advice)
    else:
        _print(done.rows)
        print_line(advice)
    if done.problems and all(row["is_reference"] for row in done.rows):
        context.exit(1)


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(_HEADER, [_cells(row) for row in rows])
    base = next(row for row in rows if row["is_reference"])
    print_line("\n* no other level is both smaller and closer to the reference; (2x) made from a quantized file")
    if base["kld_mean"] is not None:
        floor = "below" if base["kld_mean"] < NOISE_FLOOR else "ABOVE"
        print_line(
            f"noise floor: the reference against itself has a mean divergence of {base['kld_mean']:.1e} "
            f"(most {base['kld_max']:.1e}), {floor} {NOISE_FLOOR:.0e}"
        )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    label = row["quant"] + (" (reference)" if row["is_reference"] else " (2x)" if row["requantized"] else "")
    numbers = (
        (f"{row['bpb']:.4f}", f"{row['ppl']:.3f}", f"{row['kld_mean']:.5f} ± {row['kld_se']:.5f}",
         f"{row['kld_median']:.5f}", f"{row['kld_99']:.4f}", f"{row['kld_max']:.4f}", f"{100 * row['same_top']:.1f} %",
         f"{100 * row['delta_p_rms']:.2f} %")
        if row["tokens"]
        else ("no finite row", *[""] * 7)
    )  # fmt: skip
    return (
        "*" if row["pareto"] else "", label, human_size(row["size_bytes"]), f"{row['bpw']:.2f}",
        f"{row['pp_ts']:.1f} ± {row['pp_sd']:.1f}", f"{row['tg_ts']:.1f} ± {row['tg_sd']:.1f}",
        human_size(row["peak_bytes"]), *numbers, str(row["non_finite"]),
    )  # fmt: skip


def _text(files: Sequence[Path]) -> bytes | None:
    """The given files, joined; None for none."""
    try:
        return b"\n".join(file.read_bytes() for file in files) if files else None
    except OSError as error:
        raise UsageError(f"--text {error.filename}: {error.strerror}; expected a file to read") from None


def _for_ensemble(name: str, levels: Sequence[str], common: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if given["budget"] is None:
        raise UsageError("--ensemble needs --budget SIZE, such as 3GB")
    found = ensemble_quants(
        name, size_in_bytes("--budget", given["budget"]), levels, max_bytes=given["max_bytes"],
        strategy=given["strategy"], rivals=given["rivals"], tell=_Teller(None), **common,
    )  # fmt: skip
    for problem in found.problems:
        warn(problem)
    if given["as_json"]:
        print_json(found.as_json())
        return
    chosen = found.chosen
    shown = list(chosen.tried[:12])
    if chosen.even is not None and chosen.even not in shown:
        shown.append(chosen.even)
    rows = [
        (" + ".join(one.levels), human_size(one.size_bytes), f"{one.bpb:.4f}", "best" if one == chosen.best else
         "same bytes for each" if one == chosen.even else "")
        for one in shown
    ]  # fmt: skip
    if chosen.single is not None:
        one = chosen.single
        rows.append((f"{one.name} {one.level}", human_size(one.size_bytes), f"{one.bpb:.4f}", "best model alone"))
    print_line(" + ".join(found.experts))
    print_table(("LEVELS", "SIZE", "BITS/BYTE", ""), rows)
    print_line()
    gains = found.as_json()
    for key, what in (
        ("gain_over_even", "against the largest levels within an equal share of the budget each"),
        ("gain_over_single", "against the best model alone within the budget"),
    ):
        if gains[key] is not None:
            print_line(f"{100 * gains[key]:+.2f} % {what}")
    if not chosen.exhaustive:
        print_line("not all combinations were tried")


class _Teller:
    """Progress on stderr, with the time left once a level is done. ``n``: levels, None where nobody knows."""

    def __init__(self, n: int | None) -> None:
        self._n = n
        self._began = time.monotonic()
        self._seen: list[str] = []

    def __call__(self, text: str) -> None:
        level = text.partition(":")[0]
        if level not in self._seen:
            self._seen.append(level)
        done = len(self._seen) - 1
        left = (time.monotonic() - self._began) * (self._n - done) / done if self._n and done else None
        note(text + ("" if left is None else f", about {left:.0f} s left"))
