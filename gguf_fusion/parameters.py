"""Parameters of pools and weight rules: numbers, words, lists of numbers, names of experts; checked in one place."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf_fusion.errors import StrategyError

Value = float | str | tuple[float, ...] | tuple[str, ...]

_BARE = re.compile(r"[A-Za-z][\w.-]*\Z")


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a closed interval; ``always``: printed even where it is the default."""

    default: float
    low: float
    high: float
    always: bool = False

    def check(self, owner: str, key: str, value: Any) -> float:
        """The value; raises StrategyError naming the interval."""
        if isinstance(value, (str, tuple)):
            raise StrategyError(f"{owner}: {key} expects a number, got {shown(value)}")
        if not self.low <= value <= self.high:  # NaN too
            raise StrategyError(f"{owner}: {key} lies in [{self.low:g}, {self.high:g}], got {value:g}")
        return float(value)


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    default: str
    choices: tuple[str, ...]

    def check(self, owner: str, key: str, value: Any) -> str:
        """The value; raises StrategyError naming the choices."""
        if value not in self.choices:
            raise StrategyError(f"{owner}: {key} is one of {', '.join(self.choices)}, got {shown(value)}")
        return str(value)


@dataclass(frozen=True, slots=True)
class Numbers:
    """A list with one number per expert, in their order; empty = the pool's or rule's own choice."""

    low: float
    high: float
    default: tuple[float, ...] = ()

    def check(self, owner: str, key: str, value: Any) -> tuple[float, ...]:
        """The value; raises StrategyError for anything but numbers in the interval."""
        if not isinstance(value, tuple) or any(isinstance(item, str) for item in value):
            raise StrategyError(f"{owner}: {key} expects a list of numbers such as [0.5, 0.5], got {shown(value)}")
        if not all(self.low <= item <= self.high for item in value):
            raise StrategyError(
                f"{owner}: the numbers of {key} lie in [{self.low:g}, {self.high:g}], got {shown(value)}"
            )
        return tuple(float(item) for item in value)


@dataclass(frozen=True, slots=True)
class Name:
    """The name of an expert; empty = chosen by base weight, as the formula says."""

    default: str = ""

    def check(self, owner: str, key: str, value: Any) -> str:
        """The value; raises StrategyError for anything but a name."""
        if not isinstance(value, str):
            raise StrategyError(f"{owner}: {key} expects the name of an expert, got {shown(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Names:
    """A list of experts' names; empty = all, by falling base weight."""

    default: tuple[str, ...] = ()

    def check(self, owner: str, key: str, value: Any) -> tuple[str, ...]:
        """The value; raises StrategyError for anything but a list of names."""
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise StrategyError(f"{owner}: {key} expects a list of experts' names, got {shown(value)}")
        return value


Parameter = Number | Word | Numbers | Name | Names


def checked(owner: str, given: Mapping[str, Any], known: Mapping[str, Parameter]) -> dict[str, Value]:
    """All parameters of a pool or rule, the given ones checked; raises StrategyError for an unknown one."""
    values: dict[str, Value] = {name: parameter.default for name, parameter in known.items()}
    for key, value in given.items():
        if key not in known:
            raise unknown(f"parameter of {owner}", key, list(known))
        values[key] = known[key].check(owner, key, value)
    return values


def unknown(what: str, name: str, known: Sequence[str]) -> StrategyError:
    """The error for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
    return StrategyError(f"unknown {what} {name!r}; {hint}")


def shown(value: Any) -> str:
    """A value as it stands in an expression; reading it gives the value back."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, str):
        return value if _BARE.match(value) and value not in ("inf", "nan") else f'"{value}"'
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(int(value)) if value == int(value) else repr(float(value))


def position(owner: str, key: str, name: str, names: Sequence[str]) -> int:
    """Where an expert stands; raises StrategyError naming those there are."""
    if name not in names:
        raise StrategyError(
            f"{owner}: {key}={shown(name)} is no expert with a weight here; there are {', '.join(names)}"
        )
    return list(names).index(name)
