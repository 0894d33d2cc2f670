"""The public class: several experts that write one text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

from gguf_fusion import hub
from gguf_fusion.ahead import LEVELS, AheadExpert
from gguf_fusion.arrays import F64
from gguf_fusion.chat import Message, as_messages, chat_prompt, own_words, raw_prompt, utf8
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry, check_known
from gguf_fusion.cover.base import Prompt
from gguf_fusion.engine import PrefillProgress, SymbolSpace
from gguf_fusion.errors import ClosedError, UsageError
from gguf_fusion.experts.base import Expert
from gguf_fusion.expressions import parse
from gguf_fusion.lanes import ThreadedExpert
from gguf_fusion.load import Loaded, assemble, load
from gguf_fusion.members import checked_weights, members_from, members_of
from gguf_fusion.options import LoadKeywords, load_options
from gguf_fusion.pieces import PieceView
from gguf_fusion.records import Step, Timings, Usage
from gguf_fusion.reply import Reply, ReplyState, Steps
from gguf_fusion.roles import checked_task
from gguf_fusion.sampling import Constraint, SamplingKeywords, SamplingParams, sampling_params
from gguf_fusion.strategy import Strategy
from gguf_fusion.turns import Turns

Weights = Sequence[float] | Mapping[str, float]
"""One number per expert in the order of ``Ensemble.names``, or by name; who is left out takes no part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole reply."""

    text: str
    finish_reason: str
    usage: Usage
    timings: Timings
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """How one text is fused and drawn."""

    params: SamplingParams
    strategy: Strategy
    weights: F64
    given: bytes
    constraint: Constraint | None
    bias: Mapping[int, float] | None
    n_top: int
    reuse: bool
    insight: bool
    task: str
    hint: bytes


class Ensemble:
    """Experts with positive weight, loaded and ready; use it in a ``with`` block or call ``close``.

    One text is written at a time. Another thread that asks meanwhile waits; the same thread takes over, and a reply
    it had not finished ends with an error if it is continued.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        sampling: Mapping[str, Any] | None = None,
        plain_chat: str | None = None,
        name: str = "ensemble",
    ) -> None:
        """Use ``from_registry``, ``from_files`` or ``from_experts``."""
        self.name = name
        self._loaded = loaded
        self._strategy = loaded.engine.strategy
        self._weights = loaded.engine.weights
        self._defaults = dict(sampling or {})
        self.plain_chat = plain_chat
        """The format of experts without a template of their own (see ``chat.chat_prompt``); None = the plain one."""
        self._turns = Turns()
        self._stepping = threading.Lock()
        self._closed = False

    # ---- construction -----------------------------------------------------------------------------------------

    @classmethod
    def from_registry(
        cls,
        name: str = DEFAULT_ENSEMBLE,
        *,
        config: Sequence[Path | str] = (),
        registry: Registry | None = None,
        weights: Sequence[float] | None = None,
        progress: hub.Progress | None = None,
        offline: bool = False,
        **options: Unpack[LoadKeywords],
    ) -> Self:
        """Load an ensemble of the registry by name; members that are missing are fetched first (not ``offline``).

        ``config`` names registry files to read before the usual ones; ``weights`` replaces the registered weights,
        and members of weight 0 are neither fetched nor loaded. Raises UsageError, HubError, ModelFileError, LoadError.
        """
        checked = load_options(options)
        registry = registry or Registry.load(config)
        spec = registry.ensemble(name)
        checked = replace(
            checked,
            strategy=checked.strategy or (None if checked.router else spec.strategy),
            epsilon=spec.epsilon if checked.epsilon is None else checked.epsilon,
            fewer_layers=spec.fewer_layers if checked.fewer_layers is None else checked.fewer_layers,
            smaller_quants=spec.smaller_quants if checked.smaller_quants is None else checked.smaller_quants,
            vram_margin=spec.vram_margin if checked.vram_margin is None else checked.vram_margin,
        )
        sampling_params(spec.sampling)
        members = members_of(spec, registry, weights)
        loaded = load(members, checked, registry=registry, progress=progress, offline=offline)
        return cls(loaded, sampling=spec.sampling, plain_chat=spec.plain_chat, name=name)

    @classmethod
    def from_files(
        cls,
        refs: Sequence[str | Path],
        *,
        config: Sequence[Path | str] = (),
        registry: Registry | None = None,
        weights: Sequence[float] | None = None,
        progress: hub.Progress | None = None,
        offline: bool = False,
        **options: Unpack[LoadKeywords],
    ) -> Self:
        """Load an ensemble of files, references such as ``user/repo:Q4_K_M`` and names of experts; equal weights."""
        checked = load_options(options)
        registry = registry or Registry.load(config)
        members = members_from(refs, registry, weights)
        loaded = load(members, checked, registry=registry, progress=progress, offline=offline)
        return cls(loaded, name="+".join(member.spec.name for member in members))

    @classmethod
    def from_experts(
        cls,
        experts: Sequence[ThreadedExpert],
        *,
        weights: Sequence[float] | None = None,
        templates: Sequence[str | None] | None = None,
        **options: Unpack[LoadKeywords],
    ) -> Self:
        """An ensemble of experts that exist already, such as ``TableExpert``; it closes them with itself."""
        loaded = assemble(experts, [1.0] * len(experts) if weights is None else weights, load_options(options))
        if templates is not None:
            by_name = dict(zip((expert.name for expert in experts), templates, strict=True))
            templates = [by_name[name] for name in loaded.engine.names]
        return cls(replace(loaded, templates=loaded.templates if templates is None else tuple(templates)))

    # ---- use --------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the experts that take part, in the order of every per-expert array."""
        return self._loaded.engine.names

    @property
    def strategy(self) -> str:
        """``pool(weight rule)``, as ``--strategy`` takes it; a single text may have another one."""
        return str(self._strategy)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the experts, sum 1; a single text may have others."""
        return tuple(self._weights.tolist())

    @property
    def experts(self) -> tuple[Expert, ...]:
        """The experts in the order of ``names``; between texts they may tokenize, evaluating is the ensemble's part."""
        predictors = (predictor.expert for predictor in self._loaded.engine.predictors)
        return tuple(expert.inside if isinstance(expert, AheadExpert) else expert for expert in predictors)

    @property
    def templates(self) -> tuple[str | None, ...]:
        """Chat templates in the order of ``names``, see ``chat.chat_prompt``."""
        return self._loaded.templates

    @property
    def space(self) -> SymbolSpace:
        """What a step's symbols are."""
        return self._loaded.engine.space

    @property
    def piece_expert(self) -> str | None:
        """The heaviest expert, whose tokens are the pieces of a text; None where every step is a token."""
        return self.heaviest().name if self.space.vocabulary is None else None

    def piece_view(self, weights: Weights | None = None) -> PieceView:
        """Groups the steps of one reply with these weights into pieces, see ``piece_expert``."""
        if self.space.vocabulary is not None:
            return PieceView.of_steps()
        return PieceView.of_tokens(self.heaviest(weights))

    def heaviest(self, weights: Weights | None = None) -> Expert:
        """The expert with the largest weight; its tokens are the pieces of a text."""
        return self.experts[int(np.argmax(self.shares(weights)))]

    def shares(self, weights: Weights | None = None) -> F64:
        """float64[n_experts], sum 1: the weights that a text with these ones has. Raises UsageError."""
        if weights is None:
            return self._weights
        if isinstance(weights, Mapping):
            check_known("weights: expert", weights, dict.fromkeys(self.names))
            weights = [weights.get(name, 0.0) for name in self.names]
        chosen: F64 = np.array(checked_weights(weights, len(self.names)))
        chosen /= chosen.sum()
        return chosen

    @property
    def sampling(self) -> Mapping[str, Any]:
        """What a text is drawn with unless its call says otherwise, see ``sampling.SamplingParams``."""
        return self._defaults

    def read_ahead(self, *, lazy: bool, prefetch: str) -> None:
        """How texts from now on save time, see ``load.Options``; lazy steps have NaN for probabilities."""
        check_known("prefetch", {prefetch: None}, dict.fromkeys(LEVELS))
        self._loaded.engine.lazy, self._loaded.engine.prefetch = lazy, prefetch

    @property
    def load_s(self) -> float:
        """Seconds that loading took, downloads excluded."""
        return self._loaded.load_s

    def generate(
        self,
        prompt: str | bytes | Sequence[Message],
        *,
        system: str | None = None,
        chat: bool | None = None,
        progress: PrefillProgress | None = None,
        weights: Weights | None = None,
        strategy: str | Strategy | None = None,
        given: bytes = b"",
        constraint: Constraint | None = None,
        logit_bias: Mapping[int, float] | None = None,
        n_top: int = 0,
        reuse: bool = False,
        insight: bool = False,
        task: str = "",
        **sampling: Unpack[SamplingKeywords],
    ) -> Reply:
        """Iterate over the steps of a reply.

        A text is continued as it is; messages, or a text with ``chat=True`` or a ``system`` text, go through each
        expert's own template (base models get a plain format). Stop whenever you like: the ensemble stays usable.

        weights, strategy : for this text only; an expert of weight 0 is read, but has no influence
        given      : bytes that follow the prompt; they are observed one by one and come as the first steps
        constraint : what the next symbol may be, such as ``grammar.Grammar.begin()``
        logit_bias : added to ln f of symbols (bytes and END, or token ids: see ``space``), each in [-100, 100]
        n_top      : how many of the most probable symbols every step tells
        reuse      : read only what is new since the last text, as the next turn of a conversation should; the text then
                     depends, within rounding, on what was written before
        insight    : steps tell divergences, entropies and who carried them
        task       : kind of task (see ``roles.TASKS``) for strategies that weigh experts by it; "" = judge the prompt

        Raises UsageError for arguments at once, ContextOverflowError when the first step is asked for.
        """
        params = sampling_params({**self._defaults, **sampling}).seeded()
        make, n_bytes = self._prompts(prompt, system, chat)
        text = _Text(
            params=params,
            strategy=self._strategy if strategy is None else parse(strategy) if isinstance(strategy, str) else strategy,
            weights=self.shares(weights),
            given=given,
            constraint=constraint,
            bias=logit_bias,
            n_top=n_top,
            reuse=reuse,
            insight=insight,
            task=checked_task(task),
            hint=own_words(prompt),
        )
        state = ReplyState(seed=params.seed or 0, prompt_bytes=n_bytes + len(given), load_s=self.load_s)
        return Reply(self._steps(make, text, state, progress), state)

    def complete(
        self,
        prompt: str | bytes | Sequence[Message],
        *,
        system: str | None = None,
        chat: bool | None = None,
        progress: PrefillProgress | None = None,
        weights: Weights | None = None,
        strategy: str | Strategy | None = None,
        constraint: Constraint | None = None,
        logit_bias: Mapping[int, float] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion:
        """The whole reply at once; arguments as for ``generate``."""
        steps = self.generate(
            prompt, system=system, chat=chat, progress=progress, weights=weights, strategy=strategy,
            constraint=constraint, logit_bias=logit_bias, **sampling,
        )  # fmt: skip
        text = "".join(step.text for step in steps)
        return Completion(
            text=text,
            finish_reason=steps.finish_reason or "stop",
            usage=steps.usage,
            timings=steps.timings,
            seed=steps.seed,
        )

    def close(self) -> None:
        """Free everything after the step in progress; closing twice is harmless, later use raises ClosedError."""
        self._closed = True
        with self._stepping:
            self._loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside -----------------------------------------------------------------------------------------------

    def _prompts(
        self, prompt: str | bytes | Sequence[Message], system: str | None, chat: bool | None
    ) -> tuple[Callable[[], list[Prompt]], int]:
        """(what makes every expert's prompt, bytes of the user's text)."""
        experts = self.experts
        if isinstance(prompt, (str, bytes)) and not chat and system is None:
            text = utf8(prompt) if isinstance(prompt, str) else prompt
            return lambda: [raw_prompt(expert, text) for expert in experts], len(text)
        if chat is False:
            raise UsageError("chat=False: messages and a system text need a chat; pass one text instead")
        messages = as_messages(prompt, system)
        pairs = list(zip(experts, self._loaded.templates, strict=True))
        n_bytes = sum(len(utf8(message["content"])) for message in messages)
        plain = self.plain_chat
        return lambda: [chat_prompt(expert, template, messages, plain) for expert, template in pairs], n_bytes

    def _steps(
        self,
        make: Callable[[], list[Prompt]],
        text: _Text,
        state: ReplyState,
        progress: PrefillProgress | None,
    ) -> Generator[Step, None, None]:
        engine = self._loaded.engine
        with self._turns.take() as still_mine:
            with self._working():
                engine.weights, engine.strategy = text.weights, text.strategy
                engine.start(make(), progress, fresh=not text.reuse, hint=text.hint, task=text.task)
                steps = Steps(
                    engine, text.params, constraint=text.constraint, bias=text.bias, n_top=text.n_top,
                    insight=text.insight,
                )  # fmt: skip
                state.begin(engine, steps)
            try:
                for symbol in self._symbols(text.given):
                    still_mine()
                    with self._working():
                        step = engine.observe(symbol, n_top=text.n_top, insight=text.insight)
                    yield step
                while state.finish_reason is None:
                    still_mine()
                    with self._working():
                        step = state.next_step()
                    yield step
            finally:
                state.end()

    def _symbols(self, given: bytes) -> Sequence[int]:
        """Given bytes in the symbols of the space."""
        if self.space.vocabulary is None:
            return given
        with self._working():
            ids: list[int] = self.experts[0].tokenize(given).tolist()
        return ids

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._stepping:
            if self._closed:
                raise ClosedError(f"ensemble {self.name!r} was closed; load it again to use it")
            yield
