"""``gguf-fusion compat``: how the vocabularies of experts relate."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click

from gguf_fusion import hub
from gguf_fusion.cli._output import ConsoleProgress, print_json, print_line, print_pairs
from gguf_fusion.cli._registry import registry_option
from gguf_fusion.compat import Classes, Report, compare, pairs
from gguf_fusion.config import Registry
from gguf_fusion.errors import UsageError
from gguf_fusion.members import members_from, members_of
from gguf_fusion.preview import VocabularyReader

_TEXT = (
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2\n\nThe kettle boiled over while nobody was "
    "looking; 42 cups of tea went cold. Grüße aus Köln, à bientôt, до свидания!\n"
)


@click.command()
@click.argument("models", metavar="A B...", nargs=-1)
@click.option("--text", "file", type=click.Path(path_type=Path), help="Text whose tokens are compared.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="A list with one object per pair.")
@registry_option
def compat(registry: Registry, models: tuple[str, ...], file: Path | None, offline: bool, as_json: bool) -> None:
    """Compare the vocabularies of experts (or of an ensemble): which pieces they share, and which bridge they need.

    Only vocabularies are read. Identical ones are fused token by token, all others byte by byte.
    """
    try:
        text = _TEXT.encode() if file is None else file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; expected a text") from None
    members = []
    for model in models:
        is_ensemble = model in registry.ensembles
        members += members_of(registry.ensemble(model), registry) if is_ensemble else members_from([model], registry)
    if len(members) < 2:
        raise UsageError("expected at least two experts to compare, or an ensemble")
    progress = ConsoleProgress()
    with ExitStack() as stack:
        paths = [hub.pull(member.ref, registry, progress=progress, offline=offline)[0] for member in members]
        readers = [
            stack.enter_context(VocabularyReader.opened(member, path))
            for member, path in zip(members, paths, strict=True)
        ]
        reports = [compare(one, other, text) for one, other in pairs(readers)]
    if as_json:
        print_json([{**asdict(report), "bridge": report.bridge} for report in reports])
        return
    for report in reports:
        _print(report)


def _print(report: Report) -> None:
    a, b = report.names
    print_line(f"{a} and {b}: " + ("one vocabulary" if report.identical else "different vocabularies"))
    facts = {
        "ids": f"{report.n_vocab[0]} and {report.n_vocab[1]}, {report.same_ids} mean the same in both",
        "pieces": f"{report.pieces[0]} and {report.pieces[1]}, {report.shared} are the same bytes",
        f"{a} in {b}": _shares(report.forth),
        f"{b} in {a}": _shares(report.back),
    }
    if report.text is not None:
        on = report.text
        facts["on the text"] = (
            f"{on.n_tokens[0]} and {on.n_tokens[1]} tokens, {on.shared_borders} borders in common; "
            f"{on.straddling[0]} and {on.straddling[1]} tokens have a border of the other inside"
        )
    facts["bridge"] = "token by token" if report.bridge == "token" else "byte by byte"
    print_pairs(facts)
    print_line()


def _shares(classes: Classes) -> str:
    total = max(1, classes.exact + classes.approx + classes.unmatched)
    exact, approx, unmatched = (100 * n / total for n in (classes.exact, classes.approx, classes.unmatched))
    return f"{exact:.1f} % exact, {approx:.1f} % by a first piece only, {unmatched:.1f} % not at all"
