"""Tier 2: linear stacks of tuned formulae that differ from one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.discover.candidates import Evaluator, Question, Scored, as_formula
from gguf_fusion.discover.corpus import Doc
from gguf_fusion.discover.parameters import em_weights

_MEMBERS = 8
_ALIKE = 1e-3
"""Mean difference in nats per byte below which two formulae count as one."""

_LEAST = 0.01


def stacked(evaluator: Evaluator, docs: Sequence[Doc], candidates: Sequence[Scored]) -> Iterator[list[Scored]]:
    """Yield stacks of the best, different candidates: of 2, 3, … of them, and the one that EM thins out of all."""
    members, columns = _different(evaluator, docs, candidates)
    questions: list[Question] = []
    for size in range(2, len(members) + 1):
        chosen = list(range(size))
        weights = em_weights(columns[:, chosen])
        kept = [i for i, w in zip(chosen, weights, strict=True) if w >= _LEAST]
        if len(kept) > 1:
            weights = em_weights(columns[:, kept])
            questions.append(_stack([members[i] for i in kept], weights))
    if questions:
        yield evaluator.score(questions)


def _different(evaluator: Evaluator, docs: Sequence[Doc], candidates: Sequence[Scored]) -> tuple[list[Scored], F64]:
    """Up to eight candidates, best first, that differ from one another, and ln p of the scored bytes for each."""
    members: list[Scored] = []
    columns: list[F64] = []
    corpus = evaluator.corpus
    for one in sorted(candidates, key=lambda c: (c.bpb, c.expression)):
        if len(members) == _MEMBERS or not np.isfinite(one.bpb):
            break
        root = as_formula(one.expression).root
        parts = [corpus.logprobs(root, doc)[corpus.scored[doc.start : doc.stop]] for doc in docs]
        column = np.concatenate(parts)
        if all(float(np.abs(column - other).mean()) > _ALIKE for other in columns):
            members.append(one)
            columns.append(column)
    return members, np.stack(columns, axis=1) if columns else np.zeros((0, 0))


def _stack(members: Sequence[Scored], weights: F64) -> Question:
    parts = [f"{w:.4g}*{inner(m.expression)}" for m, w in zip(members, weights, strict=True)]
    return f"formula(linear({', '.join(parts)}))", 2, [m.expression for m in members]


def inner(expression: str) -> str:
    """What stands inside ``formula(…)``."""
    return expression.removeprefix("formula(").removesuffix(")")
