"""Strategy expressions: ``pool(parameter=…, w=rule(parameter=…))``, presets with their aliases, and formulae."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf_fusion.errors import StrategyError
from gguf_fusion.formula.fuser import parse_formula
from gguf_fusion.fusion import POOLS
from gguf_fusion.parameters import Value, checked, unknown
from gguf_fusion.strategy import COMMON, PoolStrategy, Strategy
from gguf_fusion.weights import RULES

DEFAULT = "loglinear(w=evidence(eta=0.1, gamma=0.99))"
"""Ahead of the best single expert on every kind of text it was measured on."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named strategy. ``source``: where the name comes from, and what was put right."""

    name: str
    expression: str
    source: str
    aliases: tuple[str, ...] = ()


_LLM_FUSION = "llm-fusion"

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("average", "linear(w=static)", _LLM_FUSION, ("simple", "uniform")),
        Preset("dynamic", "linear(w=schedule)", f"{_LLM_FUSION}; no order of start and end is assumed"),
        Preset("adaptive", "linear(w=entropy)", f"{_LLM_FUSION}; entropies of whole laws over the same symbols"),
        Preset("confidence", "linear(w=top1)", f"{_LLM_FUSION}; whole laws, not a softmax over one logit"),
        Preset("hybrid", "linear(w=mix)", f"{_LLM_FUSION}; schedule and confidence"),
        Preset("slerp", "sphere(w=static)", f"{_LLM_FUSION}; a real mean on the sphere"),
        Preset(
            "product", "loglinear(scale=0, w=static)", f"{_LLM_FUSION}; exponents w_i times the number of experts",
            ("norm-product", "log-sum"),
        ),
        Preset("sqrt-product", "loglinear(w=static)", _LLM_FUSION, ("geometric",)),
        Preset("min", "power(r=-inf, w=static)", _LLM_FUSION),
        Preset("max", "power(r=inf, w=static)", "largest probability"),
        Preset("harmonic", "power(r=-1, w=static)", "harmonic mean"),
        Preset("min-entropy", "route(w=sharpest)", f"{_LLM_FUSION}; whole laws over the same symbols"),
        Preset("min-perplexity", "route(w=recent)", f"{_LLM_FUSION}; bits on given text, half-life 64 bytes"),
        Preset("cascade", "route(w=cascade)", f"{_LLM_FUSION}; the route taken is reported"),
        Preset("prompt", "linear(w=prompt)", "PackLLM (arXiv 2404.11531), per byte"),
        Preset("role", "linear(w=role)", "task weights"),
        Preset("consensus", "consensus(w=static)", "CoRE (arXiv 2510.13855)"),
        Preset("gate", "gate(w=static)", "SAFE (arXiv 2510.15346)"),
        Preset("contrast", "contrast(w=static)", "contrastive decoding"),
        Preset("proxy", "proxy(w=static)", "proxy tuning"),
        Preset("bayes", "linear(w=evidence(eta=1, gamma=1))", "online Bayes mixture"),
        Preset("fixed-share", "linear(w=evidence(eta=1, gamma=1, alpha=0.01))", "Herbster & Warmuth 1998"),
        Preset("word", "linear(w=evidence(eta=1, gamma=1, reset=word))", "Bayes inside words, w⁰ at their start"),
    )
}  # fmt: skip

_ALIASES = {alias: preset.name for preset in PRESETS.values() for alias in preset.aliases}


def preset(name: str) -> Preset | None:
    """The preset of a name or alias."""
    return PRESETS.get(_ALIASES.get(name, name))


@dataclass(frozen=True, slots=True)
class Listing:
    """One row of ``gguf-fusion strategies``."""

    name: str
    kind: str
    aliases: tuple[str, ...]
    formula: str
    defaults: Mapping[str, Value] = field(default_factory=dict)
    source: str = ""


def listing() -> list[Listing]:
    """All pools, weight rules and presets."""
    rows = [
        Listing(part.name, kind, (), part.formula, {k: v.default for k, v in part.parameters.items()}, part.source)
        for kind, registry in (("pool", POOLS), ("weight rule", RULES))
        for part in registry.values()
    ]
    for one in PRESETS.values():
        parsed = parse(one.expression)
        assert isinstance(parsed, PoolStrategy)
        formula = f"{POOLS[parsed.pool].formula}; {RULES[parsed.rule].formula}"
        given = {**parsed.pool_parameters, **{f"w.{k}": v for k, v in parsed.rule_parameters.items()}}
        kept = {k: v for k, v in given.items() if k not in COMMON}
        rows.append(Listing(one.name, "preset", one.aliases, f"{one.expression}: {formula}", kept, one.source))
    return rows


_TOKEN = re.compile(r'\s*([-+]?inf\b|[A-Za-z][\w.-]*|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|"[^"]*"|[()\[\],=])')


def parse(text: str) -> Strategy:
    """Read an expression, a formula, or the name of a preset; raises StrategyError."""
    if text.lstrip().startswith("formula("):
        return parse_formula(text.strip(), parse)
    known = preset(text.strip())
    tokens = _tokens(text if known is None else known.expression)
    name, arguments, end = _expression(tokens, 0, text)
    if end != len(tokens):
        raise StrategyError(f"strategy {text!r}: expected the end, got {tokens[end]!r}")
    if name not in POOLS:
        raise unknown("strategy", name, [*POOLS, *PRESETS, *_ALIASES])
    rule, rule_arguments = "static", {}
    if "w" in arguments:
        rule, rule_arguments = arguments.pop("w")
        if rule not in RULES:
            raise unknown("weight rule", rule, list(RULES))
    return PoolStrategy(
        name,
        checked(name, arguments, {**POOLS[name].parameters, **COMMON}),
        rule,
        checked(rule, rule_arguments, RULES[rule].parameters),
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
        if at >= len(tokens) or tokens[at] in "(),=]":
            raise StrategyError(f"strategy {text!r}: expected a value for {key!r}")
        if key in arguments:
            raise StrategyError(f"strategy {text!r}: {key!r} is given twice")
        if key == "w":
            rule, inner, at = _expression(tokens, at, text)
            arguments[key] = rule, inner
        elif tokens[at] == "[":
            arguments[key], at = _items(tokens, at + 1, text)
        else:
            arguments[key], at = _value(tokens[at]), at + 1
        if at < len(tokens) and tokens[at] == ",":
            at += 1
    if at >= len(tokens):
        raise StrategyError(f"strategy {text!r}: a closing parenthesis is missing")
    return name, arguments, at + 1


def _items(tokens: list[str], at: int, text: str) -> tuple[tuple[Any, ...], int]:
    """(values of a list, position after its closing bracket)."""
    items = []
    while at < len(tokens) and tokens[at] != "]":
        if tokens[at] in "(),=[":
            raise StrategyError(f"strategy {text!r}: expected a number or a name in a list, got {tokens[at]!r}")
        items.append(_value(tokens[at]))
        at += 1
        if at < len(tokens) and tokens[at] == ",":
            at += 1
    if at >= len(tokens):
        raise StrategyError(f"strategy {text!r}: a closing bracket is missing")
    return tuple(items), at + 1


def _value(token: str) -> float | str:
    if token.startswith('"'):
        return token[1:-1]
    try:
        return float(token)
    except ValueError:
        return token
