"""The public class: several experts that write one text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from gguf_fusion import hub
from gguf_fusion.chat import PLAIN_ROLES, Message, chat_prompt, raw_prompt
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry, nearest
from gguf_fusion.cover.base import Prompt
from gguf_fusion.engine import PrefillProgress
from gguf_fusion.errors import ClosedError, UsageError
from gguf_fusion.lanes import ThreadedExpert
from gguf_fusion.load import Loaded, LoadKeywords, assemble, check_known, load, load_options, members_from, members_of
from gguf_fusion.pieces import PieceView
from gguf_fusion.records import Step, Timings, Usage
from gguf_fusion.reply import Reply, ReplyState, Steps
from gguf_fusion.sampling import SamplingParams
from gguf_fusion.turns import Turns


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole reply."""

    text: str
    finish_reason: str
    usage: Usage
    timings: Timings
    seed: int


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
        self._defaults = dict(sampling or {})
        self._plain_chat = plain_chat
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
            strategy=checked.strategy or spec.strategy,
            epsilon=spec.epsilon if checked.epsilon is None else checked.epsilon,
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
        """``pool(weight rule)``, as ``--strategy`` takes it."""
        return str(self._loaded.engine.strategy)

    @property
    def piece_expert(self) -> str | None:
        """The heaviest expert, whose tokens are the pieces of a text; None where every step is a token."""
        return self._loaded.engine.heaviest.name if self._loaded.engine.space.vocabulary is None else None

    def piece_view(self) -> PieceView:
        """Groups the steps of one reply into pieces, see ``piece_expert``."""
        return PieceView.of_steps() if self.piece_expert is None else PieceView.of_tokens(self._loaded.engine.heaviest)

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
        **sampling: Unpack[SamplingKeywords],
    ) -> Reply:
        """Iterate over the steps of a reply.

        A text is continued as it is; messages, or a text with ``chat=True`` or a ``system`` text, go through each
        expert's own template (base models get a plain format). Stop whenever you like: the ensemble stays usable.
        Raises UsageError for arguments at once, ContextOverflowError when the first step is asked for.
        """
        params = sampling_params({**self._defaults, **sampling}).seeded()
        make, n_bytes = self._prompts(prompt, system, chat)
        state = ReplyState(seed=params.seed or 0, prompt_bytes=n_bytes, load_s=self.load_s)
        return Reply(self._steps(make, params, state, progress), state)

    def complete(
        self,
        prompt: str | bytes | Sequence[Message],
        *,
        system: str | None = None,
        chat: bool | None = None,
        progress: PrefillProgress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion:
        """The whole reply at once; arguments as for ``generate``."""
        steps = self.generate(prompt, system=system, chat=chat, progress=progress, **sampling)
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
        experts = [predictor.expert for predictor in self._loaded.engine.predictors]
        if isinstance(prompt, (str, bytes)) and not chat and system is None:
            text = _encoded(prompt) if isinstance(prompt, str) else prompt
            return lambda: [raw_prompt(expert, text) for expert in experts], len(text)
        if chat is False:
            raise UsageError("chat=False: messages and a system text need a chat; pass one text instead")
        messages = as_messages(prompt, system)
        pairs = list(zip(experts, self._loaded.templates, strict=True))
        n_bytes = sum(len(_encoded(message["content"])) for message in messages)
        plain = self._plain_chat
        return lambda: [chat_prompt(expert, template, messages, plain) for expert, template in pairs], n_bytes

    def _steps(
        self,
        make: Callable[[], list[Prompt]],
        params: SamplingParams,
        state: ReplyState,
        progress: PrefillProgress | None,
    ) -> Generator[Step, None, None]:
        engine = self._loaded.engine
        with self._turns.take() as still_mine:
            with self._working():
                engine.start(make(), progress)
                state.begin(engine, Steps(engine, params))
            try:
                while state.finish_reason is None:
                    still_mine()
                    with self._working():
                        step = state.next_step()
                    yield step
            finally:
                state.end()

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._stepping:
            if self._closed:
                raise ClosedError(f"ensemble {self.name!r} was closed; load it again to use it")
            yield


def as_messages(prompt: str | bytes | Sequence[Message], system: str | None = None) -> list[Message]:
    """Checked chat messages from a user's text or from messages, a system text first. Raises UsageError."""
    if isinstance(prompt, bytes):
        try:
            prompt = prompt.decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"prompt: a chat needs UTF-8, got byte 0x{prompt[error.start]:02x}; use raw text"
            ) from error
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    for message in messages:
        if set(message) != {"role", "content"} or not isinstance(message["content"], str):
            raise UsageError(f"messages: expected {{'role': …, 'content': text}}, got {message!r}")
        if message["role"] not in PLAIN_ROLES:
            raise UsageError(f"messages: unknown role {message['role']!r}{nearest(str(message['role']), PLAIN_ROLES)}")
    if not messages:
        raise UsageError("messages: expected at least one, got none")
    return list(messages)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # an argument of a command line that was no UTF-8, or half a surrogate pair
        raise UsageError(
            f"prompt: expected text that has UTF-8 bytes, got {text[error.start]!r} at {error.start}; "
            f"to continue bytes as they are, pass bytes"
        ) from error


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from keywords. Raises UsageError for an unknown one, with the nearest."""
    check_known("sampling parameter", given, SamplingKeywords.__annotations__)
    values = dict(given)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    elif "stop" in values:
        values["stop"] = tuple(values["stop"] or ())
    return SamplingParams(**values)
