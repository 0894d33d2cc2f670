"""``gguf-fusion router``: train a router on your texts, refine it by preferences, and describe one."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gguf_fusion import __version__, hub
from gguf_fusion.cli._output import ConsoleProgress, note, print_json, print_line, print_pairs, print_table
from gguf_fusion.cli._registry import registry_option, require_extra
from gguf_fusion.cli._texts import read_texts
from gguf_fusion.cli.discover import _with_domain
from gguf_fusion.cli.evaluate import _members, _read
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.score import Document
from gguf_fusion.hub.digests import model_digest
from gguf_fusion.hub.store import sha256_of
from gguf_fusion.members import members_from, router_member, with_router
from gguf_fusion.options import LoadKeywords


@click.group()
def router() -> None:
    """A small expert that decides, at each step, which expert speaks (FusionRoute)."""


@router.command()
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--data", "data", multiple=True, type=click.Path(path_type=Path), help="A file to learn from (repeatable)."
)
@click.option("-e", "--expert", "experts", metavar="REF", multiple=True, help="An expert (repeatable).")
@click.option("--ensemble", default=DEFAULT_ENSEMBLE, show_default=True, help="An ensemble of the registry.")
@click.option(
    "--router", "router_ref", metavar="REF", help="The expert whose hidden state decides.  [default: the smallest]"
)
@click.option(
    "--extra", "extras", multiple=True, default=("since",), help="A feature beside the hidden state (repeatable)."
)
@click.option(
    "--lora",
    type=click.Path(path_type=Path),
    help="A LoRA adapter (GGUF) for the router; experts stay as they are.",
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("router.safetensors"), show_default=True)
@click.option("--epochs", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--ablation/--no-ablation", default=True, show_default=True, help="Also train with other features.")
@click.option("--max-bytes", type=int, help="Bytes read of each file.")
@click.option("--plot", type=click.Path(path_type=Path), help="Folder for a picture of what it was compared with.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@registry_option
def train(
    registry: Registry,
    files: tuple[Path, ...],
    data: tuple[Path, ...],
    experts: tuple[str, ...],
    ensemble: str,
    router_ref: str | None,
    extras: tuple[str, ...],
    lora: Path | None,
    out: Path,
    epochs: int,
    seed: int,
    ablation: bool,
    max_bytes: int | None,
    plot: Path | None,
    offline: bool,
    as_json: bool,
) -> None:
    """Train a router on your files and judge it on those it has not seen.

    Files are split by document: half to train on, a quarter to stop on, a quarter to judge once. Files of one folder
    are one domain; give at least four of each. The experts' files stay as they are; only the head (a few thousand
    numbers) is trained and written, with a card that says how it did.
    """
    from gguf_fusion.discover import corpus
    from gguf_fusion.discover.routing import learn
    from gguf_fusion.router.head import EXTRAS

    require_extra("discover", "safetensors")
    if plot is not None:
        require_extra("plot", "matplotlib")
    unknown = [name for name in extras if name not in EXTRAS]
    if unknown:
        raise UsageError(f"--extra: expected one of {', '.join(EXTRAS)}, got {unknown[0]!r}")
    documents = [_with_domain(_read(file, max_bytes)) for file in (*files, *data)]
    if not documents:
        raise UsageError("expected files to learn from (FILE... or --data FILE), got none")
    members, _, _ = _members(registry, experts, ensemble)
    names = [member.spec.name for member in members]
    mine = tuple(names)
    transfers = ConsoleProgress()
    paths = [hub.pull(m.ref, registry, progress=transfers, offline=offline)[0] for m in members]
    smallest = min(range(len(paths)), key=lambda i: paths[i].stat().st_size)
    chosen = members[smallest] if router_ref is None else members_from([router_ref], registry)[0]
    adapter = None
    if lora is not None:
        if not lora.is_file():
            raise UsageError(f"--lora: no such file: {lora}")
        adapter = {"base": chosen.ref, "path": str(lora.resolve()), "sha256": sha256_of(lora)}
        chosen = router_member(f"{chosen.spec.name}+{lora.stem}", adapter, registry)
    if chosen.spec.name not in names:
        members, names = [*members, chosen], [*names, chosen.spec.name]
        paths.append(hub.pull(chosen.ref, registry, progress=transfers, offline=offline)[0])
    at = names.index(chosen.spec.name)
    began = time.monotonic()
    splits = corpus.split_documents([(d.name, d.domain, d.text) for d in documents], seed)
    with read_texts(documents, splits, members, paths, at, adapter) as (traced, states):
        learned = learn(
            traced,
            states,
            mine,
            names[at],
            model_digest(paths[at]),
            extras=extras,
            ablation=ablation,
            seed=seed,
            epochs=epochs,
            tell=note,
        )
    card = {
        **learned.as_json(),
        **({} if adapter is None else {"lora": adapter}),
        "version": __version__,
        "seed": seed,
        "models": {name: model_digest(path) for name, path in zip(names, paths, strict=True)},
        "documents": [[d.name, splits[d.name]] for d in documents],
        "seconds": round(time.monotonic() - began, 1),
    }
    replace(learned.head, card=card).save(out)
    if plot is not None:
        from gguf_fusion.discover.plot import draw_compared

        draw_compared(learned.compared, plot / "router.png")
    if as_json:
        print_json({"out": str(out), **card})
        return
    rows = [_row(one.name, one.bpb, one.gain) for one in learned.compared]
    print_table(("TEST DOCUMENTS", "BITS/BYTE", "GAIN", "95 %"), rows)
    print_line()
    print_line(f"{out}: {'hard' if learned.head.hard else 'soft'} selection, lambda {learned.head.lam:.3f}, "
               f"accuracy {100 * learned.accuracy:.1f} %")  # fmt: skip


def _row(name: str, bpb: float, gain: Any) -> tuple[str, ...]:
    if gain is None:
        return name, f"{bpb:.4f}", "", ""
    interval = f"{100 * gain.relative_low:+.2f} … {100 * gain.relative_high:+.2f} %"
    return name, f"{bpb:.4f}", f"{100 * gain.relative:+.2f} %", interval


@router.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-e", "--expert", "experts", metavar="REF", multiple=True, help="An expert (repeatable).")
@click.option("--ensemble", default=DEFAULT_ENSEMBLE, show_default=True, help="An ensemble of the registry.")
@click.option("--data", "data", multiple=True, type=click.Path(path_type=Path),
              help="Ordinary text that the head goes on learning from (repeatable).")  # fmt: skip
@click.option("--answers", type=click.Path(path_type=Path), default=Path("answers.jsonl"), show_default=True,
              help="Where answers are kept; those that are there are not asked for again.")  # fmt: skip
@click.option("--samples", type=click.IntRange(min=0), default=3, show_default=True,
              help="Answers per prompt and expert besides the greedy one.")  # fmt: skip
@click.option("--category", help="Only the prompts of one category.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first prompts.")
@click.option("--max-bytes", type=click.IntRange(min=1), help="Bytes of an answer at most.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("refined.safetensors"), show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the split of the prompts.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Threads for all experts together.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@registry_option
def refine(
    registry: Registry,
    file: Path,
    experts: tuple[str, ...],
    ensemble: str,
    data: tuple[Path, ...],
    answers: Path,
    samples: int,
    category: str | None,
    limit: int | None,
    max_bytes: int | None,
    out: Path,
    seed: int,
    threads: int | None,
    offline: bool,
    as_json: bool,
) -> None:
    """Refine a trained router by preferences: answers that pass their checks over answers that do not.

    Every expert and the router answer the prompts of the battery; the answers are kept as they come, so that an
    interrupted run goes on. Half of the prompts teach lambda, a quarter says when to stop, a quarter judges. The
    experts stay as they are; the head learns from --data only, as the paper has it. With so few prompts expect a wide
    interval.
    """
    from gguf_fusion.battery import preferences
    from gguf_fusion.battery.items import items
    from gguf_fusion.router.head import Head

    head = Head.load(file)
    found = [replace(item, max_bytes=min(item.max_bytes, max_bytes or item.max_bytes)) for item in items(category)]
    found = found[:limit]
    about = {"router": preferences.digest(file), "experts": list(experts) or ensemble, "max_bytes": max_bytes}
    kept = preferences.Kept(answers, about)
    documents = [_with_domain(_read(text, None)) for text in data]
    text = _text(registry, head, experts, ensemble, documents, seed, offline=offline) if documents else None
    given: LoadKeywords = {"router": file, "n_threads": threads, "space": "byte"}
    with ExitStack() as stack:
        if experts:
            loaded = Ensemble.from_files(experts, registry=registry, offline=offline, **given)
        else:
            loaded = Ensemble.from_registry(ensemble, registry=registry, offline=offline, **given)
        stack.enter_context(loaded)
        try:
            preferences.sample(loaded, found, samples, kept, note)
        except KeyboardInterrupt:
            note(f"{len(kept.results)} answers are kept in {answers}; the same command goes on from there")
            raise
        refined = preferences.learn(loaded, head, found, kept, seed, note, text)
    card = {**head.card, "preferences": {**refined.as_json(), "seed": seed, "answers": len(kept.results)}}
    replace(refined.head, card=card).save(out)
    if as_json:
        print_json({"out": str(out), **card["preferences"]})
        return
    _print_refined(card["preferences"])
    print_line(f"{out}: lambda {refined.lam_before:.3f} -> {refined.head.lam:.3f}")


def _text(
    registry: Registry, head: Any, experts: tuple[str, ...], ensemble: str, documents: list[Document], seed: int, *,
    offline: bool,
) -> Any:  # fmt: skip
    """(fit, select): what the head learns from besides preferences, see ``discover.preferences.refine``."""
    from gguf_fusion.discover.corpus import split_documents
    from gguf_fusion.discover.hidden import examples

    found, _, _ = _members(registry, experts, ensemble)
    members = with_router([m for m in found if m.weight > 0.0], head, registry)
    paths = [hub.pull(m.ref, registry, progress=ConsoleProgress(), offline=offline)[0] for m in members]
    at = [m.spec.name for m in members].index(head.router)
    splits = split_documents([(d.name, d.domain, d.text) for d in documents], seed)
    with read_texts(documents, splits, members, paths, at, head.card.get("lora")) as (traced, states):
        mine, own = [traced.names.index(name) for name in head.experts], traced.names.index(head.router)
        parts = [traced.of(split) for split in ("fit", "select")]
        if not all(parts):
            raise UsageError("--data: expected at least four documents per domain, so that some can be held out")
        return tuple(
            examples(traced, part, [states[doc.name] for doc in part], mine, own, head.extras)[0] for part in parts
        )


def _print_refined(facts: dict[str, Any]) -> None:
    rows = [
        (what, f"{100 * one['before']:.1f} %", f"{100 * one['after']:.1f} %", f"{100 * one['gain']:+.1f}",
         f"{100 * one['low']:+.1f} … {100 * one['high']:+.1f}", str(one["n"]))
        for what, one in (("better answer likelier", facts["ranked"]), ("greedy answers passed", facts["passed"]))
        if one is not None
    ]  # fmt: skip
    print_table(("TEST PROMPTS", "BEFORE", "AFTER", "POINTS", "95 %", "PROMPTS"), rows)
    print_line()


@router.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(file: Path, as_json: bool) -> None:
    """Describe a trained router: experts, features, data and how it did."""
    from gguf_fusion.router.head import Head

    head = Head.load(file)
    facts = {
        "experts": list(head.experts), "router": head.router, "router_sha256": head.router_sha256,
        "lambda": head.lam, "hard": head.hard, "extras": list(head.extras), "n_features": len(head.mean),
    }  # fmt: skip
    if as_json:
        print_json({**facts, "card": head.card})
        return
    print_pairs({key: ", ".join(value) if isinstance(value, list) else str(value) for key, value in facts.items()})
    compared = head.card.get("compared", [])
    if compared:
        print_line()
        rows = [(one["name"], f"{one['bpb']:.4f}", _relative(one)) for one in compared]
        print_table(("TEST DOCUMENTS", "BITS/BYTE", "GAIN"), rows)
    if "preferences" in head.card:
        print_line()
        _print_refined(head.card["preferences"])


def _relative(one: dict[str, Any]) -> str:
    return f"{100 * one['gain']['relative']:+.2f} %" if one.get("gain") else ""
