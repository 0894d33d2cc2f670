"""Second stage of FusionRoute: the complementary preference loss, on pairs of checked answers.

Direct preference optimisation (Rafailov et al., arXiv 2305.18290) of the fused policy with frozen experts, as CDPO of
Xiong et al. (arXiv 2601.05106) has it: what the chosen experts say enters as a constant, so preferences move only what
the router adds::

    −ln σ(β [(ln f(y⁺) − ln f₀(y⁺)) − (ln f(y⁻) − ln f₀(y⁻))]),   f ∝ exp(E) · π_router^λ,

E = ln π_I (hard) or Σ ω_i ln π_i (soft), fixed. Here the router's own weights are frozen too: of what the router adds,
λ is left to learn. The head keeps learning from text meanwhile, where text is given: both losses are mixed, and the
head takes no part in the preferences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gguf_fusion.arrays import F64, Bool
from gguf_fusion.discover.head_training import FLOOR, Adam, Examples, Fit, batches, dev_loss, loss_and_gradient
from gguf_fusion.router.head import Head

BETA = 0.1
_EPOCHS = 60
_PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, by their places in a list of answers: one that passed its check, one that did not."""

    prompt: str
    better: int
    worse: int


@dataclass(frozen=True, slots=True)
class Judged:
    """How a head ranks pairs.

    ranked: bool[n], the better answer is likelier per byte;  margins: float64[n], nats per
    byte by which it is;  loss: mean preference loss against the head before.
    """

    ranked: Bool
    margins: F64
    loss: float


class Answers:
    """Checked answers with everything that a change of λ needs, computed once: the experts' part is constant."""

    def __init__(self, examples: Sequence[Examples], head: Head) -> None:
        """``examples``: per answer, its bytes alone, without the prompt;  ``head``: the one before this stage."""
        self._lam = head.lam
        self._parts = []
        for one in examples:
            omega = head.weights(np.asarray(one.features, np.float64))
            if head.hard:
                omega = np.eye(omega.shape[1])[omega.argmax(axis=1)]
            laws = np.maximum(one.laws.astype(np.float64), FLOOR)
            router = np.maximum(one.router.astype(np.float64), FLOOR)
            self._parts.append((np.einsum("ni,nis->ns", omega, laws), router, one.came))
        self.lengths = np.array([max(1, len(one.came)) for one in examples])
        self.before = self.logprobs(head.lam)[0]

    def logprobs(self, lam: float) -> tuple[F64, F64]:
        """(ln f of every answer, its slope in λ): float64[n_answers] each."""
        logs, slopes = np.zeros(len(self._parts)), np.zeros(len(self._parts))
        for k, (experts, router, came) in enumerate(self._parts):
            at = np.arange(len(came))
            joint = experts + lam * router
            top = joint.max(axis=1)
            probs = np.exp(joint - top[:, None])
            total = probs.sum(axis=1)
            logs[k] = (joint[at, came] - top - np.log(total)).sum()
            slopes[k] = (router[at, came] - (probs * router).sum(axis=1) / total).sum()
        return logs, slopes

    def loss(self, lam: float, pairs: Sequence[Pair], beta: float = BETA) -> tuple[float, float]:
        """(mean preference loss in nats, its slope in λ)."""
        logs, slopes = self.logprobs(lam)
        better, worse = (np.array([getattr(p, side) for p in pairs]) for side in ("better", "worse"))
        moved = logs - self.before
        margin = beta * (moved[better] - moved[worse])
        sigma = 1.0 / (1.0 + np.exp(np.clip(margin, -500.0, 500.0)))
        slope = -(sigma * beta * (slopes[better] - slopes[worse])).mean()
        return float(np.logaddexp(0.0, -margin).mean()), float(slope)

    def judged(self, lam: float, pairs: Sequence[Pair]) -> Judged:
        """Rank pairs by ln f per byte."""
        per_byte = self.logprobs(lam)[0] / self.lengths
        margins = np.array([per_byte[p.better] - per_byte[p.worse] for p in pairs])
        return Judged(margins > 0.0, margins, self.loss(lam, pairs)[0])


def pairs_of(answers: Sequence[tuple[str, bool, bytes]], most: int = 8) -> list[Pair]:
    """Pairs from (prompt, passed, text): every answer that passed with every one that did not, ``most`` per prompt.

    Equal texts count once, and empty ones not at all.
    """
    by_prompt: dict[str, tuple[dict[bytes, int], dict[bytes, int]]] = {}
    for k, (prompt, passed, text) in enumerate(answers):
        if text:
            by_prompt.setdefault(prompt, ({}, {}))[0 if passed else 1].setdefault(text, k)
    found = []
    for prompt, (good, bad) in by_prompt.items():
        every = [Pair(prompt, g, b) for g in good.values() for b in bad.values()]
        step = -(-len(every) // most) or 1
        found += every[::step]
    return found


def refine(
    head: Head,
    answers: Answers,
    fit_pairs: Sequence[Pair],
    dev_pairs: Sequence[Pair],
    text: tuple[Examples, Examples] | None = None,
    *,
    beta: float = BETA,
    epochs: int = _EPOCHS,
    seed: int = 0,
    tell: Callable[[int, float], None] = lambda epoch, loss: None,
) -> Head:
    """A head with λ (and, with ``text``, W and c) refined; the one of the epoch with the least loss on dev.

    ``text``: (fit, dev) bytes of ordinary text for the loss of the first stage. Deterministic for a seed; without a
    gain on dev the head that was given.
    """
    fit = Fit(head.w.copy(), head.c.copy(), head.lam)

    def dev(now: Fit) -> float:
        loss = answers.loss(now.lam, dev_pairs, beta)[0]
        return loss + (dev_loss(now, head.mean, head.scale, text[1]) if text else 0.0)

    best, best_loss, waited = fit.copy(), dev(fit), 0
    adam, random = Adam(fit), np.random.default_rng(seed)
    for epoch in range(epochs):
        for rows in batches(len(text[0].came), random) if text else [np.zeros(0, np.int64)]:
            slope = Fit(np.zeros_like(fit.w), np.zeros_like(fit.c), answers.loss(fit.lam, fit_pairs, beta)[1])
            if text:
                x = (np.asarray(text[0].features[rows], np.float64) - head.mean) / head.scale
                _, gradient = loss_and_gradient(fit, x, text[0], rows)
                slope = Fit(gradient.w, gradient.c, gradient.lam + slope.lam)
            adam.step(fit, slope)
        loss = dev(fit)
        tell(epoch, loss)
        waited += 1
        if loss < best_loss - 1e-6:
            best, best_loss, waited = fit.copy(), loss, 0
        if waited >= _PATIENCE:
            break
    return replace(head, w=best.w, c=best.c, lam=best.lam)
