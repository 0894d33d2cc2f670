"""``gguf-fusion quants``: compare quantization levels of a model, or choose them for an ensemble."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from gguf_fusion import hub
from gguf_fusion.cli._output import ConsoleProgress, human_size, note, print_json, print_line, print_table, warn
from gguf_fusion.cli._registry import registry_option, require_extra
from gguf_fusion.cli.plan import size_in_bytes
from gguf_fusion.config import Registry
from gguf_fusion.errors import HubError, UsageError
from gguf_fusion.expressions import DEFAULT, parse
from gguf_fusion.gguf_info import read
from gguf_fusion.load import Member, Options, members_of
from gguf_fusion.measure.ladder import Plan, check_levels, ladder, made, recommend
from gguf_fusion.measure.quality import pareto

_LEVELS = "Q2_K,Q3_K_M,Q4_0,Q4_K_M,Q5_K_M,Q6_K,Q8_0"
_HEADER = (
    "",
    "QUANT",
    "SIZE",
    "BITS/WEIGHT",
    "PP T/S",
    "TG T/S",
    "PEAK",
    "BITS/BYTE",
    "PPL",
    "KLD",
    "KLD 99 %",
    "SAME TOP",
)


@click.command()
@click.argument("ref", required=False)
@click.option("--ensemble", metavar="NAME", help="Choose levels for the experts of an ensemble instead.")
@click.option("--budget", metavar="SIZE", help="With --ensemble: bytes of all files together, such as 3GB.")
@click.option("--quants", "levels", default=_LEVELS, show_default=True, help="Levels, separated by commas.")
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
@click.option("--strategy", help="With --ensemble: pool(weight rule).")
@click.option(
    "--max-bytes", type=click.IntRange(min=256), default=2048, show_default=True, help="With --ensemble: bytes of text."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Folder for a picture.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="A list of rows (or with --ensemble one object).")
@registry_option
def quants(registry: Registry, ref: str | None, ensemble: str | None, **given: Any) -> None:
    """Compare quantization levels of REF: size, speed, memory, and distance from the reference.

    Levels come from REF's repository where it has them, else they are made here from the reference. Every level is
    remembered by the hash of its file: an interrupted run goes on where it stopped.
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
    if ensemble is not None:
        _for_ensemble(registry, ensemble, levels, text[: given["max_bytes"]], plan, given)
        return
    assert ref is not None
    reference = _reference(ref, given["reference"], registry, offline=given["offline"])
    fit = None if given["fit"] is None else size_in_bytes("--fit", given["fit"])
    rows, problems = ladder(
        hub.default_name(ref, registry), reference, levels, text, plan, _Teller(len(levels) + 1),
        lambda level: _from_repository(ref, level, registry, offline=given["offline"]),
    )  # fmt: skip
    marked = pareto(rows)
    rows = [{**row, "pareto": front} for row, front in zip(rows, marked, strict=True)]
    for problem in problems:
        warn(problem)
    advice = recommend(rows, fit, given["min_tg"])
    if given["plot"] is not None:
        from gguf_fusion.measure.plot import draw_ladder

        draw_ladder(rows, marked, given["plot"] / "quants.png")
    if given["as_json"]:
        print_json(rows)
        note(advice)
        return
    print_table(_HEADER, [_cells(row) for row in rows])
    print_line("\n* no other level is both smaller and closer to the reference; (2x) made from a quantized file")
    print_line(advice)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    label = row["quant"] + (" (reference)" if row["is_reference"] else " (2x)" if row["requantized"] else "")
    numbers = (
        (f"{row['bpb']:.4f}", f"{row['ppl']:.3f}", f"{row['kld_mean']:.5f} ± {row['kld_se']:.5f}",
         f"{row['kld_99']:.4f}", f"{100 * row['same_top']:.1f} %")
        if "ppl" in row
        else ("no finite row",) * 5
    )  # fmt: skip
    return (
        "*" if row["pareto"] else "", label, human_size(row["size_bytes"]), f"{row['bpw']:.2f}",
        f"{row['pp_ts']:.1f} ± {row['pp_sd']:.1f}", f"{row['tg_ts']:.1f} ± {row['tg_sd']:.1f}",
        human_size(row["peak_bytes"]), *numbers,
    )  # fmt: skip


def _text(files: Sequence[Path]) -> bytes:
    """The given files, or the standard library's own sources."""
    if not files:
        lib = Path(sysconfig.get_path("stdlib"))
        return b"\n".join((lib / name).read_bytes() for name in ("textwrap.py", "calendar.py", "argparse.py"))
    try:
        return b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UsageError(f"--text {error.filename}: {error.strerror}; expected a file to read") from None


def _reference(ref: str, given: str | None, registry: Registry, *, offline: bool) -> Path:
    progress = ConsoleProgress()
    if given is None:
        return hub.pull(ref, registry, progress=progress, offline=offline)[0]
    if Path(given).exists() or given.lower().endswith(".gguf"):
        return hub.pull(given, registry, progress=progress, offline=offline)[0]
    check_levels([given])
    return hub.pull(f"{ref.partition(':')[0]}:{given}", registry, progress=progress, offline=offline)[0]


def _from_repository(ref: str, level: str, registry: Registry, *, offline: bool) -> Path | None:
    """A level of ``user/repo``; None for other references, or where the repository does not have it."""
    repo = ref.partition(":")[0]
    if repo.count("/") != 1 or Path(ref).exists():
        return None
    try:
        return hub.pull(f"{repo}:{level}", registry, progress=ConsoleProgress(), offline=offline)[0]
    except HubError:
        return None


def _for_ensemble(
    registry: Registry, name: str, levels: Sequence[str], text: bytes, plan: Plan, given: Mapping[str, Any]
) -> None:
    from gguf_fusion.measure.combinations import choose

    if given["budget"] is None:
        raise UsageError("--ensemble needs --budget SIZE, such as 3GB")
    budget = size_in_bytes("--budget", given["budget"])
    spec = registry.ensemble(name)
    members = [member for member in members_of(spec, registry) if member.weight > 0.0]
    strategy = parse(given["strategy"] or spec.strategy or DEFAULT)
    laws: dict[str, list[Any]] = {}
    scored = np.ones(len(text), np.bool_)
    tell = _Teller(len(members) * (len(levels) + 1))
    for member in members:
        own = hub.pull(member.ref, registry, progress=ConsoleProgress(), offline=given["offline"])[0]
        files = [(read(own).quant, own)]
        files += [(level, made(own, level, plan, tell)[0]) for level in levels if level != files[0][0]]
        for level, file in files:
            tell(f"{member.spec.name} {level}: reading {len(text)} bytes")
            found, kept = _laws(member, level, file, text)
            laws.setdefault(member.spec.name, []).append(found)
            scored &= kept
    names = [member.spec.name for member in members]
    came = np.frombuffer(text, np.uint8).astype(np.int64)
    weights = np.array([member.weight for member in members])
    chosen = choose(names, laws, came, scored, strategy, weights, budget)
    if given["as_json"]:
        print_json(
            {"ensemble": name, "experts": names, "budget_bytes": budget, "bytes": int(scored.sum()), **chosen.as_json()}
        )
        return
    rows = [
        (" + ".join(one.levels), human_size(one.size_bytes), f"{one.bpb:.4f}", "best" if one == chosen.best else
         "same bytes for each" if one == chosen.even else "")
        for one in chosen.tried[:12]
    ]  # fmt: skip
    print_line(" + ".join(names))
    print_table(("LEVELS", "SIZE", "BITS/BYTE", ""), rows)
    if chosen.even is not None:
        gain = 1.0 - chosen.best.bpb / chosen.even.bpb
        print_line(f"\n{100 * gain:+.2f} % against the largest levels within an equal share of the budget each")
    if not chosen.exhaustive:
        print_line("not all combinations were tried")


def _laws(member: Member, level: str, file: Path, text: bytes) -> tuple[Any, Any]:
    """(laws of one expert at one level on a text, which bytes are scored), from its trace."""
    from gguf_fusion.evaluate.score import Document
    from gguf_fusion.evaluate.scorer import Scorer, Settings
    from gguf_fusion.measure.combinations import Laws
    from gguf_fusion.weights import LOWEST

    one = replace(member, weight=1.0)
    with (
        Scorer.of_members([one], [file], Options(lanes="serial"), Settings()) as scorer,
        scorer.trace(Document(level, text)) as trace,
    ):
        blocks = [np.maximum(laws[0], LOWEST) for _, laws in trace.blocks(np.ones(1))]
        return Laws(level, read(file).size_bytes, np.concatenate(blocks)), np.array(trace.scored)


class _Teller:
    """Progress on stderr, with the time left once a level is done."""

    def __init__(self, n_levels: int) -> None:
        self._n = n_levels
        self._began = time.monotonic()
        self._seen: list[str] = []

    def __call__(self, text: str) -> None:
        level = text.partition(":")[0]
        if level not in self._seen:
            self._seen.append(level)
        done = len(self._seen) - 1
        left = (time.monotonic() - self._began) * (self._n - done) / done if done else None
        note(text + ("" if left is None else f", about {left:.0f} s left"))
