"""Tier 3: formulae evolved by genetic programming; DEAP selects (NSGA-II), trees are crossed and mutated here.

Every node is a law over the symbols, so any subtree may stand for any other and every tree is a valid, normalised
strategy; what DEAP calls typing is settled by that. Numbers belong to nodes and mutate with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gguf_fusion.discover.candidates import Evaluator, Question, Scored, as_formula
from gguf_fusion.formula.features import FEATURES
from gguf_fusion.formula.nodes import Expert, Extreme, Gate, Node, Pool, Temper

MAX_DEPTH = 5
MAX_SIZE = 25
POPULATION = 24

_TRIES = 20
_CROSSOVER = 0.6

Random = np.random.Generator


def evolved(evaluator: Evaluator, seeds: Sequence[Scored], budget: int, seed: int) -> Iterator[list[Scored]]:
    """Yield generation by generation what was scored; ``seeds`` start the population and lend their parts."""
    base, tools = _deap()
    names = evaluator.corpus.names
    population = sorted(seeds, key=lambda s: (s.bpb, s.expression))[:POPULATION]
    spare = [as_formula(s.expression).root for s in population]
    generation = 0
    spent = len(evaluator.asked)
    stale = 0
    while len(evaluator.asked) - spent < budget and stale < 3:
        generation += 1
        ranked = tools.selNSGA2(_individuals(base, tools, population), len(population))
        parents = [individual.scored for individual in ranked]
        known = {one.expression for one in population}
        questions: list[Question] = []
        for i in range(min(POPULATION, budget - (len(evaluator.asked) - spent))):
            random = np.random.default_rng([seed, generation, i])
            child = _child(parents, spare, names, random)
            if child is not None and child[0] not in known:
                known.add(child[0])
                questions.append((child[0], 3, child[1]))
        scored = [one for one in evaluator.score(questions) if np.isfinite(one.bpb)]
        before = {one.expression for one in population}
        population = _survivors(base, tools, [*population, *scored])
        stale = stale + 1 if before == {one.expression for one in population} else 0
        yield scored


def _survivors(base: Any, tools: Any, candidates: Sequence[Scored]) -> list[Scored]:
    """The next population: NSGA-II over the four objectives; formulae that score alike bit for bit count once."""
    kept = tools.selNSGA2(_individuals(base, tools, _different(candidates)), POPULATION)
    return [individual.scored for individual in kept]


def _different(candidates: Sequence[Scored]) -> list[Scored]:
    """Of formulae that give the same bits on every document only the smallest."""
    found: dict[tuple[float, ...], Scored] = {}
    for one in sorted(candidates, key=lambda c: (c.nodes, c.expression)):
        found.setdefault(tuple(round(b, 6) for b in one.bits), one)
    return list(found.values())


def front(candidates: Sequence[Scored]) -> list[Scored]:
    """The candidates that no other one beats in every objective, fewest bits first."""
    base, tools = _deap()
    usable = _different([one for one in candidates if np.isfinite(one.bpb)])
    first = tools.sortNondominated(_individuals(base, tools, usable), len(usable), first_front_only=True)[0]
    return sorted({i.scored.expression: i.scored for i in first}.values(), key=lambda s: (s.bpb, s.expression))


class _Individual(list[int]):
    """What DEAP's tools select: an object with a fitness."""

    def __init__(self, scored: Scored, fitness: Any) -> None:
        super().__init__()
        self.scored = scored
        self.fitness = fitness


def _individuals(base: Any, tools: Any, scored: Sequence[Scored]) -> list[_Individual]:
    class Fitness(base.Fitness):  # type: ignore[misc]
        weights = (-1.0,) * 4

    found = [_Individual(one, Fitness(one.objectives)) for one in scored]
    for layer in tools.sortNondominated(found, len(found)):
        tools.emo.assignCrowdingDist(layer)
    return found


def _deap() -> tuple[Any, Any]:
    from deap import base, tools

    return base, tools


def _child(
    parents: Sequence[Scored], spare: Sequence[Node], names: Sequence[str], random: Random
) -> tuple[str, Sequence[str]] | None:
    """(expression, parents) of a new tree within the limits, or None after several that were not.

    ``parents`` come best first; each is the better one of two drawn at random.
    """
    for _ in range(_TRIES):
        first, second = (parents[int(random.integers(len(parents), size=2).min())] for _ in range(2))
        root = as_formula(first.expression).root
        if random.random() < _CROSSOVER:
            donor = as_formula(second.expression).root
            new = _replaced(root, _pick(root, random), _pick(donor, random))
            origin: Sequence[str] = (first.expression, second.expression)
        else:
            target = _pick(root, random)
            new = _replaced(root, target, _mutated(target, spare, names, random))
            origin = (first.expression,)
        if _depth(new) <= MAX_DEPTH and sum(1 for _ in new.walk()) <= MAX_SIZE and str(new) != str(root):
            return f"formula({new})", origin
    return None


def _pick(root: Node, random: Random) -> Node:
    """A node drawn uniformly, root and leaves included."""
    nodes = list(root.walk())
    return nodes[int(random.integers(len(nodes)))]


def _replaced(root: Node, old: Node, new: Node) -> Node:
    """The tree with one node (by identity) replaced."""
    if root is old:
        return new
    if not root.children:
        return root
    return replace(root, children=tuple(_replaced(child, old, new) for child in root.children))  # type: ignore[type-var]


def _depth(node: Node) -> int:
    return 1 + max((_depth(child) for child in node.children), default=0)


def _mutated(node: Node, spare: Sequence[Node], names: Sequence[str], random: Random) -> Node:
    """The node with other numbers, another operator above it, or another part in its place."""
    kind = random.random()
    if kind < 0.5 and node.children:
        return _renumbered(node, random)
    if kind < 0.75:
        return _wrapped(node, spare, names, random)
    if kind < 0.9 and node.children:
        return node.children[int(random.integers(len(node.children)))]
    return _leaf(spare, names, random)


def _renumbered(node: Node, random: Random) -> Node:
    if isinstance(node, Pool):
        part = int(random.integers(3))
        if part == 0:
            weights = tuple(_round(w * float(np.exp(random.normal(0.0, 0.4)))) for w in node.weights)
            return replace(node, weights=weights)
        if part == 1:
            return replace(node, r=_round(float(np.clip(node.r + random.normal(0.0, 0.3), -1.0, 1.5))))
        eta = node.eta * float(np.exp(random.normal(0.0, 0.5))) if node.eta else 0.1
        fade = (1.0 - node.gamma) * float(np.exp(random.normal(0.0, 0.7))) if node.gamma < 1.0 else 0.01
        return replace(node, eta=_round(min(eta, 5.0)), gamma=_round(1.0 - min(fade, 0.5), 5))
    if isinstance(node, Temper):
        return replace(node, t=_round(float(np.clip(node.t * np.exp(random.normal(0.0, 0.1)), 0.5, 2.0))))
    if isinstance(node, Gate):
        return replace(node, threshold=_round(node.threshold * float(np.exp(random.normal(0.0, 0.4)))))
    return node


def _wrapped(node: Node, spare: Sequence[Node], names: Sequence[str], random: Random) -> Node:
    kind = int(random.integers(5))
    other = _leaf(spare, names, random)
    if kind == 0:
        return Temper(_round(float(np.exp(random.normal(0.0, 0.1)))), (node,))
    if kind == 1:
        feature = list(FEATURES)[int(random.integers(len(FEATURES)))]
        threshold = 0.5 if feature in ("inside_word", "confidence") else _round(float(random.uniform(0.1, 2.0)))
        pair = (node, other) if random.random() < 0.5 else (other, node)
        return Gate(feature, threshold, pair)
    if kind == 2:
        return Extreme(bool(random.integers(2)), (node, other))
    eta, gamma = ((0.0, 1.0), (0.1, 0.99))[int(random.integers(2))]
    return Pool(float(random.integers(2)), eta, gamma, (1.0, _round(float(random.uniform(0.1, 1.0)))), (node, other))


def _leaf(spare: Sequence[Node], names: Sequence[str], random: Random) -> Node:
    """An expert, or a whole formula of an earlier tier."""
    if spare and random.random() < 0.4:
        return spare[int(random.integers(len(spare)))]
    return Expert(names[int(random.integers(len(names)))])


def _round(value: float, digits: int = 4) -> float:
    """Few digits: what is printed is what is evaluated."""
    return float(f"{value:.{digits}g}")
