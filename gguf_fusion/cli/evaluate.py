"""``gguf-fusion score``: bits per byte of experts, their bridges and their fusion on files."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import numpy as np

from gguf_fusion import hub
from gguf_fusion.cli._output import ConsoleProgress, human_size, note, print_json, print_line, print_table, warn
from gguf_fusion.cli._registry import registry_option, require_extra, weighted
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.cover.canonical import complete_length
from gguf_fusion.cover.tree import DEFAULT_EPSILON, EXACT_EPSILON
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate import report, trace_cache
from gguf_fusion.evaluate.baselines import UNTUNED, Checks, checks, fitted_pool, given_of
from gguf_fusion.evaluate.exponents import MOST_ROWS, Rows, fitted_exponents, rows_of
from gguf_fusion.evaluate.score import Document, DocumentScore, score_trace, total
from gguf_fusion.evaluate.scorer import Scorer, Settings
from gguf_fusion.evaluate.split import split, together
from gguf_fusion.evaluate.windows import CONTEXT, SIZE
from gguf_fusion.expressions import DEFAULT as DEFAULT_STRATEGY
from gguf_fusion.expressions import parse
from gguf_fusion.members import Member, members_from, members_of
from gguf_fusion.options import Options


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, type=click.Path(path_type=Path))
@click.option("-e", "--expert", "experts", metavar="REF[=WEIGHT]", multiple=True, help="An expert (repeatable).")
@click.option("--ensemble", default=DEFAULT_ENSEMBLE, show_default=True, help="An ensemble of the registry.")
@click.option("--strategy", "strategies", multiple=True, help="pool(weight rule) (repeatable).")
@click.option("--epsilon", type=float, help="Bits per byte that unevaluated segmentations may cost.")
@click.option("--exact", is_flag=True, help="The epsilon at which one expert alone loses nothing measurable.")
@click.option("--split", "splits", is_flag=True, help="Choose the best expert on half of the files, report the rest.")
@click.option(
    "--dev", multiple=True, metavar="FILE", type=click.Path(path_type=Path), help="Choose it on this (repeatable)."
)
@click.option(
    "--domain", "domains", metavar="NAME=GLOB", multiple=True, help="Files of a domain, if not its folder (repeatable)."
)
@click.option("--per-document", is_flag=True, help="Every file's scores too.")
@click.option("--window", type=int, default=SIZE, show_default=True, help="Bytes per window of a long document.")
@click.option("--context", type=int, default=CONTEXT, show_default=True, help="Unscored bytes at a window's start.")
@click.option("--max-bytes", type=int, help="Bytes read of each file.")
@click.option("-c", "--n-ctx", type=int, help="Context of every expert in its tokens, if not that of a window.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Threads for all experts together.")
@click.option("-ngl", "--n-gpu-layers", type=int, help="Layers of every expert on a GPU; -1 = all.")
@click.option("--lanes", type=click.Choice(["auto", "serial", "lanes"]), default="auto", show_default=True)
@click.option(
    "--traces",
    type=click.Choice(["keep", "off", "list", "clear"]),
    default="keep",
    show_default=True,
    help="What the experts expected is kept for the next strategy; list or clear what is kept.",
)
@click.option(
    "--baselines",
    is_flag=True,
    help="Also: uniform and Bayes mixtures, weights and exponents fitted on dev, checks with copies and with noise.",
)
@click.option("--larger", metavar="REF", multiple=True, help="A single larger model to compare with (repeatable).")
@click.option("--plot", type=click.Path(path_type=Path), help="Folder for pictures: gain, weights, reliability.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@registry_option
def score(
    registry: Registry,
    files: tuple[Path, ...],
    experts: tuple[str, ...],
    ensemble: str,
    strategies: tuple[str, ...],
    epsilon: float | None,
    exact: bool,
    splits: bool,
    dev: tuple[Path, ...],
    domains: tuple[str, ...],
    per_document: bool,
    window: int,
    context: int,
    max_bytes: int | None,
    threads: int | None,
    traces: str,
    baselines: bool,
    larger: tuple[str, ...],
    plot: Path | None,
    offline: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Bits per byte of each expert with its own tokens, of each through the byte bridge, and of their fusion.

    All are scored on the same bytes: the first 32 of a document are context, END is not counted, long documents are cut
    into windows. Files are read as bytes; they need not be UTF-8.

    With --split or --dev the best single expert is chosen on dev documents, and all figures are those of the others.
    """
    if traces in ("list", "clear"):
        _show_traces(as_json=as_json) if traces == "list" else _clear_traces(as_json=as_json)
        return
    if plot is not None:
        require_extra("plot", "matplotlib")
    if splits and dev:
        raise UsageError("--split divides the files by itself; give one of --split and --dev")
    globs = _globs(domains)
    documents = [replace(_read(file, max_bytes), domain=_domain(file, globs)) for file in (*dev, *files)]
    if not files:
        raise UsageError("expected at least one FILE to score, got none")
    n_dev = _dev_first(documents, splits=splits, n_dev=len(dev))
    members, spec_strategy, spec_epsilon = _members(registry, experts, ensemble)
    wanted = {text: parse(text) for text in strategies or (spec_strategy or DEFAULT_STRATEGY,)}
    first = next(iter(wanted.values()))
    if baselines:
        wanted |= {text: parse(text) for text in UNTUNED}
    if exact and epsilon is not None:
        raise UsageError("--exact sets the epsilon; give one of --exact and --epsilon")
    chosen = EXACT_EPSILON if exact else epsilon
    chosen = (DEFAULT_EPSILON if spec_epsilon is None else spec_epsilon) if chosen is None else chosen
    settings = Settings(epsilons=(chosen,), window=window, context=context)
    load = Options(n_threads=threads, **options)
    if load.n_ctx is not None and load.n_ctx < window:
        warn(f"windows of {window} bytes may hold more than {load.n_ctx} tokens (-c); a smaller --window always fits")
    transfers = ConsoleProgress()
    active = [member for member in members if member.weight > 0.0]
    paths = [hub.pull(m.ref, registry, progress=transfers, offline=offline)[0] for m in active]
    scorer = Scorer.of_members(active, paths, load, settings, keep=traces == "keep")
    weights = np.array([member.weight for member in active])
    roles = [member.spec.role for member in active]
    scores: list[DocumentScore] = []
    given: list[Any] = []
    rows: list[Rows] = []
    every = 1 + sum(len(document.text) for document in documents[:n_dev]) // MOST_ROWS
    checked: list[Checks] = []
    with scorer, _Clock(sum(len(d.text) for d in documents if not scorer.is_cached(d.text))) as clock:
        for i, document in enumerate(documents):
            clock.label = document.name
            if baselines and given and i == n_dev:
                fitted = [fitted_pool(given, [member.spec.name for member in active]), fitted_exponents(rows)]
                wanted |= {text: parse(text) for text in fitted}
            with scorer.trace(document, clock.advance) as trace:
                scores.append(score_trace(document, trace, wanted, weights, roles))
                if baselines and trace.scored.any():
                    if i < n_dev:
                        given.append(given_of(trace, weights))
                        rows.append(rows_of(trace, document.domain, weights, every))
                    elif not checked:
                        checked.append(checks(trace, first, weights))
    for ref in larger:
        scores = _beside(scores, documents, ref, registry, load, settings, offline=offline, keep=traces == "keep")
    scores, dev_scores = scores[n_dev:], scores[:n_dev]
    if n_dev and not sum(s.n_bytes for s in dev_scores):
        raise UsageError("nothing to choose on: the dev documents have no more than their 32 bytes of context")
    for unscored in (s for s in scores if not s.n_bytes):
        warn(f"{unscored.name}: {unscored.total_bytes} bytes, all of them context; nothing was scored")
    if not sum(s.n_bytes for s in scores):
        raise UsageError("nothing to score: the first 32 bytes of a document are context; give longer texts")
    best = report.best_on(dev_scores or scores)
    pictures = [] if plot is None else _draw(scores, best, plot, chosen_here=not n_dev)
    if as_json:
        parts = {"dev": [s.name for s in dev_scores], "test": [s.name for s in scores]} if n_dev else None
        found = report.as_json(scores, dev=dev_scores, per_document=per_document)
        if splits and not n_dev:
            found |= {"comparison": {}, "domains": {}}
        if checked:
            found["checks"] = asdict(checked[0])
        print_json({**found, "epsilon": chosen, "split": parts, "plots": [str(p) for p in pictures]})
    else:
        _print(scores, best, per_document=per_document, compare=bool(n_dev) or not splits, chosen_here=not n_dev)
        for check in checked:
            print_line(f"\ncopies of one expert gain {check.copies_gain:+.6f} bits per byte; "
                       f"an expert that knows nothing ends with the Bayes weight {check.noise_weight:.2g}")  # fmt: skip
        if n_dev:
            print_line(f"\n{best} is best on {n_dev} dev documents; the figures are those of the other {len(scores)}")


def _beside(
    scores: list[DocumentScore], documents: list[Document], ref: str, registry: Registry, load: Options,
    settings: Settings, *, offline: bool, keep: bool,
) -> list[DocumentScore]:  # fmt: skip
    """The scores with those of one more single model, read by itself on the same documents."""
    [member] = members_from([ref], registry, [1.0])
    path = hub.pull(member.ref, registry, progress=ConsoleProgress(), offline=offline)[0]
    name = member.spec.name
    if scores and name in scores[0].experts:
        raise UsageError(f"--larger {ref}: expected a model that is no member, got {name}, which is one")
    with (
        Scorer.of_members([member], [path], load, settings, keep=keep) as scorer,
        _Clock(sum(len(d.text) for d in documents if not scorer.is_cached(d.text))) as clock,
    ):
        found = []
        for score, document in zip(scores, documents, strict=True):
            clock.label = f"{name}: {document.name}"
            with scorer.trace(document, clock.advance) as trace:
                alone = score_trace(document, trace, {}, np.ones(1)).experts[name]
            found.append(replace(score, larger={**score.larger, name: alone}))
    return found


def _draw(scores: list[DocumentScore], best: str | None, folder: Path, *, chosen_here: bool) -> list[Path]:
    from gguf_fusion.evaluate.plot import draw_all

    domains = list(dict.fromkeys(score.domain for score in scores))
    compared = {d: report.comparison([s for s in scores if s.domain == d], best, chosen_here=chosen_here)
                for d in domains}  # fmt: skip
    if len(domains) > 1:
        compared["all"] = report.comparison(scores, best, chosen_here=chosen_here)
    paths = draw_all(scores, total(scores), compared, folder)
    note(f"pictures: {', '.join(map(str, paths))}")
    return paths


def _members(
    registry: Registry, experts: tuple[str, ...], ensemble: str
) -> tuple[list[Member], str | None, float | None]:
    """(members, the ensemble's strategy, its epsilon)."""
    if experts:
        refs, weights = weighted(experts)
        return members_from(refs, registry, weights), None, None
    spec = registry.ensemble(ensemble)
    return members_of(spec, registry), spec.strategy, spec.epsilon


def _read(file: Path, max_bytes: int | None) -> Document:
    if max_bytes is not None and max_bytes < 1:
        raise UsageError(f"--max-bytes: expected at least 1, got {max_bytes}")
    try:
        with file.open("rb") as stream:
            text = stream.read(-1 if max_bytes is None else max_bytes)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; expected a file to score") from None
    # A character cut in two by --max-bytes would be scored as broken text.
    return Document(str(file), text[: complete_length(text)] if len(text) == max_bytes else text)


def _globs(domains: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [tuple(text.split("=", 1)) for text in domains]
    for text, pair in zip(domains, pairs, strict=True):
        if len(pair) != 2 or not all(pair):
            raise UsageError(f"--domain: expected NAME=GLOB such as code=*.py, got {text!r}")
    return [(pair[0], pair[1]) for pair in pairs]


def _domain(file: Path, globs: list[tuple[str, str]]) -> str:
    return next((name for name, glob in globs if fnmatch(str(file), glob)), file.absolute().parent.name)


def _dev_first(documents: list[Document], *, splits: bool, n_dev: int) -> int:
    """Put the dev documents first; how many there are. Says so where documents cannot be split or overlap."""
    if not splits:
        sides = [{i < n_dev for i in group} for group in together(documents)] if n_dev else []
        if any(len(side) > 1 for side in sides):
            warn("dev and scored files hold near-duplicates of each other: the figures favour what was chosen on dev")
        return n_dev
    dev, test = split(documents)
    if not dev or not test:
        warn("these documents cannot be split (one document, or near-duplicates of one another): nothing is claimed")
        return 0
    documents[:] = [documents[i] for i in (*dev, *test)]
    return len(dev)


def _print(
    scores: list[DocumentScore], best: str | None, *, per_document: bool, compare: bool, chosen_here: bool
) -> None:
    if per_document:
        for one in scores:
            if one.n_bytes:
                print_line(f"{one.name}: {one.n_bytes} of {one.total_bytes} bytes scored")
                _print_tables(one, {})
                print_line()
    overall = total(scores)
    print_line(f"{len(scores)} document{'s' * (len(scores) > 1)}, {overall.n_bytes} bytes scored; bits per byte")
    _print_tables(overall, report.comparison(scores, best, chosen_here=chosen_here) if compare else {})
    if compare and chosen_here and len(overall.experts) > 1:
        note("the best expert was chosen on these same documents: no p-values against it (use --split or --dev)")
    if overall.floor_hits:
        warn(f"{overall.floor_hits} probabilities of 0: the averages that hold one are void")


def _print_tables(one: DocumentScore, compared: dict[str, Any]) -> None:
    print_table(report.EXPERT_HEADER, report.expert_rows(one))
    print_line()
    print_table(report.fused_header(one), report.fused_rows(one, compared))


def _show_traces(*, as_json: bool) -> None:
    found = trace_cache.stored()
    if as_json:
        print_json([{"key": t.key, "path": str(t.path), "bytes": t.size_bytes, **t.about} for t in found])
        return
    rows = [
        (t.key[:12], human_size(t.size_bytes), "+".join(t.about.get("names", "?")), t.about.get("document", "?"))
        for t in found
    ]
    print_table(("KEY", "SIZE", "EXPERTS", "DOCUMENT"), rows)


def _clear_traces(*, as_json: bool) -> None:
    n, size = trace_cache.clear()
    if as_json:
        print_json({"removed": n, "bytes": size})
    else:
        print_line(f"removed {n} trace{'s' * (n != 1)}, {human_size(size)} freed")


class _Clock:
    """Progress of reading, on stderr: a bar with the time left on a terminal, else a line every tenth."""

    def __init__(self, total_bytes: int) -> None:
        self.label = ""
        self._total = total_bytes
        self._done = self._told = 0
        self._began = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> _Clock:
        if self._total and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True)
        return self

    def advance(self, n_bytes: int) -> None:
        self._done += n_bytes
        self._total = max(self._total, self._done)  # a damaged trace was thought to be there, and is read again
        if self._bar is not None:
            self._bar.set_description(Path(self.label).name, refresh=False)
            self._bar.update(n_bytes)
        elif 10 * self._done // self._total > self._told:
            self._told = 10 * self._done // self._total
            left = (time.monotonic() - self._began) * (self._total / self._done - 1.0)
            note(f"{10 * self._told} % of {human_size(self._total)} read, {left:.0f} s left")

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
