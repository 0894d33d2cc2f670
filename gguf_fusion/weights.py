"""Weight rules: how much each expert counts at the next symbol. Adding a rule is one decorated class plus its laws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.fusion import Parameter


class WeightRule(Protocol):
    """Mutable state of one text. ``base``: float64[n], weights > 0 of the active experts, sum 1."""

    def __init__(self, base: F64, **parameters: float) -> None: ...

    def weights(self, logprobs: F64) -> F64:
        """float64[n], sum 1: weights for the next symbol, given every expert's law."""
        ...

    def observe(self, logprobs: F64) -> None:
        """float64[n]: what each expert gave to a symbol of the given text."""
        ...

    def state(self) -> Any:
        """A copy of what ``observe`` changes."""
        ...

    def set_state(self, state: Any) -> None:
        """Return to a copied state."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered weight rule."""

    name: str
    make: Callable[..., WeightRule]
    formula: str
    source: str
    parameters: Mapping[str, Parameter]


RULES: dict[str, Rule] = {}


def rule(name: str, formula: str, source: str, **parameters: Parameter) -> Callable[[type[Any]], type[Any]]:
    """Register a weight rule under ``name``."""

    def register(cls: type[Any]) -> type[Any]:
        RULES[name] = Rule(name, cls, formula, source, parameters)
        return cls

    return register


@rule("static", "w_i = w⁰_i", "weights as given")
class Static:
    """The given weights, always."""

    def __init__(self, base: F64) -> None:
        self._base = base

    def weights(self, logprobs: F64) -> F64:
        return self._base

    def observe(self, logprobs: F64) -> None:
        pass

    def state(self) -> Any:
        return None

    def set_state(self, state: Any) -> None:
        pass


@rule(
    "evidence",
    "w_i ∝ w⁰_i exp(η c_i), c_i ← γ c_i + ln p_i(x)",
    "online Bayes mixture, tempered, with forgetting",
    eta=Parameter(0.1, 0.0, 10.0),
    gamma=Parameter(0.99, 0.0, 1.0),
)
class Evidence:
    """Experts that foresaw the text so far count more; η tempers, γ forgets."""

    def __init__(self, base: F64, eta: float = 0.1, gamma: float = 0.99) -> None:
        self._log_base = np.log(base)
        self._eta = eta
        self._gamma = gamma
        self._credit = np.zeros(len(base))

    def weights(self, logprobs: F64) -> F64:
        logs = self._log_base + self._eta * self._credit
        raw = np.exp(logs - logs.max())
        weights: F64 = raw / raw.sum()
        return weights

    def observe(self, logprobs: F64) -> None:
        # An expert that excluded what came is as wrong as can be, but must be able to recover.
        self._credit = self._gamma * self._credit + np.maximum(logprobs, _LOWEST)
        self._credit -= self._credit.max()

    def state(self) -> Any:
        return self._credit.copy()

    def set_state(self, state: Any) -> None:
        self._credit = state.copy()


_LOWEST = -700.0
"""ln of about the smallest float64: keeps the running evidence finite."""
