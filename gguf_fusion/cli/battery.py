"""``gguf-fusion battery``: a small set of prompts, for experts and strategies."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from gguf_fusion import hub
from gguf_fusion.battery.items import items
from gguf_fusion.battery.run import Log, Result, answers, reference_bits, table
from gguf_fusion.cli._output import ConsoleProgress, note, print_json, print_line, print_table, warn
from gguf_fusion.cli._registry import registry_option
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.scorer import Scorer, Settings
from gguf_fusion.expressions import DEFAULT, parse
from gguf_fusion.hub.digests import model_digest
from gguf_fusion.members import members_of
from gguf_fusion.options import Options


@click.command()
@click.argument("ensemble", default=DEFAULT_ENSEMBLE)
@click.option("--category", help="Only the items of one category.")
@click.option("--strategy", "strategies", multiple=True, help="pool(weight rule) (repeatable).")
@click.option(
    "--mode", type=click.Choice(["bits", "generate"]), default="bits", show_default=True,
    help="bits: of the references; generate: answers that programs check.",
)  # fmt: skip
@click.option(
    "--seed", "seeds", type=click.IntRange(min=0), multiple=True, help="Sample with a seed (repeatable); else greedy."
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write every result to this file as it comes (JSON lines)."
)
@click.option("--resume", is_flag=True, help="Go on with --out: what stands there is not done again.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first items.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Threads for all experts together.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@registry_option
def battery(
    registry: Registry,
    ensemble: str,
    category: str | None,
    strategies: tuple[str, ...],
    mode: str,
    seeds: tuple[int, ...],
    out: Path | None,
    resume: bool,
    limit: int | None,
    threads: int | None,
    offline: bool,
    as_json: bool,
) -> None:
    """Run 50 prompts of eight categories: each expert alone, then fused.

    A smoke test: with six items per category nothing is proven. Ctrl-C reports what was done so far; with --out,
    --resume goes on from there.
    """
    if resume and out is None:
        raise UsageError("--resume needs --out FILE, the file to go on with")
    found = items(category)[:limit]
    spec = registry.ensemble(ensemble)
    members = [member for member in members_of(spec, registry) if member.weight > 0.0]
    wanted = list(strategies or (spec.strategy or DEFAULT,))
    parsed = {text: parse(text) for text in wanted}
    names = [member.spec.name for member in members]
    tries: list[int | None] = list(seeds) if seeds and mode == "generate" else [None]
    progress = ConsoleProgress()
    paths = [hub.pull(m.ref, registry, progress=progress, offline=offline)[0] for m in members]
    facts = {
        "mode": mode,
        "experts": [[m.spec.name, model_digest(p), m.weight] for m, p in zip(members, paths, strict=True)],
    }
    log = Log(out, facts, resume=resume)
    by_id = {item.id: item for item in found}
    try:
        if mode == "bits":
            weights, roles = np.array([m.weight for m in members]), [m.spec.role for m in members]
            with Scorer.of_members(members, paths, Options(n_threads=threads), Settings()) as scorer:
                for one in reference_bits(scorer, found, names, parsed, weights, roles, note, log.known):
                    log.add(by_id[one.item], one)
        else:
            with Ensemble.from_registry(ensemble, registry=registry, offline=offline, n_threads=threads) as loaded:
                for one in answers(loaded, found, wanted, tries, note, log.known):
                    log.add(by_id[one.item], one)
    except KeyboardInterrupt:
        if not log.results(found, [*names, *wanted], tries):
            raise
        warn("interrupted: these are the items done so far" + ("" if out is None else "; --resume goes on"))
    _show(log.results(found, [*names, *wanted], tries), mode, as_json=as_json)


def _show(results: list[Result], mode: str, *, as_json: bool) -> None:
    found = table(results)
    if as_json:
        print_json({"mode": mode, "unit": "bits per byte" if mode == "bits" else "share passed", "table": found,
                    "items": [asdict(one) for one in results]})  # fmt: skip
        return
    categories: list[str] = list(dict.fromkeys(c for row in found.values() for c in row if c != "all"))
    show: Any = "{:.3f}".format if mode == "bits" else "{:.0%}".format
    rows = [(who, *(show(row[c]) for c in (*categories, "all"))) for who, row in found.items()]
    print_line("bits per byte of the references" if mode == "bits" else "answers that passed")
    print_table(("", *categories, "all"), rows)
