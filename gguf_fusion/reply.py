"""One reply: steps with their text, ended by END, a stop string, a budget or the end of the context."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace

import numpy as np

from gguf_fusion.cover.canonical import word_start
from gguf_fusion.engine import Engine
from gguf_fusion.errors import ClosedError, ContextOverflowError
from gguf_fusion.experts.base import Expert
from gguf_fusion.records import END, Step, Timings, Usage
from gguf_fusion.sampling import Constraint, Sampler, SamplingParams
from gguf_fusion.text import TextStream

_LOOK_AHEAD = 32
"""Most bytes drawn beyond a token budget to see whether a started word still fits."""

_SETTLE_BYTES = 96
"""Uncounted text longer than this is cut at a word start, and what lies before is counted for good."""


class Steps(Iterator[Step]):
    """Draws from a started engine until the reply is over; the last step carries the finish reason.

    In byte space ``max_tokens`` counts the canonical tokens of the heaviest expert. A word in the making often has
    more of them than the finished word ("Par" + "i", then "Paris"), so beyond the budget the rest of the word is drawn
    before it is decided what of it fits; what does not is never handed out.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        *,
        constraint: Constraint | None = None,
        bias: Mapping[int, float] | None = None,
        n_top: int = 0,
        insight: bool = False,
    ) -> None:
        self.finish_reason: str | None = None
        self.n_bytes = 0
        """Bytes of all steps so far, those of a stop string included."""
        self._engine = engine
        self._params = params
        self._n_top = n_top
        self._insight = insight
        space = engine.space
        self._sampler = Sampler(params, space.n_symbols, space.end, constraint=constraint, bias=bias)
        self._text = TextStream(params.stop)
        self._pieces = PieceCount(engine.heaviest) if engine.space.vocabulary is None else None
        self._n_symbols = 0
        self._ahead: deque[Step] = deque()
        """Steps drawn but not handed out."""
        self._cut = False
        """Whether the last of ``_ahead`` is the last one that the token budget has room for."""

    @property
    def n_tokens(self) -> int:
        """Pieces of the text so far."""
        return self._n_symbols if self._pieces is None else self._pieces.count()

    @property
    def shown_bytes(self) -> int:
        """Bytes whose text was handed out: those of a stop string, or of what may become one, are not among them."""
        return self._text.n_sure

    def freeze(self) -> None:
        """Count now what is counted on demand; an ensemble that was closed meanwhile cannot count any more."""
        if self._pieces is not None:
            try:
                self._pieces.count()
            except ClosedError:
                self._pieces.give_up()

    def __next__(self) -> Step:
        if self.finish_reason is not None:
            raise StopIteration
        if self._params.max_bytes == 0 or self._params.max_tokens == 0:
            return self._hand_out(self._nothing(), "length")
        while not self._cut:
            if not self._ahead and not self._draw():
                return self._hand_out(self._nothing(), "length")
            n = self._n_fitting()
            if n == len(self._ahead):
                break
            if len(self._ahead) < _LOOK_AHEAD and _in_word(self._ahead[-1]) and self._draw():
                continue
            if n == 0:
                return self._hand_out(replace(self._ahead[0], data=b""), "length")
            while len(self._ahead) > n:
                self._ahead.pop()
            self._cut = True
        step = self._ahead.popleft()
        return self._hand_out(step, "length" if self._cut and not self._ahead else None)

    def _draw(self) -> bool:
        """Draw one more step; False where the context has no room for it."""
        if not self._engine.room:
            return False
        try:
            self._ahead.append(self._engine.step(self._sampler, n_top=self._n_top, insight=self._insight))
        except ContextOverflowError:  # a path that had to be evaluated was longer than the one that counts
            return False
        return True

    def _n_fitting(self) -> int:
        """How many of the steps ahead fit the token budget."""
        limit = self._params.max_tokens
        if limit is None or self._pieces is None:
            return len(self._ahead)
        datas = [step.data for step in self._ahead]
        if self._pieces.at_most(sum(map(len, datas))) <= limit:
            return len(datas)
        fits = (n for n in range(len(datas), 0, -1) if self._pieces.count(b"".join(datas[:n])) <= limit)
        return next(fits, 0)

    def _hand_out(self, step: Step, reason: str | None) -> Step:
        self.n_bytes += len(step.data)
        self._n_symbols += bool(step.data)
        if self._pieces is not None:
            self._pieces.push(step.data)
        text = self._text.push(step.data)
        ended = step.symbol == self._engine.space.end
        if self._text.stopped is not None or (ended and reason is None):
            reason = "stop"
        elif reason is None and self._exhausted():
            reason = "length"
        if reason is not None:
            text += self._text.finish()
            self.finish_reason = reason
        return replace(step, text=text, finish_reason=reason)

    def _exhausted(self) -> bool:
        params = self._params
        if params.max_bytes is not None and self.n_bytes >= params.max_bytes:
            return True
        if params.max_tokens is not None and self._pieces is None and self._n_symbols >= params.max_tokens:
            return True
        return not self._ahead and not self._engine.room

    def _nothing(self) -> Step:
        """A step that only says that the reply is over."""
        n = len(self._engine.names)
        return Step(
            symbol=END if self._engine.space.end is None else self._engine.space.end,
            data=b"",
            logprob=0.0,
            expert_logprobs=np.zeros(n),
            weights=self._engine.weights / self._engine.weights.sum(),
            responsibility=self._engine.weights / self._engine.weights.sum(),
            n_decodes=0,
            ghost_share=0.0,
        )


def _in_word(step: Step) -> bool:
    """Whether the step's last byte may be followed by more of the same word."""
    return step.data[-1:].isalnum() or step.data[-1:] >= b"\x80"


class ReplyState:
    """What a reply and the generator behind it share; neither holds the other, so a forgotten reply ends at once."""

    def __init__(self, seed: int, prompt_bytes: int, load_s: float) -> None:
        self.seed = seed
        self.prompt_bytes = prompt_bytes
        self.prompt_tokens: dict[str, int] = {}
        self._load_s = load_s
        self._engine: Engine | None = None
        self._steps: Steps | None = None
        self._timings = Timings(load_s=load_s)

    def begin(self, engine: Engine, steps: Steps) -> None:
        """The prompt is evaluated."""
        self._engine, self._steps = engine, steps
        self.prompt_tokens = engine.prompt_tokens

    def next_step(self) -> Step:
        """The next step."""
        assert self._steps is not None
        return next(self._steps)

    def end(self) -> None:
        """The engine may move on to another text: from now on all numbers stand still."""
        assert self._steps is not None
        self._steps.freeze()
        self._timings = self.timings
        self._engine = None

    @property
    def finish_reason(self) -> str | None:
        return None if self._steps is None else self._steps.finish_reason

    @property
    def shown_bytes(self) -> int:
        return 0 if self._steps is None else self._steps.shown_bytes

    @property
    def usage(self) -> Usage:
        steps = self._steps
        return Usage(
            prompt_bytes=self.prompt_bytes,
            generated_bytes=0 if steps is None else steps.n_bytes,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=0 if steps is None else steps.n_tokens,
        )

    @property
    def timings(self) -> Timings:
        if self._engine is None or self._steps is None:
            return self._timings
        timings = self._engine.timings()
        timings.load_s, timings.bytes, timings.tokens = self._load_s, self._steps.n_bytes, self._steps.n_tokens
        return timings


class Reply(Iterator[Step]):
    """The steps of one reply, and what is known of it so far."""

    def __init__(self, steps: Generator[Step, None, None], state: ReplyState) -> None:
        self._steps = steps
        self._state = state

    def __next__(self) -> Step:
        return next(self._steps)

    def close(self) -> None:
        """Stop here; the ensemble is free for the next text."""
        self._steps.close()

    @property
    def seed(self) -> int:
        """The seed that gives this text again."""
        return self._state.seed

    @property
    def finish_reason(self) -> str | None:
        """``stop`` or ``length`` once the reply is over, else None."""
        return self._state.finish_reason

    @property
    def shown_bytes(self) -> int:
        """Bytes, from the beginning, that belong to the text for sure; those of a stop string never do."""
        return self._state.shown_bytes

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        return self._state.usage

    @property
    def timings(self) -> Timings:
        """Seconds so far."""
        return self._state.timings


class PieceCount:
    """Counts the canonical tokens of a growing text."""

    def __init__(self, expert: Expert) -> None:
        self._expert = expert
        self._settled = 0
        self._open = b""
        self._total: int | None = 0

    def push(self, data: bytes) -> None:
        """Add bytes to the text."""
        self._open += data
        self._total = None
        if len(self._open) > _SETTLE_BYTES:
            cut = word_start(self._open, len(self._open))
            self._settled += len(self._expert.tokenize(self._open[:cut]))
            self._open = self._open[cut:]

    def count(self, more: bytes = b"") -> int:
        """Tokens of the text, followed by ``more``."""
        if more:
            return self._settled + len(self._expert.tokenize(self._open + more))
        if self._total is None:
            self._total = self._settled + len(self._expert.tokenize(self._open))
        return self._total

    def at_most(self, n_more: int) -> int:
        """A bound on ``count`` of the text and ``n_more`` bytes that needs no tokenizer: no token is empty."""
        return self._settled + len(self._open) + n_more

    def give_up(self) -> None:
        """The expert is gone: what was counted for good must do."""
        self._open = b""
        self._total = self._settled
