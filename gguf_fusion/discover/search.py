"""The whole search: tiers one after the other, then the front on documents that no tier has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gguf_fusion.discover.candidates import Evaluator, Scored, as_formula
from gguf_fusion.discover.corpus import Corpus, Doc
from gguf_fusion.discover.evolution import evolved, front
from gguf_fusion.discover.parameters import starting_points, tuned
from gguf_fusion.discover.stacking import stacked
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.statistics import Gain, bootstrap_gain
from gguf_fusion.expressions import DEFAULT
from gguf_fusion.formula.nodes import Expert

TIERS = (1, 2, 3)
FIT_BYTES = 24_000
"""Bytes per candidate in the search; more documents are left for the later splits."""

_RESCORED = 12
_SHARES = {1: 0.4, 3: 0.6}
"""Shares of the budget; stacks cost a handful of candidates only."""


@dataclass(frozen=True, slots=True)
class Finalist:
    """A front member with its bits per byte on fit and select documents."""

    expression: str
    tier: int
    fit_bpb: float
    select_bpb: float
    worst: float
    decodes: float
    nodes: int


@dataclass(frozen=True, slots=True)
class Against:
    """The winner against another strategy on the test documents; ``gain`` with its 95 % interval."""

    name: str
    bpb: float
    gain: Gain


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found; ``winner`` is the expression to run, chosen on select, judged once on test."""

    winner: str
    test_bpb: float
    domains: Mapping[str, Mapping[str, float]]
    against: tuple[Against, ...]
    front: tuple[Finalist, ...]
    n_candidates: int

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


Tell = Callable[[str, int, float], None]
"""Called with the tier's name, how many candidates came in, and the best bits per byte so far."""


def fit_documents(corpus: Corpus, n_bytes: int = FIT_BYTES) -> list[Doc]:
    """Documents to search on: of every domain in turn, until ``n_bytes`` are together."""
    by_domain: dict[str, list[Doc]] = {}
    for doc in corpus.of("fit"):
        by_domain.setdefault(doc.domain, []).append(doc)
    chosen: list[Doc] = []
    total = 0
    while total < n_bytes and any(by_domain.values()):
        for waiting in by_domain.values():
            if waiting and total < n_bytes:
                chosen.append(waiting.pop(0))
                total += chosen[-1].n_scored
    if not chosen:
        raise UsageError("no documents to fit on: give at least four documents, or one domain with four files")
    return chosen


def search(evaluator: Evaluator, tiers: Sequence[int], budget: int, seed: int, tell: Tell) -> list[Scored]:
    """Run the tiers; everything that was scored, in order. Each tier starts from what the ones before it found."""
    docs = evaluator.yardstick.docs
    scored: list[Scored] = []

    def take(name: str, batch: Sequence[Scored]) -> None:
        scored.extend(batch)
        tell(name, len(batch), min(one.bpb for one in scored))

    plain = [(text, 1, ()) for text in starting_points(evaluator.corpus)]
    take("starting points", evaluator.score(plain))
    if 1 in tiers:
        share = budget if tiers == (1,) else int(budget * _SHARES[1])
        for batch in tuned(evaluator, docs, share, seed):
            take("tier 1, parameters", batch)
    if 2 in tiers:
        for batch in stacked(evaluator, docs, _unique(scored)):
            take("tier 2, stacks", batch)
    if 3 in tiers:
        share = budget if tiers == (3,) else int(budget * _SHARES[3])
        for batch in evolved(evaluator, _unique(scored), share, seed):
            if batch:
                take("tier 3, formulae", batch)
    return scored


def judged(corpus: Corpus, scored: Sequence[Scored], default: str = DEFAULT) -> Found:
    """Score the front again on select, choose the winner there, and open the test documents once, for it alone.

    Raises UsageError where a split has no document.
    """
    select, test = corpus.of("select"), corpus.of("test")
    if not select or not test:
        raise UsageError("expected documents for all of fit, select and test; give at least four documents per domain")
    members = front(_unique(scored))[:_RESCORED]
    n_select = sum(doc.n_scored for doc in select)
    finalists = []
    for one in members:
        bits = float(corpus.bits(as_formula(one.expression).root, select).sum())
        finalists.append(
            Finalist(one.expression, one.tier, one.bpb, bits / n_select, one.worst, one.decodes, one.nodes)
        )
    finalists.sort(key=lambda f: (f.select_bpb, f.nodes, f.expression))
    winner = finalists[0].expression
    ours = corpus.bits(as_formula(winner).root, test)
    single = _best_single(corpus)
    equal = ", ".join(f'1*"{name}"' for name in corpus.names)
    others = {
        f"best single expert ({single})": f'formula("{single}")',
        "uniform linear pool": f"formula(linear({equal}))",
        f"untuned default {default}": f"formula(fuse({default}))",
    }
    n_bytes = np.array([doc.n_scored for doc in test], np.float64)
    domains = [doc.domain for doc in test]
    against = []
    for name, expression in others.items():
        theirs = corpus.bits(as_formula(expression).root, test)
        gain = bootstrap_gain(ours, theirs, n_bytes, domains)
        against.append(Against(name, float(theirs.sum() / n_bytes.sum()), gain))
    return Found(
        winner=winner,
        test_bpb=float(ours.sum() / n_bytes.sum()),
        domains=_by_domain(corpus, test, ours),
        against=tuple(against),
        front=tuple(finalists),
        n_candidates=len({one.expression for one in scored}),
    )


def _best_single(corpus: Corpus) -> str:
    """The expert with the fewest bits on fit and select documents together."""
    known = [*corpus.of("fit"), *corpus.of("select")]
    return min(corpus.names, key=lambda name: float(corpus.bits(Expert(name), known).sum()))


def _by_domain(corpus: Corpus, docs: Sequence[Doc], ours: Any) -> dict[str, dict[str, float]]:
    """Per domain: the winner's bits per byte and the best expert's there (chosen in hindsight, which favours it)."""
    domains = np.array([doc.domain for doc in docs])
    n_bytes = np.array([doc.n_scored for doc in docs], np.float64)
    singles = np.array([corpus.bits(Expert(name), docs) for name in corpus.names])
    found = {}
    for domain in sorted(set(domains)):
        here = domains == domain
        best = float(singles[:, here].sum(axis=1).min() / n_bytes[here].sum())
        bpb = float(ours[here].sum() / n_bytes[here].sum())
        found[str(domain)] = {"bpb": bpb, "best_single_bpb": best, "relative_gain": 1.0 - bpb / best}
    return found


def _unique(scored: Sequence[Scored]) -> list[Scored]:
    return list({one.expression: one for one in scored}.values())
