"""Strategies: ``pool(weight rule)`` expressions, parsed, printed and bound to the experts of one text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64, Bool, check_array
from gguf_fusion.errors import ExpertFailedError, StrategyError
from gguf_fusion.fusion import POOLS, Parameter, normalised
from gguf_fusion.weights import RULES

DEFAULT = "loglinear(w=evidence(eta=0.1, gamma=0.99))"
"""Ahead of the best single expert on every kind of text in first measurements."""

PRESETS = {
    "average": "linear(w=static)",
    "bayes": "linear(w=evidence(eta=1, gamma=1))",
    "harmonic": "power(r=-1, w=static)",
    "sqrt-product": "loglinear(w=static)",
}


@dataclass(frozen=True, slots=True)
class Fused:
    """One fused step: log f float64[n_symbols] (normalised), weights float64[n_experts], log Z of the pool."""

    log_f: F64
    weights: F64
    log_z: float


@dataclass(frozen=True, slots=True)
class Strategy:
    """A pool with parameters and a weight rule with parameters; ``str`` prints what ``parse`` reads."""

    pool: str
    pool_parameters: Mapping[str, float]
    rule: str
    rule_parameters: Mapping[str, float]

    def __str__(self) -> str:
        rule = _call(self.rule, [f"{k}={_number(v)}" for k, v in self.rule_parameters.items()])
        return _call(self.pool, [*(f"{k}={_number(v)}" for k, v in self.pool_parameters.items()), f"w={rule}"])

    def bind(self, n_experts: int, n_symbols: int, base_weights: F64, names: Sequence[str]) -> Fuser:
        """State for one text. ``base_weights``: float64[n_experts], >= 0 with a positive sum."""
        check_array("base_weights", base_weights, np.float64, (n_experts,))
        return Fuser(self, n_symbols, base_weights, names)


class Fuser:
    """The strategy at work on one text: weights, pool, and the evidence gathered so far."""

    def __init__(self, strategy: Strategy, n_symbols: int, base_weights: F64, names: Sequence[str]) -> None:
        base = base_weights
        if len(base) != len(names) or not np.isfinite(base).all() or (base < 0).any() or base.sum() <= 0:
            raise StrategyError(f"weights: expected {len(names)} numbers >= 0 with a positive sum, got {base.tolist()}")
        self.active: Bool = base > 0
        """bool[n_experts]: experts that take part; the others have no influence and need no evaluation."""
        self._names = list(names)
        self._shape = (len(base), n_symbols)
        self._weights = base / base.sum()
        self._pool = POOLS[strategy.pool].function
        self._pool_parameters = dict(strategy.pool_parameters)
        mine = base[self.active]
        self._rule = RULES[strategy.rule].make(mine / mine.sum(), **strategy.rule_parameters)

    def observe_prompt(self, logprobs: F64) -> None:
        """float64[n_experts, n_bytes], oldest first: what each expert gave to the bytes of the prompt."""
        for column in logprobs.T:
            self._rule.observe(column[self.active])

    def fuse(self, logprobs: F64) -> Fused:
        """Fuse float64[n_experts, n_symbols] natural log-probabilities; rows of inactive experts are not read.

        Raises ExpertFailedError for NaN or +inf, naming the expert.
        """
        check_array("logprobs", logprobs, np.float64, self._shape)
        mine = logprobs[self.active]
        worst = mine.max(axis=1)
        if not (worst < np.inf).all():
            name = [n for n, on in zip(self._names, self.active, strict=True) if on][int(np.argmin(worst < np.inf))]
            raise ExpertFailedError(name, "its law holds NaN or +inf; the text cannot go on")
        weights = self._rule.weights(mine)
        log_f, log_z = normalised(self._pool(mine, weights, **self._pool_parameters))
        self._weights = np.zeros(len(self.active))
        self._weights[self.active] = weights
        return Fused(log_f, self._weights, log_z)

    def advance(self, symbol: int, logprobs: F64, *, generated: bool) -> None:
        """Move past one symbol. Only given text is evidence; what was drawn from the fused law proves nothing."""
        if not generated:
            self._rule.observe(logprobs[self.active, symbol])

    def responsibility(self, symbol: int, logprobs: F64) -> F64:
        """float64[n_experts], sum 1: w_i p_i(symbol) normalised, each expert's part in a mixture of this step."""
        parts = np.where(self.active, self._weights * np.exp(logprobs[:, symbol]), 0.0)
        total = float(parts.sum())
        shares: F64 = parts / total if total > 0 else self._weights.copy()
        return shares

    def snapshot(self) -> Any:
        """A copy of the gathered evidence."""
        return self._rule.state()

    def restore(self, snapshot: Any) -> None:
        """Return to a copied state."""
        self._rule.set_state(snapshot)


@dataclass(frozen=True, slots=True)
class Listing:
    """One row of ``gguf-fusion strategies``."""

    name: str
    kind: str
    formula: str
    source: str
    defaults: Mapping[str, float] = field(default_factory=dict)


def listing() -> list[Listing]:
    """All pools, weight rules and presets."""
    parts = [("pool", p) for p in POOLS.values()] + [("weight rule", r) for r in RULES.values()]
    rows = [
        Listing(p.name, kind, p.formula, p.source, {k: v.default for k, v in p.parameters.items()}) for kind, p in parts
    ]
    return rows + [Listing(name, "preset", expression, "") for name, expression in PRESETS.items()]


_TOKEN = re.compile(r"\s*([A-Za-z][\w-]*|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[(),=])")


def parse(text: str) -> Strategy:
    """Read ``pool(parameter=…, w=rule(parameter=…))`` or the name of a preset; raises StrategyError."""
    text = PRESETS.get(text.strip(), text)
    tokens = _tokens(text)
    pool, arguments, end = _expression(tokens, 0, text)
    if end != len(tokens):
        raise StrategyError(f"strategy {text!r}: expected the end, got {tokens[end]!r}")
    if pool not in POOLS:
        raise _unknown("strategy", pool, [*POOLS, *PRESETS])
    rule, rule_arguments = "static", {}
    if "w" in arguments:
        rule, rule_arguments = arguments.pop("w")
        if rule not in RULES:
            raise _unknown("weight rule", rule, list(RULES))
    return Strategy(
        pool,
        _checked(pool, arguments, POOLS[pool].parameters),
        rule,
        _checked(rule, rule_arguments, RULES[rule].parameters),
    )


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if not match:
            raise StrategyError(f"strategy {text!r}: cannot read {text[position:]!r} at position {position}")
        tokens.append(match[1])
        position = match.end()
    if not tokens:
        raise StrategyError(f"strategy: expected pool(weight rule) such as {DEFAULT!r}, got nothing")
    return tokens


def _expression(tokens: list[str], at: int, text: str) -> tuple[str, dict[str, Any], int]:
    """(name, arguments, next position) of ``name`` or ``name(key=value, …)``."""
    name, at = tokens[at], at + 1
    arguments: dict[str, Any] = {}
    if at >= len(tokens) or tokens[at] != "(":
        return name, arguments, at
    at += 1
    while at < len(tokens) and tokens[at] != ")":
        if at + 1 < len(tokens) and tokens[at + 1] == "=":
            key, at = tokens[at], at + 2
        else:
            key = "w"  # a lone rule: linear(evidence)
        if at >= len(tokens) or tokens[at] in "(),=":
            raise StrategyError(f"strategy {text!r}: expected a value for {key!r}")
        if key in arguments:
            raise StrategyError(f"strategy {text!r}: {key!r} is given twice")
        if key == "w":
            rule, inner, at = _expression(tokens, at, text)
            arguments[key] = rule, inner
        else:
            arguments[key], at = tokens[at], at + 1
        if at < len(tokens) and tokens[at] == ",":
            at += 1
    if at >= len(tokens):
        raise StrategyError(f"strategy {text!r}: a closing parenthesis is missing")
    return name, arguments, at + 1


def _checked(owner: str, given: Mapping[str, Any], known: Mapping[str, Parameter]) -> dict[str, float]:
    values = {name: parameter.default for name, parameter in known.items()}
    for key, raw in given.items():
        if key not in known:
            raise _unknown(f"parameter of {owner}", key, list(known))
        try:
            value = float(raw)
        except (TypeError, ValueError):
            raise StrategyError(f"{owner}: {key} expects a number, got {raw!r}") from None
        if not known[key].low <= value <= known[key].high:
            raise StrategyError(f"{owner}: {key} lies in [{known[key].low:g}, {known[key].high:g}], got {value:g}")
        values[key] = value
    return values


def _unknown(what: str, name: str, known: list[str]) -> StrategyError:
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
    return StrategyError(f"unknown {what} {name!r}; {hint}")


def _call(name: str, arguments: list[str]) -> str:
    return f"{name}({', '.join(arguments)})" if arguments else name


def _number(value: float) -> str:
    return repr(int(value)) if value == int(value) else repr(value)
