"""The preference stage from end to end: answers become pairs, pairs refine a head, and held-out pairs judge it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from gguf_fusion.discover.corpus import SPLITS, Corpus, Doc
from gguf_fusion.discover.hidden import States, examples
from gguf_fusion.discover.preferences import Answers, Judged, Pair, pairs_of, refine
from gguf_fusion.errors import UsageError
from gguf_fusion.router.head import Head

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked answer; ``document`` names its text, prompt included, in the corpus, ``start`` is its first byte."""

    prompt: str
    document: str
    start: int
    text: bytes
    passed: bool


@dataclass(frozen=True, slots=True)
class Refined:
    """A refined head and what held-out pairs say of it.

    before, after : share of pairs ranked right (the better answer is likelier per byte), mean margin in nats per byte
    change        : of that share, with its 95 % interval (bootstrap over prompts)
    """

    head: Head
    n_pairs: Mapping[str, int]
    n_prompts: Mapping[str, int]
    lam: tuple[float, float]
    before: tuple[float, float]
    after: tuple[float, float]
    change: tuple[float, float, float]

    def as_json(self) -> dict[str, Any]:
        """Plain data, without the head."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "head"}


def learn_preferences(
    head: Head,
    corpus: Corpus,
    states: Mapping[str, States],
    answers: Sequence[Answer],
    *,
    seed: int = 0,
    epochs: int = 60,
    tell: Callable[[str], None] = lambda text: None,
) -> Refined:
    """Refine ``head`` on pairs of answers; documents that are no answers are ordinary text for the head.

    Prompts are split: half to fit, a quarter to stop on, a quarter to judge. Raises UsageError with too few prompts
    that have both a right and a wrong answer.
    """
    docs = {doc.name: doc for doc in corpus.docs}
    kept = [answer for answer in answers if answer.document in docs and answer.text]
    pairs = pairs_of([(answer.prompt, answer.passed, answer.text) for answer in kept])
    split = _split([pair.prompt for pair in pairs], seed)
    parts = {name: [pair for pair in pairs if split[pair.prompt] == name] for name in SPLITS}
    if not all(parts.values()):
        raise UsageError(
            f"expected right and wrong answers to at least four prompts, got both for {len(split)}; "
            "sample more answers (--samples) or more prompts"
        )
    mine, own = [corpus.names.index(name) for name in head.experts], corpus.names.index(head.router)

    def of(some: Sequence[Doc]) -> Any:
        return examples(corpus, some, [states[doc.name] for doc in some], mine, own, head.extras)[0]

    prepared = Answers([of([_end_of(docs[a.document], a.start)]) for a in kept], head)
    named = {answer.document for answer in answers}
    text = {name: [doc for doc in corpus.of(name) if doc.name not in named] for name in ("fit", "select")}
    refined = refine(
        head, prepared, parts["fit"], parts["select"],
        (of(text["fit"]), of(text["select"])) if all(text.values()) else None,
        seed=seed, epochs=epochs, tell=lambda epoch, loss: tell(f"epoch {epoch + 1}: {loss:.4f} on held-out pairs"),
    )  # fmt: skip
    before, after = (prepared.judged(lam, parts["test"]) for lam in (head.lam, refined.lam))
    return Refined(
        head=refined,
        n_pairs={name: len(part) for name, part in parts.items()},
        n_prompts={name: len({pair.prompt for pair in part}) for name, part in parts.items()},
        lam=(head.lam, refined.lam),
        before=(float(before.ranked.mean()), float(before.margins.mean())),
        after=(float(after.ranked.mean()), float(after.margins.mean())),
        change=_change(before, after, parts["test"], seed),
    )


def _end_of(doc: Doc, start: int) -> Doc:
    """The end of a document, from its byte ``start`` on."""
    return replace(doc, start=min(doc.start + start, doc.stop))


def _split(prompts: Sequence[str], seed: int) -> dict[str, str]:
    """fit, select or test for each prompt; depends on names and seed only."""
    ranked = sorted(set(prompts), key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return {name: "fit" if i % 4 in (0, 2) else SPLITS[1 + i % 4 // 2] for i, name in enumerate(ranked)}


def _change(before: Judged, after: Judged, pairs: Sequence[Pair], seed: int) -> tuple[float, float, float]:
    """(change of the share of pairs ranked right, 95 % interval): prompts are drawn, not pairs."""
    moved = after.ranked.astype(np.float64) - before.ranked
    by_prompt = [np.array([k for k, p in enumerate(pairs) if p.prompt == name]) for name in {p.prompt for p in pairs}]
    sums = np.array([[moved[rows].sum(), len(rows)] for rows in by_prompt])
    random = np.random.default_rng(seed)
    drawn = sums[random.integers(len(sums), size=(_RESAMPLES, len(sums)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return float(moved.mean()), float(low), float(high)
