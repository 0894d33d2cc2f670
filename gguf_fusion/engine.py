"""The engine: every expert's law of the next symbol, one fused law, one symbol, and again.

It works on predictors and laws only: it knows neither files nor the command line. The loop:

    prepare    evaluate what is due, lanes side by side
    laws       each expert's next-symbol law; the share of its ghosts is filled with what the others expect
    fuse       one law from all
    sample     one symbol (or take an observed one)
    advance    push the symbol to every predictor and to the fuser
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gguf_fusion.ahead import AheadExpert, Draft
from gguf_fusion.arrays import F64
from gguf_fusion.cover.base import Predictor, Prompt
from gguf_fusion.cover.direct import closed
from gguf_fusion.cover.ghosts import FLOOR, fill
from gguf_fusion.errors import ContextOverflowError
from gguf_fusion.experts.base import Expert
from gguf_fusion.fusion import linear, normalised
from gguf_fusion.insight import best, divergence, of_step
from gguf_fusion.lanes import Lanes
from gguf_fusion.lazy import MOST, Deferred, decided
from gguf_fusion.recall import Recall
from gguf_fusion.records import END, N_SYMBOLS, Step, Timings
from gguf_fusion.sampling import Sampler
from gguf_fusion.strategy import Fused, Strategy
from gguf_fusion.vocabulary import Vocabulary

PrefillProgress = Callable[[str, int, int], None]
"""Called as ``progress(expert, n_done, n_total)`` with token counts while prompts are evaluated."""

_SPARE_TOKENS = 8
"""Byte space: context left free, because the path that is evaluated next may be longer than the one that counts."""

_OBSERVED_BYTES = 256
"""Prompt bytes that count as evidence, as the predictors have it."""

_NO_GHOSTS = 1e-6
"""A predictor's share below this is what it always leaves to others."""

_BYTES = tuple(bytes((b,)) for b in range(256))


@dataclass(frozen=True, slots=True)
class SymbolSpace:
    """What a symbol is: a byte (no vocabulary), or a token id of the one vocabulary all experts share."""

    n_symbols: int = N_SYMBOLS
    end: int | None = END
    vocabulary: Vocabulary | None = None

    def data(self, symbol: int) -> bytes:
        """Bytes that a symbol adds to the text."""
        if symbol == self.end:
            return b""
        return _BYTES[symbol] if self.vocabulary is None else self.vocabulary.piece(symbol)


class Engine:
    """Generates or scores one text at a time. Not thread-safe: one owner.

    ``predictors`` belong to the experts that take part (``weights``: float64[n_experts], all positive) and share one
    symbol space; ``lanes`` knows these experts by name. ``strategy`` and ``weights`` may be replaced between texts.
    """

    def __init__(
        self,
        predictors: Sequence[Predictor],
        strategy: Strategy,
        weights: F64,
        lanes: Lanes,
        *,
        space: SymbolSpace | None = None,
        roles: Sequence[str] = (),
        draft: Draft | None = None,
    ) -> None:
        self.predictors = tuple(predictors)
        self.names = tuple(p.expert.name for p in self.predictors)
        self.strategy = strategy
        self.weights = weights
        self.space = space or SymbolSpace()
        self.prompt_tokens: dict[str, int] = {}
        self.n_empty_pools = 0
        """Steps at which the pool left no mass anywhere and the linear pool stepped in."""
        self.lazy = False
        """Whether the slowest expert may be left out of a symbol that it cannot change, see ``lazy``."""
        self.prefetch = "off"
        """One of ``ahead.LEVELS``."""
        self._roles = tuple(roles)
        self._lanes = lanes
        self._draft = draft or Draft()
        self._ahead = [p.expert for p in self.predictors if isinstance(p.expert, AheadExpert)]
        self._deferred: list[Deferred] = []
        self._untouched = [p.snapshot() for p in self.predictors]
        self._recalls = [Recall(p.expert) for p in self.predictors]
        n, n_symbols = len(self.predictors), self.space.n_symbols
        self._probs = np.zeros((n, n_symbols))
        self._logprobs = np.zeros((n, n_symbols))
        self._shares = np.zeros(n)
        self._stand_ins = np.zeros((n, n_symbols)) if self.space.vocabulary is None else None
        self._begin(0.0)

    # ---- one text ---------------------------------------------------------------------------------------------

    def start(
        self,
        prompts: Sequence[Prompt],
        progress: PrefillProgress | None = None,
        *,
        fresh: bool = True,
        hint: bytes = b"",
        task: str = "",
    ) -> None:
        """Begin a new text: evaluate every expert's prompt, and tell the weights how well each foresaw it.

        ``fresh`` reuses nothing of earlier texts, so that the same prompt and seed give the same text every time;
        without it a prompt that begins like the last text decodes only what is new, and the text is equal within
        rounding only. ``hint``: the user's own words, and ``task`` the kind of task if it is named, for strategies that
        weigh experts by it.

        Raises ContextOverflowError, naming the tightest expert, if a prompt leaves no room for a reply.
        """
        self.prompt_tokens = self._count(prompts)
        began = time.perf_counter()
        observed = [np.zeros(0)] * len(prompts)
        self._deferred.clear()
        self._foresee(prompts, fresh=fresh)

        def work(i: int) -> None:
            report = None if progress is None else partial(progress, self.names[i])
            predictor, prompt, recall = self.predictors[i], prompts[i], self._recalls[i]
            if fresh:
                observed[i] = predictor.start(prompt, report)
                return
            if self.space.vocabulary is not None:
                prompt = closed(predictor.expert, prompt)
            predictor.expert.bring_back(prompt.ids)
            read = recall.read(prompt, _OBSERVED_BYTES, report)
            tail = predictor.start(replace(prompt, observed=np.zeros(len(prompt.ids), np.bool_)), report)
            observed[i] = np.concatenate([read, tail])[-_OBSERVED_BYTES:]
            for byte, logprob in zip(prompt.tail, tail.tolist(), strict=False):
                recall.add(bytes((byte,)), logprob)

        for predictor, state, recall in zip(self.predictors, self._untouched, self._recalls, strict=True):
            predictor.restore(state)
            if fresh:
                predictor.expert.forget()
                recall.leave()
        self._lanes.run({name: partial(work, i) for i, name in enumerate(self.names)})
        self._begin(time.perf_counter() - began)
        self._fuser.hint(hint, task)
        n = min(map(len, observed))
        if n:
            self._fuser.observe_prompt(np.stack([logprobs[-n:] for logprobs in observed]))

    def observe(self, symbol: int, *, n_top: int = 0, insight: bool = False) -> Step:
        """Advance by one given symbol, which counts as evidence, and return what was thought of it."""
        return self._take(lambda _: symbol, given=True, n_top=n_top, insight=insight)

    def step(self, sampler: Sampler, *, n_top: int = 0, insight: bool = False) -> Step:
        """Draw one symbol and advance by it. Limits, stop strings and text are the business of ``reply``.

        With ``n_top`` the step tells the most probable symbols and how far the experts disagreed, with ``insight``
        everything that ``insight.Insight`` holds.
        """
        if self.lazy and not n_top and not insight:
            step = self._without_slowest(sampler)
            if step is not None:
                return step

        def draw(log_f: F64) -> int:
            symbol = sampler.draw(log_f)
            sampler.observe(symbol)
            return symbol

        return self._take(draw, given=False, n_top=n_top, insight=insight)

    def _take(self, choose: Callable[[F64], int], *, given: bool, n_top: int, insight: bool) -> Step:
        """Choose a symbol by the fused law and advance by it."""
        n_before = sum(p.expert.n_decoded for p in self.predictors)
        fused = self._fuse()
        began = time.perf_counter()
        symbol = choose(fused.log_f)
        self._sampling_s += time.perf_counter() - began
        responsibility = self._fuser.responsibility(symbol, self._logprobs)
        lead = int(np.argmax(self.weights))
        step = Step(
            symbol=symbol,
            data=self.space.data(symbol),
            logprob=float(fused.log_f[symbol]),
            expert_logprobs=self._logprobs[:, symbol].copy(),
            weights=fused.weights,
            responsibility=responsibility,
            n_decodes=sum(p.expert.n_decoded for p in self.predictors) - n_before,
            ghost_share=float(self._shares.max()),
            given=given,
            top=best(fused.log_f, n_top),
            divergence=divergence(self._probs, fused.weights) if n_top else None,
            insight=of_step(self._logprobs, fused.log_f, fused.weights, responsibility, symbol, lead)
            if insight
            else None,
        )
        self._advance(symbol, generated=not given)
        return step

    @property
    def heaviest(self) -> Expert:
        """The expert with the largest weight; its tokens are the pieces of a text."""
        return self.predictors[int(np.argmax(self.weights))].expert

    @property
    def room(self) -> int:
        """Tokens that still fit the context of the tightest expert; nothing can be drawn once it is 0."""
        spare = (_SPARE_TOKENS if self.space.vocabulary is None else 0) + len(self._deferred)
        return min(max(0, p.expert.n_ctx - p.n_tokens - spare) for p in self.predictors)

    def timings(self) -> Timings:
        """Seconds and counts of the current text so far; ``decode_s`` and ``bridge_s`` add up over the experts."""
        now = self._counters()
        spent = {name: [b - a for a, b in zip(was, now[name], strict=True)] for name, was in self._was.items()}
        return Timings(
            prefill_s=self._prefill_s,
            decode_s=sum(decode_s for _, decode_s, _ in spent.values()),
            bridge_s=sum(bridge_s for _, _, bridge_s in spent.values()),
            fusion_s=self._fusion_s,
            sampling_s=self._sampling_s,
            total_s=time.perf_counter() - self._began,
            decodes=sum(int(n) for n, _, _ in spent.values()),
            lazy_steps=self._lazy_steps,
            rows_ahead=sum(e.n_ahead for e in self._ahead) - self._rows_before[0],
            rows_saved=sum(e.n_used for e in self._ahead) - self._rows_before[1],
            expert_decode_s={name: decode_s for name, (_, decode_s, _) in spent.items()},
            expert_decodes={name: int(n) for name, (n, _, _) in spent.items()},
        )

    # ---- the loop ---------------------------------------------------------------------------------------------

    def _begin(self, prefill_s: float) -> None:
        self._fuser = self.strategy.bind(len(self.names), self.space.n_symbols, self.weights, self.names, self._roles)
        self._fuser.attach([p.expert for p in self.predictors])
        self._last_weights = self.weights / self.weights.sum()
        self._began = time.perf_counter() - prefill_s
        self._prefill_s = prefill_s
        self._fusion_s = self._sampling_s = 0.0
        self._lazy_steps = 0
        self._rows_before = sum(e.n_ahead for e in self._ahead), sum(e.n_used for e in self._ahead)
        costs = [p.expert.decode_s / max(1, p.expert.n_decoded) for p in self.predictors]
        self._slowest, self._fastest = int(np.argmax(costs)), int(np.argmin(costs))
        self._was = self._counters()

    def _fuse(self) -> Fused:
        """The fused law of the next symbol."""
        if self._deferred:
            self._catch_up()
        due = {p.expert.name: p.prepare for p in self.predictors if p.due}
        if due:
            self._lanes.run(due)
        for i, predictor in enumerate(self.predictors):
            probs, self._shares[i] = predictor.law()
            self._probs[i] = probs[: self.space.n_symbols]
        began = time.perf_counter()
        if self._stand_ins is not None:
            fill(self._probs, self._shares, self._last_weights, self._stand_ins, self._alone)
        with np.errstate(divide="ignore"):
            np.log(self._probs, out=self._logprobs)
        fused = self._fuser.fuse(self._logprobs)
        if fused.log_z == -np.inf:
            self.n_empty_pools += 1
            log_f, log_z = normalised(linear(self._logprobs, fused.weights))
            fused = Fused(log_f, fused.weights, float(log_z))
        self._last_weights = fused.weights
        self._fusion_s += time.perf_counter() - began
        return fused

    def _alone(self, i: int) -> F64:
        return self.predictors[i].stand_in()

    def _advance(self, symbol: int, *, generated: bool) -> None:
        for i, predictor in enumerate(self.predictors):
            predictor.push(symbol, 1.0 if self._stand_ins is None else float(self._stand_ins[i, symbol]))
            self._recalls[i].add(self.space.data(symbol), float(self._logprobs[i, symbol]))
        self._draft.push(self.space.data(symbol))
        self._fuser.advance(symbol, self._logprobs, generated=generated)

    # ---- ahead and behind -------------------------------------------------------------------------------------

    def _foresee(self, prompts: Sequence[Prompt], *, fresh: bool) -> None:
        """Tell the experts which text begins, and how far they may read ahead of it."""
        first = self.predictors[0].expert
        self._draft.guessing = self.prefetch != "off"
        if self._draft.guessing:
            self._draft.begin(first.vocabulary.text(prompts[0].ids) + prompts[0].tail, fresh=fresh)
        else:
            self._draft.begin(b"", fresh=True)
        for i, (predictor, prompt) in enumerate(zip(self.predictors, prompts, strict=True)):
            if isinstance(predictor.expert, AheadExpert):
                # Which one is fastest may differ from run to run, which must not be seen in the text.
                drafts = self.prefetch == "exact" and i == self._fastest
                whole = prompt if self.space.vocabulary is None else closed(predictor.expert, prompt)
                predictor.expert.begin(len(whole.ids), whole.tail, self.prefetch, known=self.lazy, drafts=drafts)

    def _without_slowest(self, sampler: Sampler) -> Step | None:
        """Draw a symbol without the slowest expert, if it has something to decode and cannot change the symbol."""
        late, n_before = self._slowest, sum(p.expert.n_decoded for p in self.predictors)
        weights = self._fuser.weights_ahead()
        if weights is None or not (self._deferred or self.predictors[late].due):
            return None
        if len(self._deferred) >= MOST or self.room <= 2 * MOST:
            return None
        others = [i for i in range(len(self.predictors)) if i != late]
        due = {self.names[i]: self.predictors[i].prepare for i in others if self.predictors[i].due}
        if due:
            self._lanes.run(due)
        probs, shares = np.zeros_like(self._probs), np.zeros(len(self.predictors))
        for i in others:
            law, shares[i] = self.predictors[i].law()
            probs[i] = law[: self.space.n_symbols]
        known = self._last_weights * (1.0 - shares)
        known[late] = 0.0
        # A stand-in law must come from the others whatever the late expert says, and no ghost may depend on it.
        if shares.max() > _NO_GHOSTS or (self._stand_ins is not None and (known.sum() - known).min() <= FLOOR):
            return None
        low = weights @ probs
        symbol = decided(sampler, low, max(0.0, 1.0 - float(low.sum())))
        if symbol is None or symbol == self.space.end:
            return None
        sampler.take(symbol)
        self._deferred.append(Deferred(probs, shares, self._last_weights, symbol))
        self._last_weights = weights
        self._lazy_steps += 1
        for i in others:
            self.predictors[i].push(symbol)
        self._fuser.advance(symbol, self._logprobs, generated=True)
        self._draft.push(self.space.data(symbol))
        unknown = np.full(len(self.predictors), np.nan)
        return Step(
            symbol=symbol, data=self.space.data(symbol), logprob=float("nan"), expert_logprobs=unknown,
            weights=weights, responsibility=weights, ghost_share=float(shares.max()),
            n_decodes=sum(p.expert.n_decoded for p in self.predictors) - n_before,
        )  # fmt: skip

    def _catch_up(self) -> None:
        """Let the late expert read what was drawn without it; afterwards every state is as if it had been there."""
        late, stood = self._slowest, np.zeros((len(self._deferred), len(self.predictors)))
        predictor = self.predictors[late]

        def read() -> None:
            for t, past in enumerate(self._deferred):
                law, past.shares[late] = predictor.law()
                past.probs[late] = law[: self.space.n_symbols]
                if self._stand_ins is not None:
                    fill(past.probs, past.shares, past.weights, self._stand_ins, self._alone)
                    stood[t] = self._stand_ins[:, past.symbol]
                predictor.push(past.symbol, float(stood[t, late]) if self._stand_ins is not None else 1.0)

        self._lanes.run({self.names[late]: read})
        for i, other in enumerate(self.predictors):
            if i != late and self._stand_ins is not None:
                other.amend(stood[:, i].tolist())
            for past in self._deferred:
                with np.errstate(divide="ignore"):
                    logprob = float(np.log(past.probs[i, past.symbol]))
                self._recalls[i].add(self.space.data(past.symbol), logprob)
        self._deferred.clear()

    # ---- counting ---------------------------------------------------------------------------------------------

    def _count(self, prompts: Sequence[Prompt]) -> dict[str, int]:
        """Prompt tokens per expert. Raises ContextOverflowError for the expert that lacks most."""
        counts = [
            len(prompt.ids) + (len(p.expert.tokenize(prompt.tail)) if prompt.tail else 0)
            for p, prompt in zip(self.predictors, prompts, strict=True)
        ]
        lacking = [n + 1 - p.expert.n_ctx for n, p in zip(counts, self.predictors, strict=True)]
        worst = int(np.argmax(lacking))
        if lacking[worst] > 0:
            raise ContextOverflowError(self.names[worst], counts[worst], self.predictors[worst].expert.n_ctx)
        return dict(zip(self.names, counts, strict=True))

    def _counters(self) -> dict[str, tuple[int, float, float]]:
        return {p.expert.name: (p.expert.n_decoded, p.expert.decode_s, p.stats.bridge_s) for p in self.predictors}
