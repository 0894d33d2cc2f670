"""A formula at work on one text, behind the same interface as ``strategy.Fuser``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64, I64
from gguf_fusion.errors import StrategyError
from gguf_fusion.formula.features import Steps
from gguf_fusion.formula.nodes import Expert, Fuse, Memory, Node, Pool
from gguf_fusion.formula.reading import Reader
from gguf_fusion.strategy import Fused, Fuser, base_of, check_laws


@dataclass(frozen=True, slots=True)
class Formula:
    """A strategy written as a tree; ``str`` prints what ``parse_formula`` reads."""

    root: Node

    def __str__(self) -> str:
        return f"formula({self.root})"

    def bind(
        self, n_experts: int, n_symbols: int, base_weights: F64, names: Sequence[str], roles: Sequence[str] = ()
    ) -> FormulaFuser:
        """State for one text; experts that the formula does not name take no part."""
        return FormulaFuser(self, n_symbols, base_weights, names)


def parse_formula(text: str, parse_strategy: Callable[[str], Any]) -> Formula:
    """Read ``formula(…)``; raises StrategyError saying where and what was expected."""
    return Formula(Reader(text, parse_strategy).whole())


class FormulaFuser(Fuser):
    """The tree with what its nodes learned from one text."""

    def __init__(self, formula: Formula, n_symbols: int, base_weights: F64, names: Sequence[str]) -> None:
        nodes = list(formula.root.walk())
        named = {node.name for node in nodes if isinstance(node, Expert)}
        if missing := sorted(named - set(np.array(names)[base_weights > 0.0])):
            raise StrategyError(
                f"formula: no expert with a weight is called {missing[0]!r} here; the experts are {', '.join(names)}"
            )
        every = any(isinstance(node, Fuse) for node in nodes)
        self.active = (base_weights > 0.0) & np.array([every or name in named for name in names])
        self._names = [name for name, on in zip(names, self.active, strict=True) if on]
        self._root = formula.root
        self._learners = [node for node in nodes if isinstance(node, Pool)]
        self._strategies = [node for node in nodes if isinstance(node, Fuse)]
        self._memory = Memory(formula.root, self._names, base_weights[self.active], n_symbols)
        self.last_weights = base_of(np.where(self.active, base_weights, 0.0), names)
        self._before = n_symbols - 1

    def observe_prompt(self, logprobs: F64) -> None:
        """See ``Fuser``.

        The whole laws of a prompt are not known; inner nodes are judged by the unnormalised pool of these values.
        """
        laws = logprobs[self.active].T[:, :, None]
        if len(laws):
            nothing = np.full(len(laws), self._before)
            self._root.law(Steps(laws, nothing, np.zeros(len(laws), np.int64), partial=True), self._memory)

    def fuse(self, logprobs: F64) -> Fused:
        mine = logprobs[self.active]
        check_laws(mine, self._names)
        law = self._root.law(Steps(mine[None], np.array([self._before]), None), self._memory)[0]
        return Fused(law, self.last_weights, 0.0)

    def fuse_block(self, logprobs: F64, came: I64) -> tuple[F64, F64, F64]:
        mine = logprobs[self.active]
        check_laws(mine, self._names)
        before = np.concatenate([[self._before], came[:-1]])
        law = self._root.law(Steps(mine.transpose(1, 0, 2), before, came), self._memory)
        self._before = int(came[-1]) if len(came) else self._before
        return law, np.repeat(self.last_weights[:, None], len(came), axis=1), np.zeros(len(came))

    def advance(self, symbol: int, logprobs: F64, *, generated: bool) -> None:
        for node in self._strategies:
            self._memory.state[id(node)].advance(symbol, logprobs[self.active], generated=generated)
        for learner in self._learners:
            if generated:
                self._memory.open.pop(id(learner), None)
            else:
                learner.learn(symbol, self._memory)
        self._before = symbol

    def snapshot(self) -> Any:
        state = self._memory.state
        fusers = {id(node): state[id(node)].snapshot() for node in self._strategies}
        return self._before, {key: value for key, value in state.items() if key not in fusers}, fusers

    def restore(self, snapshot: Any) -> None:
        self._before, learned, fusers = snapshot
        for key in [key for key in self._memory.state if key not in fusers]:
            del self._memory.state[key]
        self._memory.state.update(learned)
        for key, state in fusers.items():
            self._memory.state[key].restore(state)
