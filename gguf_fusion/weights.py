"""Weight rules: how much each expert counts at the next symbol. Adding a rule is one decorated class plus its laws.

Laws come as natural logs float64[n_experts, ..., n_symbols]; the middle axes are steps, as in ``fusion``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64, I64
from gguf_fusion.fusion import entropies
from gguf_fusion.parameters import Name, Names, Number, Numbers, Parameter, Word, position

N_BYTES = 257
"""Symbols of the byte space; in it symbols below 256 are bytes."""

LOWEST = -700.0
"""ln of about the smallest float64: keeps running evidence finite."""


@dataclass(frozen=True, slots=True)
class Members:
    """The experts a rule weighs. base: float64[n], > 0, sum 1; names, roles: per expert; n_symbols: of the space."""

    base: F64
    names: Sequence[str]
    roles: Sequence[str] = ()
    n_symbols: int = N_BYTES


class WeightRule:
    """Mutable state of one text. Subclasses give ``weights``, and what they remember of a text."""

    needs_laws = True
    """Whether the weights of a drawn symbol depend on the experts' present or earlier laws of drawn symbols."""

    stateless = False
    """Whether weights depend on the present laws alone; then whole blocks are weighed at once."""

    def __init__(self, members: Members) -> None:
        self.members = members

    def weights(self, logprobs: F64) -> F64:
        """float64[n, ...], >= 0, sum 1 over the experts: weights for the next symbol, given every expert's law."""
        raise AssertionError

    def observe(self, gained: F64, symbol: int = -1) -> None:
        """float64[n]: what each expert gave to a symbol of the given text; -1 where only these values are known."""

    def advance(self, gained: F64, symbol: int, *, generated: bool) -> None:
        """Move past one symbol. Only given text is evidence; what was drawn from the fused law proves nothing."""
        if not generated:
            self.observe(gained, symbol)

    def hint(self, text: bytes, task: str = "") -> None:
        """The user's text, and the kind of task where the user names it."""

    def block(self, logprobs: F64, gained: F64, came: I64) -> F64:
        """float64[n, n_steps]: weights of consecutive steps of given text, and move past them.

        logprobs : float64[n, n_steps, n_symbols];  gained : float64[n, n_steps];  came : int64[n_steps]
        """
        if self.stateless:
            return self.weights(logprobs)
        out = np.empty(gained.shape)
        for t, symbol in enumerate(came.tolist()):
            out[:, t] = self.weights(logprobs[:, t])
            self.advance(gained[:, t], symbol, generated=False)
        return out

    def state(self) -> Any:
        """A copy of what a text changes."""
        return None

    def set_state(self, state: Any) -> None:
        """Return to a copied state."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered weight rule."""

    name: str
    make: Callable[..., WeightRule]
    formula: str
    source: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


RULES: dict[str, Rule] = {}


def rule(name: str, formula: str, source: str, **parameters: Parameter) -> Callable[[type[Any]], type[Any]]:
    """Register a weight rule under ``name``."""

    def register(cls: type[Any]) -> type[Any]:
        RULES[name] = Rule(name, cls, formula, source, parameters)
        return cls

    return register


@rule("static", "w_i = w⁰_i", "weights as given")
class Static(WeightRule):
    """The given weights, always."""

    stateless = True
    needs_laws = False

    def weights(self, logprobs: F64) -> F64:
        base = self.members.base
        shape = logprobs.shape[:-1]
        return np.ascontiguousarray(np.broadcast_to(base.reshape(-1, *(1,) * (len(shape) - 1)), shape))


@rule(
    "schedule",
    "w = (1 − u) a + u b, u = min(t, length)/length, t symbols of output",
    "llm-fusion's dynamic",
    first=Name(),
    start=Numbers(0.0, 1e6),
    end=Numbers(0.0, 1e6),
    length=Number(400.0, 0.0, 1e9),
)
class Schedule(WeightRule):
    """From one set of weights to another; by default the first expert goes from 0.8 to 0.2, the rest share."""

    needs_laws = False

    def __init__(
        self,
        members: Members,
        first: str = "",
        start: Sequence[float] = (),
        end: Sequence[float] = (),
        length: float = 400.0,
    ) -> None:
        super().__init__(members)
        lead = position("schedule", "first", first, members.names) if first else int(np.argmax(members.base))
        self._a, self._b = (
            _given_or("schedule", key, given, _led(len(members.base), lead, share))
            for key, given, share in (("start", start, 0.8), ("end", end, 0.2))
        )
        self._length = length
        self._t = 0

    def weights(self, logprobs: F64) -> F64:
        return self._at(np.float64(self._t))

    def _at(self, t: F64 | np.float64) -> F64:
        """float64[n, ...]: weights after ``t`` symbols, a number or an array."""
        u = np.minimum(t, self._length) / self._length if self._length else np.ones_like(t)
        mixed: F64 = np.multiply.outer(self._a, 1.0 - u) + np.multiply.outer(self._b, u)
        return mixed

    def block(self, logprobs: F64, gained: F64, came: I64) -> F64:
        weights = self._at(self._t + np.arange(len(came), dtype=np.float64))
        self._t += len(came)
        return weights

    def advance(self, gained: F64, symbol: int, *, generated: bool) -> None:
        self._t += 1

    def state(self) -> Any:
        return self._t

    def set_state(self, state: Any) -> None:
        self._t = state


@rule(
    "entropy",
    "w_i ∝ w⁰_i 2^(−H_i/θ); inverse: w⁰_i/(H_i + 0.01)",
    "llm-fusion's adaptive, on whole laws",
    theta=Number(1.0, 1e-6, 1e6),
    form=Word("power", ("power", "inverse")),
)
class Entropy(WeightRule):
    """Experts that are sure of the next symbol count more."""

    stateless = True

    def __init__(self, members: Members, theta: float = 1.0, form: str = "power") -> None:
        super().__init__(members)
        self._theta, self._inverse = theta, form == "inverse"

    def weights(self, logprobs: F64) -> F64:
        bits = entropies(logprobs)
        factor = 1.0 / (bits + 0.01) if self._inverse else np.exp2((bits.min(axis=0) - bits) / self._theta)
        return normal(along(self.members.base, bits) * factor)


@rule(
    "top1",
    "w_i ∝ w⁰_i m_i^κ, m_i = max_s p_i(s)",
    "llm-fusion's confidence, on whole laws",
    kappa=Number(1.0, 0.0, 100.0),
)
class Top1(WeightRule):
    """Experts whose first choice is more probable count more."""

    stateless = True

    def __init__(self, members: Members, kappa: float = 1.0) -> None:
        super().__init__(members)
        self._kappa = kappa

    def weights(self, logprobs: F64) -> F64:
        top = logprobs.max(axis=-1)
        return normal(along(self.members.base, top) * np.exp(self._kappa * (top - top.max(axis=0))))


@rule(
    "mix",
    "w = 0.7 schedule + 0.3 top1",
    "llm-fusion's hybrid",
    length=Number(400.0, 0.0, 1e9),
    kappa=Number(1.0, 0.0, 100.0),
)
class Mix(Schedule):
    """A schedule that listens to confidence."""

    needs_laws = True

    def __init__(self, members: Members, length: float = 400.0, kappa: float = 1.0) -> None:
        super().__init__(members, length=length)
        self._top = Top1(members, kappa)

    def weights(self, logprobs: F64) -> F64:
        mixed: F64 = 0.7 * super().weights(logprobs) + 0.3 * self._top.weights(logprobs)
        return mixed

    def block(self, logprobs: F64, gained: F64, came: I64) -> F64:
        mixed: F64 = 0.7 * super().block(logprobs, gained, came) + 0.3 * self._top.weights(logprobs)
        return mixed


@rule("sharpest", "w = 1 for the expert of least entropy", "llm-fusion's min-entropy, on whole laws")
class Sharpest(WeightRule):
    """All for the expert that is surest of the next symbol; of equals the one of larger weight."""

    stateless = True

    def weights(self, logprobs: F64) -> F64:
        bits = entropies(logprobs)
        return one_hot(np.round(bits, 12), self.members.base)


@rule(
    "cascade",
    "w = 1 for the first expert in order with max_s p_i(s) ≥ τ, the last without condition",
    "cascades (FrugalGPT, Chen et al. 2023), per symbol",
    order=Names(),
    tau=Number(0.5, 0.0, 1.0),
)
class Cascade(WeightRule):
    """Ask one expert after the other until one is sure; by default in the order of falling weight."""

    stateless = True

    def __init__(self, members: Members, order: Sequence[str] = (), tau: float = 0.5) -> None:
        super().__init__(members)
        by_weight = sorted(range(len(members.base)), key=lambda i: (-members.base[i], i))
        named = [position("cascade", "order", name, members.names) for name in order]
        self._order = named + [i for i in by_weight if i not in named]
        self._log_tau = float(np.log(max(tau, 1e-300)))

    def weights(self, logprobs: F64) -> F64:
        sure = logprobs.max(axis=-1)[self._order] >= self._log_tau
        sure[-1] = True
        first = np.array(self._order)[sure.argmax(axis=0)]
        hot: F64 = (np.arange(len(self._order)).reshape(-1, *(1,) * first.ndim) == first).astype(np.float64)
        return hot


def one_hot(costs: F64, base: F64) -> F64:
    """float64[n, ...]: 1 at the smallest cost; of equals where the base weight is largest, then the first."""
    order = np.argsort(-base, kind="stable")
    chosen = order[costs[order].argmin(axis=0)]
    hot: F64 = (np.arange(len(base)).reshape(-1, *(1,) * chosen.ndim) == chosen).astype(np.float64)
    return hot


def normal(raw: F64) -> F64:
    """float64[n, ...] scaled to sum 1 over the experts."""
    weights: F64 = raw / raw.sum(axis=0)
    return weights


def along(values: F64, like: F64) -> F64:
    """float64[n] with axes of length 1 behind, to be combined with float64[n, ...]."""
    shaped: F64 = values.reshape(-1, *(1,) * (like.ndim - 1))
    return shaped


def _led(n: int, lead: int, share: float) -> F64:
    """float64[n]: ``share`` for one, the rest equally for the others."""
    weights = np.full(n, (1.0 - share) / max(1, n - 1))
    weights[lead] = share if n > 1 else 1.0
    return weights


def _given_or(owner: str, key: str, given: Sequence[float], otherwise: F64) -> F64:
    if not len(given):
        return otherwise
    values = np.array(given, np.float64)
    if len(values) != len(otherwise) or values.sum() <= 0.0:
        raise ValueError(f"{owner}: expected {len(otherwise)} numbers with a positive sum for {key}, got {list(given)}")
    weights: F64 = values / values.sum()
    return weights
