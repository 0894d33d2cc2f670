"""Strategies at work: a pool and a weight rule bound to the experts of one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gguf_fusion import evidence
from gguf_fusion.arrays import F64, I64, Bool, check_array
from gguf_fusion.errors import ExpertFailedError, StrategyError
from gguf_fusion.fusion import POOLS, normalised
from gguf_fusion.parameters import Number, Numbers, Parameter, Value, shown
from gguf_fusion.weights import RULES, Members

__all__ = ["COMMON", "Fused", "Fuser", "PoolFuser", "PoolStrategy", "Strategy", "base_of", "check_laws", "evidence"]

COMMON: Mapping[str, Parameter] = {"tau": Numbers(0.01, 100.0), "smooth": Number(0.0, 0.0, 1.0)}
"""Parameters of every strategy. tau: calibration temperature per expert, p_i ← softmax(ln p_i / τ_i);
smooth: share ε of the uniform law, f ← (1 − ε) f + ε/|S|."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One fused step: log f float64[n_symbols] (normalised), weights float64[n_experts], log Z of the pool."""

    log_f: F64
    weights: F64
    log_z: float


class Fuser:
    """A strategy on one text. Subclasses fuse; what is common to all is here."""

    active: Bool
    """bool[n_experts]: experts that take part; the others have no influence and need no evaluation."""

    def attach(self, experts: Sequence[Any]) -> None:
        """Give the experts themselves, in order; most strategies need their laws only."""

    def hint(self, text: bytes, task: str = "") -> None:
        """Give the user's text, and the kind of task where the user names it."""

    def observe_prompt(self, logprobs: F64) -> None:
        """float64[n_experts, n_bytes], oldest first: what each expert gave to the bytes of the prompt."""

    def fuse(self, logprobs: F64) -> Fused:
        """Fuse float64[n_experts, n_symbols] natural log-probabilities; rows of inactive experts are not read.

        Raises ExpertFailedError for NaN or +inf, naming the expert.
        """
        raise AssertionError

    def weights_ahead(self) -> F64 | None:
        """float64[n_experts]: weights of the next drawn symbol where they do not depend on laws and the pool is linear.

        None where an expert's law may outweigh or silence the others, so that nothing is decided without it.
        """
        return None

    def advance(self, symbol: int, logprobs: F64, *, generated: bool) -> None:
        """Move past one symbol. Only given text is evidence; what was drawn from the fused law proves nothing."""

    def fuse_block(self, logprobs: F64, came: I64) -> tuple[F64, F64, F64]:
        """Fuse consecutive steps of given text and move past them; equals ``fuse`` and ``advance`` step by step.

        logprobs : float64[n_experts, n_steps, n_symbols];  came : int64[n_steps]
        Returns (log f float64[n_steps, n_symbols], weights float64[n_experts, n_steps], log Z float64[n_steps]).
        """
        laws, weights, totals = [], [], []
        for t, symbol in enumerate(came.tolist()):
            here = np.ascontiguousarray(logprobs[:, t])
            fused = self.fuse(here)
            self.advance(symbol, here, generated=False)
            laws.append(fused.log_f)
            weights.append(fused.weights)
            totals.append(fused.log_z)
        return np.array(laws), np.array(weights).T, np.array(totals)

    def responsibility(self, symbol: int, logprobs: F64) -> F64:
        """float64[n_experts], sum 1: w_i p_i(symbol) normalised, each expert's part in a mixture of this step."""
        weights = self.last_weights
        parts = np.where(self.active, weights * np.exp(logprobs[:, symbol]), 0.0)
        total = float(parts.sum())
        shares: F64 = parts / total if total > 0 else weights.copy()
        return shares

    last_weights: F64
    """float64[n_experts]: weights of the last fused step; before the first one the base weights."""

    def snapshot(self) -> Any:
        """A copy of the gathered evidence."""
        raise AssertionError

    def restore(self, snapshot: Any) -> None:
        """Return to a copied state."""
        raise AssertionError


class Strategy(Protocol):
    """What fuses: ``str`` prints what ``expressions.parse`` reads."""

    def bind(
        self, n_experts: int, n_symbols: int, base_weights: F64, names: Sequence[str], roles: Sequence[str] = ()
    ) -> Fuser:
        """State for one text. ``base_weights``: float64[n_experts], >= 0 with a positive sum; ``roles``: per expert."""
        ...


@dataclass(frozen=True, slots=True)
class PoolStrategy:
    """A pool with parameters and a weight rule with parameters."""

    pool: str
    pool_parameters: Mapping[str, Value]
    rule: str
    rule_parameters: Mapping[str, Value]

    def __str__(self) -> str:
        rule = _call(self.rule, self.rule_parameters, RULES[self.rule].parameters)
        return _call(self.pool, self.pool_parameters, {**POOLS[self.pool].parameters, **COMMON}, f"w={rule}")

    def bind(
        self, n_experts: int, n_symbols: int, base_weights: F64, names: Sequence[str], roles: Sequence[str] = ()
    ) -> PoolFuser:
        check_array("base_weights", base_weights, np.float64, (n_experts,))
        return PoolFuser(self, n_symbols, base_weights, names, roles)


def _call(name: str, values: Mapping[str, Value], known: Mapping[str, Parameter], *more: str) -> str:
    """``name(key=value, …)`` with the parameters that are not as usual, and those that always stand there."""
    given = [
        f"{key}={shown(value)}"
        for key, value in values.items()
        if value != known[key].default or getattr(known[key], "always", False)
    ]
    arguments = [*given, *more]
    return f"{name}({', '.join(arguments)})" if arguments else name


def base_of(base_weights: F64, names: Sequence[str]) -> F64:
    """The weights scaled to sum 1; raises StrategyError unless they are one number >= 0 per expert, not all 0."""
    base = base_weights
    if len(base) != len(names) or not np.isfinite(base).all() or (base < 0).any() or base.sum() <= 0:
        raise StrategyError(f"weights: expected {len(names)} numbers >= 0 with a positive sum, got {base.tolist()}")
    scaled: F64 = base / base.sum()
    return scaled


def check_laws(logprobs: F64, names: Sequence[str]) -> None:
    """Raise ExpertFailedError, naming the expert, if float64[n_experts, ..., n_symbols] holds NaN or +inf."""
    if not logprobs.max() < np.inf:
        worst = logprobs.max(axis=tuple(range(1, logprobs.ndim)))
        name = names[int(np.argmin(worst < np.inf))]
        raise ExpertFailedError(name, "its law holds NaN or +inf; the text cannot go on")


class PoolFuser(Fuser):
    """The strategy at work on one text: weights, pool, and the evidence gathered so far."""

    def __init__(
        self, strategy: PoolStrategy, n_symbols: int, base_weights: F64, names: Sequence[str], roles: Sequence[str] = ()
    ) -> None:
        self.last_weights = base_of(base_weights, names)
        self.active = self.last_weights > 0
        self._every = bool(self.active.all())
        on = self.active.tolist()
        self._names = [name for name, active in zip(names, on, strict=True) if active]
        self._shape = (len(names), n_symbols)
        pool = POOLS[strategy.pool]
        parameters: dict[str, Any] = dict(strategy.pool_parameters)
        self._smooth: float = parameters.pop("smooth")
        self._tau = self._for_active(strategy.pool, "tau", parameters.pop("tau"), on)
        for key in ("a", "b"):
            if key in parameters:
                parameters[key] = tuple(self._for_active(strategy.pool, key, parameters[key], on))
        if parameters.get("m"):
            if len(parameters["m"]) != len(on) ** 2:
                raise StrategyError(f"{strategy.pool}: expected {len(on)}² numbers in m, got {len(parameters['m'])}")
            square = np.array(parameters["m"], np.float64).reshape(len(on), len(on))
            parameters["m"] = tuple(square[np.ix_(self.active, self.active)].ravel())
        base = self.last_weights[self.active]
        if pool.needs_names:
            parameters |= {"names": self._names, "base": base}
        self._pool, self._parameters = pool.function, parameters
        mine = [role for role, active in zip(roles, on, strict=True) if active] if roles else []
        members = Members(base / base.sum(), self._names, mine, n_symbols)
        rule_parameters = dict(strategy.rule_parameters)
        for key in ("start", "end"):
            if key in rule_parameters:
                rule_parameters[key] = tuple(self._for_active(strategy.rule, key, rule_parameters[key], on))
        self._rule = RULES[strategy.rule].make(members, **rule_parameters)
        plain = strategy.pool == "linear" and not self._smooth and not len(self._tau)
        self._foreseen = plain and not self._rule.needs_laws

    @staticmethod
    def _for_active(owner: str, key: str, given: Any, on: Sequence[bool]) -> F64:
        """The numbers of the active experts out of a list with one per expert."""
        if len(given) not in (0, len(on)):
            raise StrategyError(f"{owner}: expected {len(on)} numbers in {key}, one per expert, got {len(given)}")
        return np.array([value for value, active in zip(given, on, strict=False) if active], np.float64)

    def hint(self, text: bytes, task: str = "") -> None:
        self._rule.hint(text, task)

    def observe_prompt(self, logprobs: F64) -> None:
        for column in logprobs.T:
            self._rule.observe(column[self.active])

    def fuse(self, logprobs: F64) -> Fused:
        check_array("logprobs", logprobs, np.float64, self._shape)
        mine = self._mine(logprobs)
        check_laws(mine, self._names)
        mine = self._calibrated(mine)
        weights = self._rule.weights(mine)
        log_f, log_z = normalised(self._pool(mine, weights, **self._parameters))
        self.last_weights = np.zeros(len(self.active))
        self.last_weights[self.active] = weights
        return Fused(self._smoothed(log_f), self.last_weights, float(log_z))

    def weights_ahead(self) -> F64 | None:
        if not self._foreseen:
            return None
        self.last_weights = np.zeros(len(self.active))
        self.last_weights[self.active] = self._rule.weights(np.zeros((len(self._names), self._shape[1])))
        return self.last_weights

    def advance(self, symbol: int, logprobs: F64, *, generated: bool) -> None:
        mine = self._mine(logprobs)
        gained = self._calibrated(mine)[:, symbol] if len(self._tau) else mine[:, symbol]
        self._rule.advance(gained, symbol, generated=generated)

    def fuse_block(self, logprobs: F64, came: I64) -> tuple[F64, F64, F64]:
        mine = logprobs[self.active]
        check_laws(mine, self._names)
        mine = self._calibrated(mine)
        gained = np.take_along_axis(mine, came[None, :, None], axis=2)[:, :, 0]
        weights = self._rule.block(mine, gained, came)
        log_f, log_z = normalised(self._pool(mine, weights, **self._parameters))
        every = np.zeros((len(self.active), len(came)))
        every[self.active] = weights
        if len(came):
            self.last_weights = every[:, -1].copy()
        return self._smoothed(log_f), every, log_z

    def _mine(self, logprobs: F64) -> F64:
        """Rows of the active experts; the array itself where all are."""
        return logprobs if self._every else logprobs[self.active]

    def _calibrated(self, logprobs: F64) -> F64:
        if not len(self._tau):
            return logprobs
        law, _ = normalised(logprobs / self._tau.reshape(-1, *(1,) * (logprobs.ndim - 1)))
        return law

    def _smoothed(self, log_f: F64) -> F64:
        if not self._smooth:
            return log_f
        with np.errstate(divide="ignore"):
            law: F64 = np.log((1.0 - self._smooth) * np.exp(log_f) + self._smooth / log_f.shape[-1])
        return law

    def snapshot(self) -> Any:
        return self._rule.state()

    def restore(self, snapshot: Any) -> None:
        self._rule.set_state(snapshot)
