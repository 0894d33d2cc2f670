"""``gguf-fusion router refine``: the second stage of a router, from answers that programs check."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from gguf_fusion import hub
from gguf_fusion.battery.items import CATEGORIES, Item, items
from gguf_fusion.battery.run import Result, answers
from gguf_fusion.cli._output import ConsoleProgress, note, print_json, print_line, print_table, warn
from gguf_fusion.cli._registry import registry_option, require_extra
from gguf_fusion.cli.discover import _traces, _with_domain
from gguf_fusion.cli.evaluate import _Clock, _members, _read
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.scorer import Scorer, Settings
from gguf_fusion.load import Options, load_expert
from gguf_fusion.members import with_router


@click.command()
@click.argument("file", metavar="ROUTER", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("texts", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("-e", "--expert", "experts", metavar="REF", multiple=True, help="An expert (repeatable).")
@click.option("--ensemble", default=DEFAULT_ENSEMBLE, show_default=True, help="An ensemble of the registry.")
@click.option("--out", type=click.Path(path_type=Path), help="[default: ROUTER with -refined in its name]")
@click.option("--answers", "kept", type=click.Path(path_type=Path), help="[default: OUT with .answers.jsonl behind it]")
@click.option("--category", "categories", multiple=True, type=click.Choice(CATEGORIES), help="Only these prompts.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first prompts of each category.")
@click.option("--samples", type=click.IntRange(min=1), default=2, show_default=True, help="Answers per prompt and way.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Threads for all experts together.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@registry_option
def refine(
    registry: Registry, file: Path, texts: tuple[Path, ...], experts: tuple[str, ...], ensemble: str, out: Path | None,
    kept: Path | None, categories: tuple[str, ...], limit: int | None, samples: int, seed: int, threads: int | None,
    offline: bool, as_json: bool,
) -> None:  # fmt: skip
    """Refine a trained router by preferences: answers to the battery's prompts, judged by its programs.

    Every expert alone and the routed ensemble answer each prompt; pairs of a right and a wrong answer move how much the
    router's own law counts (lambda), by the complementary preference loss of FusionRoute. FILEs are ordinary text that
    the head goes on learning from. Answers are kept as they come: after Ctrl-C the same command goes on where it was.
    48 prompts are few: expect no proof, look at the interval.
    """
    from gguf_fusion.discover import corpus
    from gguf_fusion.discover.hidden import cached_states
    from gguf_fusion.discover.refining import Answer, learn_preferences
    from gguf_fusion.experts.llama import LlamaExpert
    from gguf_fusion.router.head import Head

    require_extra("discover", "safetensors")
    head = Head.load(file)
    out = out or file.with_name(f"{file.stem}-refined{file.suffix}")
    kept = kept or out.with_name(f"{out.name}.answers.jsonl")
    documents = [_with_domain(_read(text, None)) for text in texts]
    members, _, _ = _members(registry, experts, ensemble)
    wanted = [
        item for category in (categories or CATEGORIES) for item in items(category)[: limit or len(items(category))]
    ]
    given = _answers(registry, file, experts, ensemble, wanted, range(seed, seed + samples), kept, threads, offline)
    prompts = {item.id: item.prompt for item in wanted}
    made = []
    for k, one in enumerate(given):
        start = (prompts[one.item] + "\n").encode()
        text = (one.answer or "").encode()
        made.append((Answer(one.item, f"answer {k}", len(start), text, bool(one.passed)), start + text))
    both = {
        name for name in prompts if len({answer.passed for answer, _ in made if answer.prompt == name}) == 2
    }  # the rest teaches nothing, and reading it costs
    made = [(answer, text) for answer, text in made if answer.prompt in both and answer.text]
    documents += [Document(answer.document, text, "answers") for answer, text in made]
    if not made:
        raise UsageError("no prompt has both a right and a wrong answer; sample more (--samples), or more prompts")
    active = with_router([m for m in members if m.weight > 0.0], head, registry)
    paths = [hub.pull(m.ref, registry, progress=ConsoleProgress(), offline=offline)[0] for m in active]
    at = [m.spec.name for m in active].index(head.router)
    splits = corpus.split_documents([(d.name, d.domain, d.text) for d in documents], seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gguf-fusion-")))
        options = Options(n_threads=threads)
        scorer = stack.enter_context(Scorer.of_members(active, paths, options, Settings()))
        with _Clock(sum(len(d.text) for d in documents if not scorer.is_cached(d.text))) as clock:
            n_bytes = sum(len(d.text) for d in documents)
            traced = corpus.gather(_traces(scorer, documents, clock), splits, n_bytes, folder)
        scorer.close()
        loaded: list[LlamaExpert] = []

        def load() -> LlamaExpert:
            if not loaded:
                expert = load_expert(active[at].spec, paths[at], options, max_rows=32, hidden=True)
                loaded.append(stack.enter_context(expert))
            return loaded[0]

        note("reading the router's hidden states")
        adapter = head.card.get("lora")
        reads_as = head.router_sha256 if adapter is None else f"{head.router_sha256}+{adapter['sha256']}"
        states = {d.name: cached_states(load, reads_as, d.text) for d in documents if d.text}
        refined = learn_preferences(head, traced, states, [answer for answer, _ in made], seed=seed, tell=note)
    report: dict[str, Any] = {**refined.as_json(), "n_answers": len(given), "seed": seed}
    replace(refined.head, card={**head.card, "preferences": report}).save(out)
    if as_json:
        print_json({"out": str(out), **report})
        return
    rows = [
        (label, f"{lam:.3f}", f"{100 * share:.0f} %", f"{margin:+.4f}")
        for label, lam, (share, margin) in zip(
            ("before", "after"), refined.lam, (refined.before, refined.after), strict=True
        )
    ]
    print_table(("HELD-OUT PAIRS", "LAMBDA", "RANKED RIGHT", "NATS PER BYTE"), rows)
    print_line()
    change, low, high = (100 * value for value in refined.change)
    print_line(f"{out}: {change:+.0f} points ({low:+.0f} … {high:+.0f}) on {refined.n_pairs['test']} pairs of "
               f"{refined.n_prompts['test']} prompts")  # fmt: skip


def _answers(
    registry: Registry, file: Path, experts: tuple[str, ...], ensemble: str, wanted: list[Item], seeds: range,
    kept: Path, threads: int | None, offline: bool,
) -> list[Result]:  # fmt: skip
    """Every answer that is asked for: those in the file ``kept``, and the others, added to it as they come."""
    found = _known(kept)
    asked = {item.id for item in wanted}
    given: dict[str, Any] = {"router": file, "n_threads": threads, "registry": registry, "offline": offline}
    with ExitStack() as stack:
        if experts:
            refs = [ref.partition("=")[0] for ref in experts]
            loaded = stack.enter_context(Ensemble.from_files(refs, **given))
        else:
            loaded = stack.enter_context(Ensemble.from_registry(ensemble, **given))
        known = {(one.item, one.who, one.seed) for one in found}
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.open("a", encoding="utf-8") as stream:
            for result in answers(loaded, wanted, (None,), list(seeds), note, known):
                stream.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
                stream.flush()
                found.append(result)
    return [one for one in found if one.item in asked and one.seed in seeds]


def _known(kept: Path) -> list[Result]:
    """The whole lines of an earlier run; a line that was cut off is left out."""
    if not kept.exists():
        return []
    found = []
    for line in kept.read_text(encoding="utf-8").splitlines():
        try:
            found.append(Result(**json.loads(line)))
        except (ValueError, TypeError):
            warn(f"{kept}: a damaged line is left out; its answer is asked for again")
    return found
