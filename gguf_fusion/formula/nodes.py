"""Formulae: strategies written as trees of laws, as ``gguf-fusion discover`` finds and prints them.

::

    formula(linear(0.7*"coder", 0.3*temper(1.2, power(r=0.5, eta=0.1, gamma=0.99, 0.5*"chat", 0.5*"reasoner"))))

Leaves are experts (their names in double quotes) and whole strategies (``fuse(…)``); every node is a normalised law
over the symbols, computed in natural logarithms for many steps at once: float64[n_steps, n_symbols]. Nodes that learn
(pools with evidence, whole strategies) read the symbols that came.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.errors import StrategyError
from gguf_fusion.formula.features import FEATURES, Steps

LOWEST = -700.0
"""ln of about the smallest float64: what a learning node charges for a symbol that was ruled out."""


class Node(ABC):
    """A law made of other laws. Nodes are immutable; what they learn lives in the ``memory`` of one text."""

    children: tuple[Node, ...] = ()

    @abstractmethod
    def law(self, steps: Steps, memory: Memory) -> F64:
        """float64[n_steps, n_symbols], normalised natural logs."""

    @abstractmethod
    def __str__(self) -> str: ...

    def walk(self) -> Iterator[Node]:
        """Yield the node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


class Memory:
    """What the nodes of one formula learned from one text, by position in the tree."""

    def __init__(self, root: Node, names: Sequence[str], weights: F64, n_symbols: int) -> None:
        self.names = {name: i for i, name in enumerate(names)}
        self.state: dict[int, Any] = {}
        self.open: dict[int, F64] = {}
        """Laws of learning nodes at a step whose symbol is not known yet."""
        for node in root.walk():
            if isinstance(node, Fuse):
                self.state[id(node)] = node.strategy.bind(len(names), n_symbols, weights, names)


@dataclass(frozen=True, slots=True, eq=False)
class Expert(Node):
    """One expert's law."""

    name: str

    def law(self, steps: Steps, memory: Memory) -> F64:
        law: F64 = steps.laws[:, memory.names[self.name]]
        return law

    def __str__(self) -> str:
        return f'"{self.name}"'


@dataclass(frozen=True, slots=True, eq=False)
class Fuse(Node):
    """A strategy ``pool(weight rule)`` over all experts."""

    strategy: Any

    def law(self, steps: Steps, memory: Memory) -> F64:
        fuser = memory.state[id(self)]
        if steps.partial:
            return self._observed(fuser, steps)
        if steps.came is None:
            law: F64 = fuser.fuse(np.ascontiguousarray(steps.laws[0])).log_f[None]
            return law
        return rows_normalised(fuser.fuse_block(steps.laws.transpose(1, 0, 2), steps.came)[0], steps)

    @staticmethod
    def _observed(fuser: Any, steps: Steps) -> F64:
        """Pass bytes of a prompt on; their law is taken as the linear mixture with equal weights."""
        fuser.observe_prompt(steps.laws[:, :, 0].T)
        mean: F64 = np.log(np.maximum(np.exp(steps.laws).mean(axis=1), np.exp(LOWEST)))
        return mean

    def __str__(self) -> str:
        return f"fuse({self.strategy})"


@dataclass(frozen=True, slots=True, eq=False)
class Pool(Node):
    """Power mean of exponent ``r`` over the children (1 linear, 0 geometric), base weights moved by evidence.

    Weights w_i ∝ w⁰_i exp(η c_i), c_i ← γ c_i + ln p_i(x) as in ``weights.Evidence``; η = 0 keeps the base weights.
    """

    r: float
    eta: float
    gamma: float
    weights: tuple[float, ...]
    children: tuple[Node, ...]

    def law(self, steps: Steps, memory: Memory) -> F64:
        laws = np.stack([child.law(steps, memory) for child in self.children], axis=1)
        with np.errstate(divide="ignore"):
            logs = np.log(np.array(self.weights) / sum(self.weights))
        if self.eta:
            logs = logs + self.eta * self._credits(laws, steps, memory)
            logs = logs - logs.max(axis=1, keepdims=True)
            logs = logs - np.log(np.exp(logs).sum(axis=1, keepdims=True))
        else:
            logs = np.broadcast_to(logs, laws.shape[:2])
        if abs(self.r) < 1e-4:
            # A weight of 0 takes no part, even where its law is -inf.
            weights = np.exp(logs)[:, :, None]
            terms = np.where(weights > 0.0, laws, 0.0)
            return rows_normalised((weights * terms).sum(axis=1), steps)
        terms = self.r * laws + logs[:, :, None]
        if self.r < 0.0:
            terms = np.where(np.isneginf(logs)[:, :, None], -np.inf, terms)
        return rows_normalised(_log_sum(terms) / self.r, steps)

    def _credits(self, laws: F64, steps: Steps, memory: Memory) -> F64:
        """float64[n_steps, n_children]: the evidence before each step; what came is taken in."""
        credit = memory.state.get(id(self), np.zeros(len(self.children)))
        evidence = np.empty(laws.shape[:2])
        evidence[0] = credit
        if steps.came is None:
            memory.open[id(self)] = laws[0]
            return evidence
        came = laws[:, :, 0] if steps.partial else np.take_along_axis(laws, steps.came[:, None, None], axis=2)[:, :, 0]
        for t, gained in enumerate(np.maximum(came, LOWEST), 1):
            credit = self.gamma * credit + gained
            credit -= credit.max()
            if t < len(evidence):
                evidence[t] = credit
        memory.state[id(self)] = credit
        return evidence

    def learn(self, symbol: int, memory: Memory) -> None:
        """Take in the symbol of the step that was open."""
        laws = memory.open.pop(id(self), None)
        if laws is not None:
            credit = self.gamma * memory.state.get(id(self), np.zeros(len(laws))) + np.maximum(laws[:, symbol], LOWEST)
            memory.state[id(self)] = credit - credit.max()

    def __str__(self) -> str:
        name = {1.0: "linear", 0.0: "geometric"}.get(self.r, "power")
        numbers = [f"r={number(self.r)}"] if name == "power" else []
        if self.eta:
            numbers += [f"eta={number(self.eta)}", f"gamma={number(self.gamma)}"]
        parts = [f"{number(w)}*{c}" for w, c in zip(self.weights, self.children, strict=True)]
        return f"{name}({', '.join(numbers + parts)})"


@dataclass(frozen=True, slots=True, eq=False)
class Extreme(Node):
    """Symbol by symbol the smallest or largest probability of the children, normalised."""

    largest: bool
    children: tuple[Node, ...]

    def law(self, steps: Steps, memory: Memory) -> F64:
        laws = np.stack([child.law(steps, memory) for child in self.children])
        return rows_normalised(laws.max(axis=0) if self.largest else laws.min(axis=0), steps)

    def __str__(self) -> str:
        return f"{'max' if self.largest else 'min'}({', '.join(map(str, self.children))})"


@dataclass(frozen=True, slots=True, eq=False)
class Temper(Node):
    """A child's law flattened (t > 1) or sharpened (t < 1): p^(1/t), normalised."""

    t: float
    children: tuple[Node, ...]

    def law(self, steps: Steps, memory: Memory) -> F64:
        return rows_normalised(self.children[0].law(steps, memory) / self.t, steps)

    def __str__(self) -> str:
        return f"temper({number(self.t)}, {self.children[0]})"


@dataclass(frozen=True, slots=True, eq=False)
class Gate(Node):
    """The first child where a feature lies below a threshold, else the second; see ``FEATURES``."""

    feature: str
    threshold: float
    children: tuple[Node, ...]

    def law(self, steps: Steps, memory: Memory) -> F64:
        first, second = (child.law(steps, memory) for child in self.children)
        chosen: F64 = np.where((FEATURES[self.feature](steps) < self.threshold)[:, None], first, second)
        return chosen

    def __str__(self) -> str:
        return f"gate({self.feature}<{number(self.threshold)}, {', '.join(map(str, self.children))})"


def rows_normalised(logs: F64, steps: Steps) -> F64:
    """float64[m, n_symbols], every row's probabilities summing to 1. Partial laws have no sum and stay as they are.

    Raises StrategyError for a row without mass.
    """
    if steps.partial:
        return logs
    top = logs.max(axis=1, keepdims=True)
    if not (top > -np.inf).all():
        raise StrategyError("formula: a step is left without any mass; its parts exclude each other's symbols")
    law: F64 = logs - top - np.log(np.exp(logs - top).sum(axis=1, keepdims=True))
    return law


def _log_sum(logs: F64) -> F64:
    """float64[m, k, n_symbols] -> [m, n_symbols], ln of the sum of the exponentials over k."""
    top = logs.max(axis=1, keepdims=True)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        total: F64 = safe[:, 0] + np.log(np.exp(logs - safe).sum(axis=1))
    return total


def number(value: float) -> str:
    """A number as formulae are printed: read back it is the same."""
    return repr(int(value)) if value == int(value) else repr(float(value))
