"""Reading a formula from its text; ``str`` of the nodes writes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gguf_fusion.errors import StrategyError
from gguf_fusion.formula.features import FEATURES
from gguf_fusion.formula.nodes import Expert, Extreme, Fuse, Gate, Node, Pool, Temper

MAX_NODES = 200
"""A formula with more nodes is refused: it was not written by anybody, and not found by a search that works."""

_POOLS: dict[str, float | None] = {"linear": 1.0, "geometric": 0.0, "power": None}

_TOKEN = re.compile(r'\s*("[^"]*"|[A-Za-z_]\w*|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[(),=*<])')
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*=")


class Reader:
    """Recursive descent over one formula."""

    def __init__(self, text: str, parse_strategy: Callable[[str], Any]) -> None:
        self.text, self.at, self._parse_strategy = text, 0, parse_strategy

    def whole(self) -> Node:
        """The tree of ``formula(…)``."""
        self._expect("formula")
        self._expect("(")
        node = self._node()
        self._expect(")")
        if self.text[self.at :].strip():
            raise self._error(f"expected the end, got {self.text[self.at :].strip()!r}")
        if sum(1 for _ in node.walk()) > MAX_NODES:
            raise self._error(f"expected at most {MAX_NODES} nodes")
        return node

    def _node(self) -> Node:
        token = self._next()
        if token.startswith('"'):
            return Expert(token[1:-1])
        self._expect("(")
        node = self._call(token)
        self._expect(")")
        return node

    def _call(self, name: str) -> Node:
        if name == "fuse":
            return Fuse(self._parse_strategy(self._balanced()))
        if name in _POOLS:
            given = dict(iter(self._named, None))
            fixed = _POOLS[name]
            r = self._taken(given, "r", name, -100.0, 100.0) if fixed is None else fixed
            eta = self._taken(given, "eta", name, 0.0, 10.0) if "eta" in given else 0.0
            gamma = self._taken(given, "gamma", name, 0.0, 1.0) if "gamma" in given else 1.0
            if given:
                raise self._error(f"{name} has no {min(given)!r}; known: {'r, ' * (name == 'power')}eta, gamma")
            weights, children = zip(*self._list(self._weighted), strict=True)
            if not sum(weights) > 0.0 or min(weights) < 0.0:
                raise self._error(f"{name}: expected weights >= 0 with a positive sum, got {list(weights)}")
            return Pool(r, eta, gamma, weights, children)
        if name in ("min", "max"):
            return Extreme(name == "max", tuple(self._list(self._node)))
        if name == "temper":
            t = self._float(0.01, 100.0)
            self._expect(",")
            return Temper(t, (self._node(),))
        if name == "gate":
            feature = self._next()
            if feature not in FEATURES:
                raise self._error(f"unknown feature {feature!r}; known: {', '.join(FEATURES)}")
            self._expect("<")
            threshold = self._float(-1e6, 1e6)
            self._expect(",")
            return Gate(feature, threshold, tuple(self._list(self._node, 2)))
        known = [*_POOLS, "min", "max", "temper", "gate", "fuse"]
        raise self._error(f'unknown operator {name!r}; known: {", ".join(known)}, and experts as "NAME"')

    def _weighted(self) -> tuple[float, Node]:
        weight = self._float(-1e6, 1e6)
        self._expect("*")
        return weight, self._node()

    def _list(self, read: Callable[[], Any], length: int | None = None) -> list[Any]:
        found = [read()]
        while self._peek() == ",":
            self._next()
            found.append(read())
        if length is not None and len(found) != length:
            raise self._error(f"expected {length} parts, got {len(found)}")
        return found

    def _named(self) -> tuple[str, float] | None:
        """One ``name=number,`` or None where something else stands."""
        match = _NAMED.match(self.text, self.at)
        if not match:
            return None
        self.at = match.end()
        value = self._float(-1e6, 1e6)
        self._expect(",")
        return match[1], value

    def _taken(self, given: dict[str, float], name: str, owner: str, low: float, high: float) -> float:
        if name not in given:
            raise self._error(f"{owner}: {name}=… is missing")
        value = given.pop(name)
        if not low <= value <= high:
            raise self._error(f"{owner}: {name} lies in [{low:g}, {high:g}], got {value:g}")
        return value

    def _float(self, low: float, high: float) -> float:
        token = self._next()
        try:
            value = float(token)
        except ValueError:
            raise self._error(f"expected a number, got {token!r}") from None
        if not low <= value <= high:
            raise self._error(f"expected a number in [{low:g}, {high:g}], got {value:g}")
        return value

    def _balanced(self) -> str:
        depth, start = 0, self.at
        for at in range(start, len(self.text)):
            depth += {"(": 1, ")": -1}.get(self.text[at], 0)
            if depth < 0:
                self.at = at
                return self.text[start:at]
        raise self._error("a closing parenthesis is missing")

    def _peek(self) -> str:
        match = _TOKEN.match(self.text, self.at)
        return match[1] if match else ""

    def _next(self) -> str:
        match = _TOKEN.match(self.text, self.at)
        if not match:
            raise self._error(f"cannot read {self.text[self.at :][:20]!r}" if self.text[self.at :] else "it ends early")
        self.at = match.end()
        return match[1]

    def _expect(self, token: str) -> None:
        got = self._next()
        if got != token:
            raise self._error(f"expected {token!r}, got {got!r}")

    def _error(self, what: str) -> StrategyError:
        return StrategyError(f"formula, at character {self.at}: {what}")
