"""``gguf-fusion discover``: search for the strategy that fits your texts, on traces."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np

from gguf_fusion import __version__, hub
from gguf_fusion.cli._output import ConsoleProgress, note, print_json, print_line, print_table
from gguf_fusion.cli._registry import registry_option, require_extra
from gguf_fusion.cli.evaluate import _Clock, _members, _read
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.cover.tree import DEFAULT_EPSILON
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.scorer import Scorer, Settings
from gguf_fusion.evaluate.trace import Trace
from gguf_fusion.options import Options

_TIERS = {"1": (1,), "2": (1, 2), "3": (3,), "all": (1, 2, 3)}


@click.command()
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--data", "data", multiple=True, type=click.Path(path_type=Path), help="A file to learn from (repeatable)."
)
@click.option("-e", "--expert", "experts", metavar="REF", multiple=True, help="An expert (repeatable).")
@click.option("--ensemble", default=DEFAULT_ENSEMBLE, show_default=True, help="An ensemble of the registry.")
@click.option(
    "--tier",
    type=click.Choice(list(_TIERS)),
    default="all",
    show_default=True,
    help="1: parameters; 2: stacks of tuned strategies; 3: evolved formulae.",
)
@click.option("--budget", type=click.IntRange(min=1), default=200, show_default=True, help="Candidates to try.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="JSON lines: every candidate, written as it is scored.")
@click.option("--resume", is_flag=True, help="Go on with the search in --out.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes; as many as there are cores by default.")
@click.option("--ray", metavar="ADDRESS", help="Evaluate on a Ray cluster ('auto', 'ray://host:port', 'local').")
@click.option("--max-bytes", type=int, help="Bytes read of each file.")
@click.option("--plot", type=click.Path(path_type=Path), help="Folder for a picture of the front.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@registry_option
def discover(
    registry: Registry,
    files: tuple[Path, ...],
    data: tuple[Path, ...],
    experts: tuple[str, ...],
    ensemble: str,
    tier: str,
    budget: int,
    seed: int,
    out: Path | None,
    resume: bool,
    workers: int | None,
    ray: str | None,
    max_bytes: int | None,
    plot: Path | None,
    offline: bool,
    as_json: bool,
) -> None:
    """Search for the strategy with the fewest bits per byte on your files.

    Files are split by document: half to search on, a quarter to choose among what was found, a quarter to judge the
    winner once. Files of one folder are one domain; give at least four of each. What the experts expect is read from
    traces, so that a candidate costs no decodes. The winner is printed as ``run --strategy`` takes it.
    """
    from gguf_fusion.discover import candidates, corpus, search

    require_extra("discover", "optuna", "deap", "scipy")
    if plot is not None:
        require_extra("plot", "matplotlib")
    if resume and out is None:
        raise UsageError("--resume goes on with the search in --out FILE; name the file")
    documents = [_with_domain(_read(file, max_bytes)) for file in (*files, *data)]
    if not documents:
        raise UsageError("expected files to learn from (FILE... or --data FILE), got none")
    members, _, epsilon = _members(registry, experts, ensemble)
    if len(members) < 2:
        raise UsageError("expected at least two experts: there is nothing to combine")
    settings = Settings(epsilons=(DEFAULT_EPSILON if epsilon is None else epsilon,))
    transfers = ConsoleProgress()
    paths = [hub.pull(m.ref, registry, progress=transfers, offline=offline)[0] for m in members]
    began = time.monotonic()
    splits = corpus.split_documents([(d.name, d.domain, d.text) for d in documents], seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gguf-fusion-")))
        scorer = stack.enter_context(Scorer.of_members(members, paths, Options(), settings))
        waiting = sum(len(d.text) for d in documents if not scorer.is_cached(d.text))
        with _Clock(waiting) as clock:
            total = sum(len(d.text) for d in documents)
            traced = corpus.gather(_traces(scorer, documents, clock), splits, total, folder)
        scorer.close()
        fit = search.fit_documents(traced)
        yardstick = candidates.Yardstick.of(traced, fit)
        log = candidates.Log(out, _about(scorer, documents, splits, fit, seed, traced.names), resume=resume)
        executor = stack.enter_context(candidates.workers(traced, yardstick, folder, workers, ray))
        evaluator = candidates.Evaluator(traced, yardstick, log, executor)
        scored = search.search(evaluator, _TIERS[tier], budget, seed, _Teller(began))
        note("judging the front on documents that the search has not seen")
        found = search.judged(traced, scored)
    if plot is not None:
        from gguf_fusion.discover.plot import draw_front

        draw_front(found, scored, plot / "front.png")
    if as_json:
        print_json({**found.as_json(), "seed": seed, "seconds": round(time.monotonic() - began, 1)})
    else:
        _print(found)


def _with_domain(document: Document) -> Document:
    path = Path(document.name)
    return Document(document.name, document.text, path.resolve().parent.name)


def _traces(scorer: Scorer, documents: list[Document], clock: _Clock) -> Iterator[tuple[str, str, Trace]]:
    for document in documents:
        clock.label = document.name
        with scorer.trace(document, clock.advance) as trace:
            yield document.name, document.domain, trace


def _about(
    scorer: Scorer, documents: list[Document], splits: dict[str, str], fit: Any, seed: int, names: tuple[str, ...]
) -> dict[str, Any]:
    """What makes a search what it is: its results may only be mixed with those of the same one."""
    return {
        "version": __version__,
        "seed": seed,
        "experts": list(names),
        "documents": [[d.name, splits[d.name], scorer.key(d.text)] for d in documents],
        "fit": [doc.name for doc in fit],
    }


class _Teller:
    """One line on stderr per batch, at most one a second."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._told = -1.0
        self._n = 0

    def __call__(self, tier: str, n: int, best: float) -> None:
        self._n += n
        now = time.monotonic() - self._began
        if now - self._told >= 1.0:
            self._told = now
            note(f"{now:.0f} s, {tier}: {self._n} candidates, best {best:.4f} bits per byte on the fit documents")


def _print(found: Any) -> None:
    rows = [
        (
            str(one.tier), f"{one.fit_bpb:.4f}", f"{one.select_bpb:.4f}", f"{one.worst:.4f}", f"{one.decodes:.3f}",
            str(one.nodes), one.expression,
        )
        for one in found.front
    ]  # fmt: skip
    print_table(("TIER", "FIT", "SELECT", "WORST", "DECODES/BYTE", "NODES", "STRATEGY"), rows)
    print_line()
    compared = [
        (
            a.name, f"{a.bpb:.4f}", f"{100 * a.gain.relative:+.2f} %",
            f"{100 * a.gain.relative_low:+.2f} … {100 * a.gain.relative_high:+.2f} %",
        )
        for a in found.against
    ]  # fmt: skip
    print_line(f"on test documents the winner has {found.test_bpb:.4f} bits per byte; against")
    print_table(("STRATEGY", "BITS/BYTE", "GAIN", "95 %"), compared)
    print_line()
    losing = [name for name, row in found.domains.items() if row["relative_gain"] < 0.0]
    if losing:
        print_line(f"worse than the best single expert there: {', '.join(losing)}")
    if not np.any([a.gain.relative_low > 0.0 for a in found.against]):
        print_line("no gain that this many documents could prove")
    print_line(found.winner)
