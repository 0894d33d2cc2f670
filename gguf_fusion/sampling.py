"""Sampling from the fused law: mask, penalty, temperature, top-k, top-p, min-p, then one seeded draw.

llama.cpp truncates before the temperature; here the temperature comes first, so that every "off" value is bit-identical
to plain sampling. In byte space all settings act per byte.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypedDict

import numpy as np

from gguf_fusion.arrays import F64, I32, check_array
from gguf_fusion.config import check_known
from gguf_fusion.errors import SamplingError

MAX_SEED = 2**32 - 1
_NGRAM = 4
"""Bytes of context that make a repetition: single bytes repeat in every honest text."""


_COLDEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one text is drawn; every value is checked, SamplingError says interval and value."""

    temperature: float = 0.8
    """0 (or less than a millionth, which is the same) takes the most probable symbol and ignores the seed."""
    top_k: int = 0
    """0 = off."""
    top_p: float = 1.0
    """1 = off."""
    min_p: float = 0.05
    """Symbols below ``min_p`` times the most probable one are dropped; 0 = off."""
    repeat_penalty: float = 0.0
    """Subtracted from ln f per earlier occurrence of the repeated n-gram; 0 = off. END is exempt."""
    seed: int | None = None
    """None = fresh entropy; 0 is a seed like any other."""
    max_bytes: int | None = None
    max_tokens: int | None = None
    """Pieces of the heaviest expert's vocabulary."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are not part of the result."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repeat_penalty", 0.0, 100.0),
        ):
            self._check(name, (int, float), low, high)
        self._check("top_k", (int,), 0, 10**9)
        for name, low, high in (("seed", 0, MAX_SEED), ("max_bytes", 0, 2**40), ("max_tokens", 0, 2**40)):
            if getattr(self, name) is not None:
                self._check(name, (int,), low, high)
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise SamplingError(f"stop: expected texts of at least one character, got {self.stop!r}")

    def _check(self, name: str, types: tuple[type, ...], low: float, high: float) -> None:
        value: Any = getattr(self, name)
        kind = "a whole number" if float not in types else "a number"
        is_number = isinstance(value, types) and not isinstance(value, bool)
        if not is_number or not low <= float(value) <= high:  # NaN lies in no interval
            raise SamplingError(f"{name}: expected {kind} in [{low:g}, {high:g}], got {value!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable symbol is taken: a smaller temperature would only overflow."""
        return self.temperature < _COLDEST

    def seeded(self) -> SamplingParams:
        """The same parameters with a seed: the given one, or a fresh one to print."""
        if self.seed is not None:
            return self
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return SamplingParams(**{**values, "seed": secrets.randbelow(MAX_SEED + 1)})


class SamplingKeywords(TypedDict, total=False):
    """The fields of ``SamplingParams``."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int | None
    max_bytes: int | None
    max_tokens: int | None
    stop: Sequence[str] | str


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from keywords. Raises UsageError for an unknown one, with the nearest."""
    check_known("sampling parameter", given, SamplingKeywords.__annotations__)
    values = dict(given)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    elif "stop" in values:
        values["stop"] = tuple(values["stop"] or ())
    return SamplingParams(**values)


class Constraint(Protocol):
    """What the next symbol may be, such as a grammar at work on one text."""

    def mask(self) -> I32:
        """int32[ceil(n_symbols / 32)], bit set = allowed."""
        ...

    def advance(self, symbol: int) -> None:
        """Move past a symbol that was allowed."""
        ...


class Sampler:
    """Draws symbols for one text; the generator belongs to it, so a seed gives one text whatever else runs."""

    def __init__(
        self,
        params: SamplingParams,
        n_symbols: int,
        end_symbol: int | None,
        *,
        constraint: Constraint | None = None,
        bias: Mapping[int, float] | None = None,
    ) -> None:
        """``bias`` is added to ln f of symbols. Raises SamplingError for a symbol that does not exist."""
        self.params = params.seeded()
        self._constraint = constraint
        self._bias = _bias_array(bias, n_symbols) if bias else None
        self._n = n_symbols
        self._end = end_symbol
        self._rng = np.random.Generator(np.random.PCG64(self.params.seed))
        self._seen: dict[tuple[int, ...], Counter[int]] = {}
        self._recent: tuple[int, ...] = ()
        self._peeked: float | None = None

    def draw(self, log_f: F64) -> int:
        """One symbol from float64[n_symbols] normalised log-probabilities.

        Raises SamplingError when nothing is allowed.
        """
        check_array("log_f", log_f, np.float64, (self._n,))
        logs = log_f
        if self._constraint is not None:
            logs = np.where(allowed(self._constraint.mask(), self._n), logs, -np.inf)
        if self._bias is not None:
            logs = logs + self._bias
        if self.params.repeat_penalty:
            logs = self._penalised(logs)
        top = float(logs.max())
        if top == -np.inf:
            raise SamplingError("expected a law with mass on an allowed symbol, got none; loosen the mask or the pool")
        if self.params.greedy:
            return int(np.argmax(logs))
        return self._pick(truncated(np.exp((logs - top) / self.params.temperature), self.params))

    def _pick(self, mass: F64) -> int:
        total = np.cumsum(mass)
        number, self._peeked = self.peek(), None
        return int(np.searchsorted(total, number * total[-1], side="right"))

    def peek(self) -> float:
        """The random number that the next draw will use."""
        if self._peeked is None:
            self._peeked = float(self._rng.random())
        return self._peeked

    def factors(self) -> F64 | None:
        """float64[n_symbols]: what bias and mask multiply probabilities with; None where a draw cannot be foreseen.

        That is so with settings that depend on the order of all symbols, or flatten the law.
        """
        params = self.params
        if params.repeat_penalty or params.temperature > 1.0 or params.top_p < 1.0 or 0 < params.top_k < self._n:
            return None
        factors = np.ones(self._n) if self._bias is None else np.exp(self._bias)
        if self._constraint is not None:
            factors = np.where(allowed(self._constraint.mask(), self._n), factors, 0.0)
        return factors

    def take(self, symbol: int) -> None:
        """Count a symbol as drawn that is known to be the one that ``draw`` would give."""
        self._peeked = None
        self.observe(symbol)

    def _penalised(self, logs: F64) -> F64:
        counts = self._seen.get(self._recent)
        if not counts:
            return logs
        logs = logs.copy()
        for symbol, n in counts.items():
            logs[symbol] -= self.params.repeat_penalty * n
        return logs

    def observe(self, symbol: int) -> None:
        """Remember a symbol of the text, for the constraint and the repetition penalty."""
        if self._constraint is not None:
            self._constraint.advance(symbol)
        if symbol == self._end or not self.params.repeat_penalty:
            return
        if len(self._recent) == _NGRAM - 1:
            self._seen.setdefault(self._recent, Counter())[symbol] += 1
        self._recent = (*self._recent, symbol)[-(_NGRAM - 1) :]


def truncated(mass: F64, params: SamplingParams) -> F64:
    """Unnormalised probabilities after top-k, top-p and min-p; ties at a threshold are kept."""
    if 0 < params.top_k < len(mass):
        mass = np.where(mass >= np.partition(mass, -params.top_k)[-params.top_k], mass, 0.0)
    if params.top_p < 1.0:
        order = np.argsort(-mass, kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        dropped = order[1:][before[1:] >= params.top_p * mass.sum()]
        mass = mass.copy()
        mass[dropped] = 0.0
    if params.min_p > 0.0:
        mass = np.where(mass >= params.min_p * mass.max(), mass, 0.0)
    return mass


def _bias_array(bias: Mapping[int, float], n_symbols: int) -> F64:
    values = np.zeros(n_symbols)
    for symbol, value in bias.items():
        if not 0 <= symbol < n_symbols or not -100.0 <= value <= 100.0:
            raise SamplingError(
                f"logit_bias: expected symbols in 0…{n_symbols - 1} with numbers in [-100, 100], got {symbol}: {value}"
            )
        values[symbol] = value
    return values


def allowed(mask: I32, n_symbols: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """bool[n_symbols] from a bit mask int32[ceil(n_symbols / 32)]."""
    check_array("mask", mask, np.int32, (-(-n_symbols // 32),))
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:n_symbols].astype(np.bool_)
