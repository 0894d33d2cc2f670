"""``gguf-fusion router``: train a router on your texts, and describe one."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gguf_fusion import __version__, hub
from gguf_fusion.cli._output import ConsoleProgress, note, print_json, print_line, print_pairs, print_table
from gguf_fusion.cli._registry import registry_option, require_extra
from gguf_fusion.cli.discover import _traces, _with_domain
from gguf_fusion.cli.evaluate import _Clock, _members, _read
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.scorer import Scorer, Settings
from gguf_fusion.hub.digests import model_digest
from gguf_fusion.hub.store import sha256_of
from gguf_fusion.load import Options, load_expert
from gguf_fusion.members import members_from, router_member


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
    offline: bool,
    as_json: bool,
) -> None:
    """Train a router on your files and judge it on those it has not seen.

    Files are split by document: half to train on, a quarter to stop on, a quarter to judge once. Files of one folder
    are one domain; give at least four of each. The experts' files stay as they are; only the head (a few thousand
    numbers) is trained and written, with a card that says how it did.
    """
    from gguf_fusion.discover import corpus
    from gguf_fusion.discover.hidden import cached_states
    from gguf_fusion.discover.routing import learn
    from gguf_fusion.experts.llama import LlamaExpert
    from gguf_fusion.router.head import EXTRAS

    require_extra("discover", "safetensors")
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
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gguf-fusion-")))
        scorer = stack.enter_context(Scorer.of_members(members, paths, Options(), Settings()))
        waiting = sum(len(d.text) for d in documents if not scorer.is_cached(d.text))
        with _Clock(waiting) as clock:
            traced = corpus.gather(
                _traces(scorer, documents, clock), splits, sum(len(d.text) for d in documents), folder
            )
        scorer.close()
        digest = model_digest(paths[at])
        loaded: list[LlamaExpert] = []

        def load() -> LlamaExpert:
            if not loaded:
                expert = load_expert(chosen.spec, paths[at], Options(), max_rows=32, hidden=True)
                loaded.append(stack.enter_context(expert))
            return loaded[0]

        note("reading the router's hidden states")
        reads_as = digest if adapter is None else f"{digest}+{adapter['sha256']}"
        states = {d.name: cached_states(load, reads_as, d.text) for d in documents if d.text}
        learned = learn(
            traced,
            states,
            mine,
            names[at],
            digest,
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


def _relative(one: dict[str, Any]) -> str:
    return f"{100 * one['gain']['relative']:+.2f} %" if one.get("gain") else ""
