"""Candidates and their scores: evaluated once, written down at once, found again after an interruption."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gguf_fusion.discover.corpus import Corpus, Doc
from gguf_fusion.errors import GgufFusionError, StrategyError, UsageError
from gguf_fusion.expressions import parse
from gguf_fusion.formula.fuser import Formula, parse_formula
from gguf_fusion.formula.nodes import Expert, Fuse, Node


@dataclass(frozen=True, slots=True)
class Scored:
    """One candidate on the fit documents.

    bits       : per document;  bpb : bits per byte over all
    worst      : largest ratio, over the domains, of its bits to those of that domain's best expert
    decodes    : rows of all experts it needs per byte;  nodes : size of the tree
    tier, parents : where it comes from;  seconds : what the evaluation took
    """

    expression: str
    tier: int
    bits: tuple[float, ...]
    bpb: float
    worst: float
    decodes: float
    nodes: int
    parents: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def objectives(self) -> tuple[float, float, float, float]:
        """All to be minimised."""
        return self.bpb, self.worst, self.decodes, float(self.nodes)


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What candidates are measured against: bytes per document, and the best expert's bits per domain."""

    docs: tuple[Doc, ...]
    best: Mapping[str, float]

    @classmethod
    def of(cls, corpus: Corpus, docs: Sequence[Doc]) -> Yardstick:
        """The yardstick of some documents; the best expert of each domain is the one with fewest bits there."""
        singles = np.array([corpus.bits(Expert(name), docs) for name in corpus.names])
        domains = np.array([doc.domain for doc in docs])
        best = {domain: float(singles[:, domains == domain].sum(axis=1).min()) for domain in sorted(set(domains))}
        return cls(tuple(docs), best)


def evaluate(corpus: Corpus, yardstick: Yardstick, expression: str, tier: int, parents: Sequence[str] = ()) -> Scored:
    """Score a formula on the documents of the yardstick; one that leaves a step without mass scores infinity."""
    began = time.perf_counter()
    formula = parse_formula(expression, parse)
    docs = yardstick.docs
    try:
        bits = corpus.bits(formula.root, docs)
    except StrategyError:
        bits = np.full(len(docs), np.inf)
    n_bytes = sum(doc.n_scored for doc in docs)
    domains = np.array([doc.domain for doc in docs])
    worst = max(float(bits[domains == domain].sum()) / max(best, 1e-9) for domain, best in yardstick.best.items())
    used = [i for i, name in enumerate(corpus.names) if name in named(formula.root, corpus.names)]
    return Scored(
        expression=expression,
        tier=tier,
        bits=tuple(float(b) for b in bits),
        bpb=float(bits.sum()) / n_bytes,
        worst=worst,
        decodes=sum(doc.decodes[i] for doc in docs for i in used) / n_bytes,
        nodes=sum(1 for _ in formula.root.walk()),
        parents=tuple(parents),
        seconds=round(time.perf_counter() - began, 3),
    )


def named(root: Node, names: Iterable[str]) -> set[str]:
    """Experts that a formula reads; a whole strategy reads all."""
    nodes = list(root.walk())
    if any(isinstance(node, Fuse) for node in nodes):
        return set(names)
    return {node.name for node in nodes if isinstance(node, Expert)}


class Log:
    """JSON lines: first what the search was run with, then one line per candidate, flushed as they come."""

    def __init__(self, path: Path | None, about: Mapping[str, Any], *, resume: bool) -> None:
        """Raises UsageError for a file of another search, or one that exists and is not to be resumed."""
        self.known: dict[str, Scored] = {}
        self._path = path
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            if not resume:
                raise UsageError(f"{path} exists; go on with it (--resume), or name another file (--out)")
            self._read(path, about)
        else:
            self._append({"about": dict(about)})

    def _read(self, path: Path, about: Mapping[str, Any]) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        complete = lines[:-1]  # a line that was cut off by a kill has no end
        try:
            records = [json.loads(line) for line in complete]
            then = records[0]["about"]
        except (ValueError, KeyError, IndexError) as error:
            raise UsageError(f"{path}: expected the lines of a search, got something else ({error})") from None
        differs = [key for key in about if then.get(key) != json.loads(json.dumps(about[key]))]
        if differs:
            raise UsageError(
                f"{path} belongs to another search (it differs in {', '.join(differs)}); name another file"
            )
        if lines[-1]:
            path.write_text("\n".join(complete) + "\n", encoding="utf-8")
        for record in records[1:]:
            if "expression" in record:
                kept = {k: v for k, v in record.items() if k != "objectives"}
                facts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in kept.items()}
                self.known[record["expression"]] = Scored(**facts)

    def add(self, scored: Scored) -> None:
        """Remember a candidate and write it down."""
        if scored.expression not in self.known:
            self.known[scored.expression] = scored
            self._append({**asdict(scored), "objectives": scored.objectives})

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


Question = tuple[str, int, Sequence[str]]
"""(expression, tier, parents)."""


class Mapper(Protocol):
    """Evaluates questions somewhere; the answers come in the order of the questions."""

    def map(self, questions: Sequence[Question]) -> Iterator[Scored]: ...


class Evaluator:
    """Scores candidates, several at a time; results come in the order of the questions whatever finishes first."""

    def __init__(self, corpus: Corpus, yardstick: Yardstick, log: Log, mapper: Mapper | None) -> None:
        self.corpus = corpus
        self.yardstick = yardstick
        self.log = log
        self._mapper = mapper
        self.n_new = 0
        """Candidates that had to be computed."""
        self.asked: set[str] = set()
        """Candidates asked for so far, whether they had to be computed or not."""

    def score(self, questions: Sequence[Question]) -> list[Scored]:
        """Score (expression, tier, parents) each; what the log knows is not computed again."""
        self.asked.update(expression for expression, _, _ in questions)
        fresh: dict[str, Question] = {}
        for question in questions:
            if question[0] not in self.log.known:
                fresh.setdefault(question[0], question)
        if self._mapper is None:
            done: Iterator[Scored] = (
                evaluate(self.corpus, self.yardstick, text, tier, parents) for text, tier, parents in fresh.values()
            )
        else:
            done = self._mapper.map(list(fresh.values()))
        for scored in done:
            self.n_new += 1
            self.log.add(scored)
        return [self.log.known[expression] for expression, _, _ in questions]


_shared: tuple[Corpus, Yardstick] | None = None


def _start_worker(folder: str, names: tuple[str, ...], docs: tuple[Doc, ...], yardstick: Yardstick) -> None:
    global _shared
    _shared = Corpus.mapped(Path(folder), names, docs), yardstick


def _in_worker(question: Question) -> Scored:
    assert _shared is not None
    expression, tier, parents = question
    return evaluate(*_shared, expression, tier, parents)


@contextmanager
def workers(
    corpus: Corpus, yardstick: Yardstick, folder: Path, n: int | None = None, ray: str | None = None
) -> Iterator[Mapper | None]:
    """What evaluates several candidates at once: processes that map the corpus in ``folder``, or a Ray cluster.

    None where one process would do.
    """
    n = n or os.cpu_count() or 1
    if ray is not None:
        from gguf_fusion.discover.cluster import RayCluster

        with RayCluster(ray, corpus, yardstick) as cluster:
            yield cluster
        return
    if n < 2:
        yield None
        return
    facts = str(folder), corpus.names, corpus.docs, yardstick
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n, mp_context=context, initializer=_start_worker, initargs=facts) as executor:
        yield _Pool(executor)


class _Pool:
    """Processes of this machine."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def map(self, questions: Sequence[Question]) -> Iterator[Scored]:
        try:
            yield from self._executor.map(_in_worker, questions)
        except BrokenProcessPool:
            raise GgufFusionError(
                "a worker process died (out of memory?); what was scored is kept: use --resume and fewer --workers"
            ) from None


def as_formula(expression: str) -> Formula:
    """A formula from its text."""
    return parse_formula(expression, parse)
