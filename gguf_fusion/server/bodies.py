"""What clients send: the fields of every request, checked.

A field that would change the answer and cannot be honoured is refused by name; fields that only speak of accounts,
caches or billing are ignored; a field that nobody knows is refused, with the nearest known name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gguf_fusion.config import nearest
from gguf_fusion.sampling import MAX_SEED
from gguf_fusion.server.errors import RefusedError, unsupported

IGNORED = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"id_slot", "reasoning_effort", "reasoning", "verbosity", "parallel_tool_calls"}
)
"""Taken and not used: they change nothing of what a text says."""

_UNSUPPORTED = {
    "tools": "tools cannot be called",
    "tool_choice": "tools cannot be called",
    "functions": "functions cannot be called",
    "function_call": "functions cannot be called",
    "audio": "there is text only",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "nothing is searched",
    "suffix": "text is continued, not filled in",
}
_HARMLESS: dict[str, tuple[Any, ...]] = {"tool_choice": ("none", "auto"), "best_of": (1,), "modalities": (["text"],)}

MAX_PROMPTS = 128
"""Most texts that one request may ask for."""

Text = Annotated[str, Field(max_length=10_000_000)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=1_000_000)]
Share = Annotated[float, Field(json_schema_extra={"minimum": 0, "maximum": 1})]
Percent = Annotated[float, Field(json_schema_extra={"minimum": 0, "maximum": 100})]
"""Bounds are only described here; ``sampling`` checks them, with a message of its own."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Fusion(_Strict):
    """What only an ensemble can be asked: how this text is fused, and whether to tell who carried it."""

    strategy: Annotated[str, Field(max_length=1000)] | None = None
    weights: dict[str, float] | list[float] | None = None
    trace: bool = False
    """Tell for every piece what each expert thought of it, the alternatives and the divergence."""


class SchemaFormat(BaseModel):
    """``response_format.json_schema``."""

    model_config = ConfigDict(strict=True, populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """``text``, ``json_object`` or ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class TypedGrammar(_Strict):
    """A grammar that says what it is."""

    type: Literal["json_schema", "regex", "choice", "lark", "gbnf"]
    value: Any


class Body(BaseModel):
    """Fields that all text requests have."""

    model_config = ConfigDict(strict=True, extra="allow")
    own_fields: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None
    max_tokens: Count | None = None
    max_bytes: Count | None = None
    temperature: Percent | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": 10**9})] | None = None
    min_p: Share | None = None
    repeat_penalty: Percent | None = None
    frequency_penalty: Percent | None = None
    presence_penalty: float | None = None
    seed: Annotated[int, Field(json_schema_extra={"minimum": -1, "maximum": MAX_SEED})] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    cache_prompt: bool | None = None
    n_probs: Annotated[int, Field(ge=0, le=20)] | None = None
    """llama-server's way to ask for log-probabilities with so many alternatives."""
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | TypedGrammar | None = None
    fusion: Fusion | None = None

    def check_fields(self) -> None:
        """Raise RefusedError for what cannot be honoured."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED or value in ([], {}) or value in _HARMLESS.get(name, ()):
                continue
            if name in _UNSUPPORTED or name in _HARMLESS:
                raise unsupported(name, _UNSUPPORTED.get(name, f"expected {_HARMLESS.get(name, [None])[0]!r}"))
            known = [*type(self).model_fields, *IGNORED]
            raise RefusedError(
                400, f"unknown field {name!r}{nearest(name, known)}", param=name[:100], code="unknown_parameter"
            )
        if self.presence_penalty:
            raise unsupported("presence_penalty", "use frequency_penalty or repeat_penalty, which count repetitions")
        if self.frequency_penalty and self.repeat_penalty:
            raise unsupported("frequency_penalty", "it is another name of repeat_penalty; give one of the two")

    def sampling(self, default_max_tokens: int, max_tokens: int | None) -> dict[str, Any]:
        """Keywords of ``Ensemble.generate``; what is null keeps the ensemble's default."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty or self.frequency_penalty,
            "max_bytes": self.max_bytes,
            "max_tokens": default_max_tokens if max_tokens is None else max_tokens,
            "stop": self.stop or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def first_seed(self) -> int | None:
        """The seed of the first choice; None and -1 draw a fresh one."""
        if self.seed is not None and not -1 <= self.seed <= MAX_SEED:
            raise RefusedError(400, f"seed: expected 0…{MAX_SEED}, or -1 for any, got {self.seed}", param="seed")
        return None if self.seed == -1 else self.seed

    def bias(self) -> dict[int, float] | None:
        """``logit_bias`` by symbol."""
        try:
            return {int(symbol): value for symbol, value in (self.logit_bias or {}).items()} or None
        except ValueError as error:
            raise RefusedError(
                400, f"logit_bias: expected numbers of symbols, got: {error}", param="logit_bias"
            ) from error

    def grammar_source(self) -> tuple[str, Any] | None:
        """(kind, source) of the one grammar that is asked for, if any."""
        found: list[tuple[str, str, Any]] = []
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            found.append(("response_format", "json_schema", {"type": "object"}))
        elif wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise RefusedError(400, "response_format: json_schema.schema is missing", param="response_format")
            found.append(("response_format", "json_schema", wanted.json_schema.schema_))
        for kind, source in (("json_schema", self.json_schema), ("regex", self.regex), ("choice", self.choice)):
            if source is not None:
                found.append((kind, kind, source))
        if isinstance(self.grammar, TypedGrammar):
            found.append(("grammar", self.grammar.type, self.grammar.value))
        elif self.grammar:
            found.append(("grammar", "gbnf" if "::=" in self.grammar else "lark", self.grammar))
        if len(found) > 1:
            names = " and ".join(name for name, _, _ in found)
            raise RefusedError(400, f"{names}: expected one grammar, got {len(found)}", param=found[1][0])
        return found[0][1:] if found else None


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: Text | None = None


class ChatMessage(BaseModel):
    """One message; what is no text is refused."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(json_schema_extra={"enum": ["system", "developer", "user", "assistant"]})]
    content: Text | list[TextPart] | None = None

    def message(self, at: int) -> dict[str, str]:
        """The message as experts' templates take it. Raises RefusedError."""
        where = f"messages.{at}"
        for name in ("tool_calls", "function_call", "audio"):
            if (self.model_extra or {}).get(name):
                raise unsupported(f"{where}.{name}", "there are texts only")
        role = "system" if self.role == "developer" else self.role
        if role in ("tool", "function"):
            raise unsupported(f"{where}.role", "tools cannot be called")
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text" or part.text is None:
                    raise unsupported(f"{where}.content", f"expected parts of type text, got {part.type[:50]!r}")
            content = "".join(part.text or "" for part in self.content)
        elif self.content is None:
            raise RefusedError(400, f"{where}.content: expected a text, got null", param=f"{where}.content")
        else:
            content = self.content
        return {"role": role, "content": content}


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionBody(Body):
    """``POST /v1/completions``."""

    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)] = ""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


class TokenizeBody(_Strict):
    """``POST /tokenize``: ``content`` as llama-server names it, or ``prompt``."""

    content: Text | None = None
    prompt: Text | None = None
    model: str | None = None
    expert: str | None = None
    with_pieces: bool = False
    add_special: bool = False
    add_special_tokens: bool = False
    parse_special: bool = False


class DetokenizeBody(_Strict):
    """``POST /detokenize``."""

    tokens: TokenIds
    model: str | None = None
    expert: str | None = None
