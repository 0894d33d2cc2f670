"""The router at work on one text, behind the same interface as ``strategy.Fuser``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gguf_fusion.arrays import F64
from gguf_fusion.errors import StrategyError
from gguf_fusion.router.head import RUNNING, Head, features, fused
from gguf_fusion.strategy import Fused, Fuser, check_laws


class HiddenExpert(Protocol):
    """What is asked of the router expert: the states of the rows last computed along the text, and how often."""

    hidden: NDArray[np.float32] | None
    n_hidden: int


Watch = Callable[[F64, F64, F64], None]
"""Called at every step with features float64[n_features], the experts' laws float64[n_head_experts, n_symbols] and the
router's own float64[n_symbols]."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The strategy of a trained head; ``hard`` overrides the head's own form, ``watch`` sees what it decides by."""

    head: Head
    hard: bool | None = None
    watch: Watch | None = None

    def __str__(self) -> str:
        head = self.head
        form = "hard" if (head.hard if self.hard is None else self.hard) else "soft"
        return f"fusionroute({form}, lambda={head.lam:.4g}, router={head.router})"

    def bind(
        self, n_experts: int, n_symbols: int, base_weights: F64, names: Sequence[str], roles: Sequence[str] = ()
    ) -> RouterFuser:
        """State for one text; ``attach`` the router expert before the first step."""
        head = self.head if self.hard is None else replace(self.head, hard=self.hard)
        return RouterFuser(head, base_weights, names, self.watch)


class RouterFuser(Fuser):
    """Chooses an expert, or mixes them, by the router's hidden state, and adds the router's own law."""

    def __init__(self, head: Head, base_weights: F64, names: Sequence[str], watch: Watch | None = None) -> None:
        missing = [name for name in (*head.experts, head.router) if name not in names]
        if missing:
            raise StrategyError(
                f"the router was trained for {', '.join(head.experts)} with {head.router} as router; "
                f"here {missing[0]!r} is missing (loaded: {', '.join(names)})"
            )
        self.head = head
        self.active = np.array([name in head.experts or name == head.router for name in names])
        self.last_weights = np.array([float(name in head.experts) for name in names]) / len(head.experts)
        self._mine = [list(names).index(name) for name in head.experts]
        self._router = list(names).index(head.router)
        self._names = list(names)
        self._expert: HiddenExpert | None = None
        self._news = -1
        self._since = 0
        self._running = np.zeros(len(head.experts))
        self._n_observed = 0
        self._watch = watch

    def attach(self, experts: Sequence[Any]) -> None:
        expert = experts[self._router]
        if not hasattr(expert, "hidden"):
            raise StrategyError(f"expert {self.head.router!r} gives no hidden states; load it as a router")
        self._expert = expert

    def observe_prompt(self, logprobs: F64) -> None:
        for column in logprobs[self._mine].T:
            self._observe(column)

    def omega(self, logprobs: F64) -> F64:
        """float64[n_head_experts], sum 1: the head's weights at this step."""
        expert = self._expert
        if expert is None or expert.hidden is None:
            return np.full(len(self._mine), 1.0 / len(self._mine))
        if expert.n_hidden != self._news:
            self._news, self._since = expert.n_hidden, 0
        x = features(
            self.head.extras, expert.hidden[-1:], np.array([self._since]), logprobs[None, self._mine],
            self.running()[None],
        )  # fmt: skip
        if self._watch is not None:
            self._watch(x[0], logprobs[self._mine], logprobs[self._router].copy())
        weights: F64 = self.head.weights(x)[0]
        return weights

    def running(self) -> F64:
        """float64[n_head_experts]: recent bits per byte of each expert."""
        seen = 1.0 - RUNNING**self._n_observed
        bits: F64 = self._running / (seen or 1.0)
        return bits

    def fuse(self, logprobs: F64) -> Fused:
        used = [*self._mine, self._router]
        check_laws(logprobs[used], [self._names[i] for i in used])
        omega = self.omega(logprobs)
        log_f = fused(
            omega[None], self.head.lam, logprobs[None, self._mine], logprobs[None, self._router], hard=self.head.hard
        )[0]
        weights = np.zeros(len(self._names))
        weights[self._mine] = np.eye(len(omega))[omega.argmax()] if self.head.hard else omega
        self.last_weights = weights
        return Fused(log_f, weights, 0.0)

    def advance(self, symbol: int, logprobs: F64, *, generated: bool) -> None:
        self._since += 1
        if not generated:
            self._observe(logprobs[self._mine, symbol])

    def _observe(self, logprobs: F64) -> None:
        bits = np.minimum(-logprobs / np.log(2.0), 40.0)
        self._running = RUNNING * self._running + (1.0 - RUNNING) * bits
        self._n_observed += 1

    def snapshot(self) -> Any:
        return self._news, self._since, self._running.copy(), self._n_observed

    def restore(self, snapshot: Any) -> None:
        self._news, self._since, running, self._n_observed = snapshot
        self._running = running.copy()


def running_bits(given: F64) -> F64:
    """float64[n, n_experts]: recent bits per byte before each byte, from ln p of the bytes that came, a whole text."""
    bits = np.minimum(-given / np.log(2.0), 40.0)
    out: F64 = np.zeros_like(bits)
    total = np.zeros(bits.shape[1])
    for t in range(1, len(bits)):
        total = RUNNING * total + (1.0 - RUNNING) * bits[t - 1]
        out[t] = total / (1.0 - RUNNING**t)
    return out
