"""Weight rules that learn from the text: evidence, the prompt's likelihood, the kind of task."""

from __future__ import annotations

from typing import Any

import numpy as np

from gguf_fusion.arrays import F64, I64
from gguf_fusion.kernels.scan import evidence_weights
from gguf_fusion.parameters import Number, Word
from gguf_fusion.roles import TASKS, classify, role_weights
from gguf_fusion.weights import LOWEST, N_BYTES, Members, WeightRule, along, normal, one_hot, rule


@rule(
    "prompt",
    "w_i ∝ w⁰_i 2^(−b_i/θ), b_i bits per byte of the given text's beginning; em: linear weights that fit it best",
    "PackLLM (arXiv 2404.11531), per byte",
    theta=Number(0.1, 1e-6, 1e6),
    fit=Word("similarity", ("similarity", "em")),
    bytes=Number(512.0, 32.0, 1e6),
)
class Prompt(WeightRule):
    """Experts that foresee the prompt count more; under 32 bytes the weights are as given."""

    needs_laws = False

    def __init__(self, members: Members, theta: float = 0.1, fit: str = "similarity", bytes: float = 512.0) -> None:  # noqa: A002
        super().__init__(members)
        self._theta, self._em, self._most = theta, fit == "em", int(bytes)
        self._seen: list[F64] = []
        self._known: tuple[int, F64] = (0, members.base)

    def weights(self, logprobs: F64) -> F64:
        n = len(self._seen)
        if n >= _LEAST_PROMPT and n != self._known[0] and (n == self._most or n % _REFIT == 0):
            gained = np.array(self._seen)
            if self._em:
                self._known = n, em_weights(gained, self.members.base)
            else:
                bits = -gained.mean(axis=0) / np.log(2.0)
                self._known = n, normal(self.members.base * np.exp2((bits.min() - bits) / self._theta))
        return self._known[1]

    def observe(self, gained: F64, symbol: int = -1) -> None:
        if len(self._seen) < self._most:
            self._seen.append(np.maximum(gained, LOWEST))

    def advance(self, gained: F64, symbol: int, *, generated: bool) -> None:
        if generated:
            self._most = len(self._seen)  # the prompt is over
        else:
            self.observe(gained, symbol)

    def state(self) -> Any:
        return list(self._seen), self._known, self._most

    def set_state(self, state: Any) -> None:
        seen, self._known, self._most = state
        self._seen = list(seen)


_LEAST_PROMPT = 32
_REFIT = 16


@rule(
    "evidence",
    "w_i ∝ w⁰_i exp(η c_i), c_i ← γ c_i + ln p_i(x); α > 0: w ← (1 − α) w∘p(x)^η/norm + α w⁰",
    "online Bayes mixture, tempered, with forgetting; fixed share (Herbster & Warmuth 1998)",
    eta=Number(0.1, 0.0, 10.0, always=True),
    gamma=Number(0.99, 0.0, 1.0, always=True),
    alpha=Number(0.0, 0.0, 1.0),
    reset=Word("none", ("none", "word")),
)
class Evidence(WeightRule):
    """Experts that foresaw the text so far count more; η tempers, γ forgets, α shares, ``reset=word`` starts afresh.

    With ``reset=word`` weights return to w⁰ after white space and ASCII punctuation, and inside a word drawn symbols
    count as well: the experts' readings of one word are not mixed half way through.
    """

    def __init__(
        self, members: Members, eta: float = 0.1, gamma: float = 0.99, alpha: float = 0.0, reset: str = "none"
    ) -> None:
        super().__init__(members)
        self._log_base = np.log(members.base)
        self._eta, self._gamma, self._alpha = eta, 1.0 if alpha else gamma, alpha
        self._by_word = self.needs_laws = reset == "word"
        self._credit = np.zeros(len(members.base))

    def weights(self, logprobs: F64) -> F64:
        return self._of(self._credit)

    def _of(self, credit: F64) -> F64:
        """float64[n, ...] weights for float64[n, ...] credits."""
        logs = along(self._log_base, credit) + self._eta * credit
        return normal(np.exp(logs - logs.max(axis=0)))

    def observe(self, gained: F64, symbol: int = -1) -> None:
        # An expert that excluded what came is as wrong as can be, but must be able to recover.
        credit = self._gamma * self._credit + np.maximum(gained, LOWEST)
        if self._by_word and self._ends_word(symbol):
            credit = np.zeros(len(credit))
        elif self._alpha and self._eta:
            shared = (1.0 - self._alpha) * self._of(credit) + self._alpha * self.members.base
            credit = (np.log(shared) - self._log_base) / self._eta
        self._credit = credit - credit.max()

    def advance(self, gained: F64, symbol: int, *, generated: bool) -> None:
        if not generated or self._by_word:
            self.observe(gained, symbol)

    def block(self, logprobs: F64, gained: F64, came: I64) -> F64:
        values = np.ascontiguousarray(np.maximum(gained, LOWEST).T)
        if not self._by_word:
            resets = np.zeros(len(came), np.bool_)
        elif self.members.n_symbols != N_BYTES:
            resets = np.ones(len(came), np.bool_)
        else:
            resets = np.isin(came, SEPARATORS)
        out = np.empty(values.shape)
        evidence_weights(
            values, resets, self._credit, self._log_base, eta=self._eta, gamma=self._gamma, alpha=self._alpha, out=out
        )
        return np.ascontiguousarray(out.T)

    def _ends_word(self, symbol: int) -> bool:
        """White space and ASCII punctuation; a token of a shared vocabulary is a word of its own."""
        if self.members.n_symbols != N_BYTES:
            return True
        return symbol in SEPARATORS

    def state(self) -> Any:
        return self._credit.copy()

    def set_state(self, state: Any) -> None:
        self._credit = state.copy()


SEPARATORS = tuple(b" \t\n\r\v\f!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
"""Bytes that are no part of a word: white space and ASCII punctuation."""


@rule(
    "role",
    "w_i = Σ_c π(c|prompt) W[c, i]; W: 0.6 to experts with role c, the rest equal",
    "task weights; classifier: see gguf_fusion.roles",
    task=Word("auto", ("auto", *TASKS)),
    share=Number(0.6, 0.0, 1.0),
)
class Role(WeightRule):
    """Experts whose role in the registry fits the prompt count more."""

    needs_laws = False

    def __init__(self, members: Members, task: str = "auto", share: float = 0.6) -> None:
        super().__init__(members)
        self._task, self._share = task, share
        self._text = b""
        self._hinted = False
        self._known: F64 | None = None

    def weights(self, logprobs: F64) -> F64:
        if self._known is None:
            chances = {self._task: 1.0} if self._task != "auto" else classify(self._text)
            roles = self.members.roles or [""] * len(self.members.base)
            self._known = role_weights(chances, roles, self.members.base, self._share)
        return self._known

    def hint(self, text: bytes, task: str = "") -> None:
        self._text, self._hinted, self._known = text, True, None
        if task:
            self._task = task

    def observe(self, gained: F64, symbol: int = -1) -> None:
        # Without a prompt of its own the beginning of the given text says what kind of text it is.
        if not self._hinted and 0 <= symbol < N_BYTES - 1 and len(self._text) < _ROLE_BYTES:
            self._text += bytes((symbol,))
            if len(self._text) % _ROLE_STEP == 0:
                self._known = None

    def state(self) -> Any:
        return self._text, self._hinted, self._known, self._task

    def set_state(self, state: Any) -> None:
        self._text, self._hinted, self._known, self._task = state


_ROLE_BYTES = 512
_ROLE_STEP = 32


@rule(
    "recent",
    "w = 1 for the expert with the fewest bits on given text, half-life 64 bytes; no text: largest w⁰",
    "llm-fusion's min-perplexity, from real text",
    half_life=Number(64.0, 1.0, 1e6),
)
class Recent(WeightRule):
    """All for the expert that foresaw the recent text best."""

    needs_laws = False

    def __init__(self, members: Members, half_life: float = 64.0) -> None:
        super().__init__(members)
        self._keep = 0.5 ** (1.0 / half_life)
        self._bits = np.zeros(len(members.base))

    def weights(self, logprobs: F64) -> F64:
        return one_hot(self._bits, self.members.base)

    def observe(self, gained: F64, symbol: int = -1) -> None:
        self._bits = self._keep * self._bits - np.maximum(gained, LOWEST)

    def state(self) -> Any:
        return self._bits.copy()

    def set_state(self, state: Any) -> None:
        self._bits = state.copy()


def em_weights(gained: F64, start: F64, rounds: int = 100) -> F64:
    """float64[n]: linear weights with the fewest bits on float64[n_steps, n] of ln p_i(x), by EM from ``start``."""
    probs = np.exp(gained - gained.max(axis=1, keepdims=True))
    weights: F64 = start / start.sum()
    for _ in range(rounds):
        growth = (probs / (probs @ weights)[:, None]).mean(axis=0)
        weights = weights * growth
        weights /= weights.sum()
        if growth.max() <= 1.0 + 1e-6:
            break
    return weights
