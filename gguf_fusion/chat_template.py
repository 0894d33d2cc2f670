"""Jinja chat templates, rendered as model makers expect and as strangers' code deserves: in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn

from gguf_fusion.errors import UsageError


class ChatTemplate(str):
    """A Jinja template, and the texts of tokens that it may ask for by name (``bos_token``, ``eos_token``, …)."""

    __slots__ = ("special",)

    special: Mapping[str, str]

    def __new__(cls, text: str, special: Mapping[str, str]) -> ChatTemplate:
        made = super().__new__(cls, text)
        made.special = special
        return made


def render(name: str, template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]) -> str:
    """The text of ``messages`` with an open assistant turn behind them.

    ``special`` holds texts of tokens, such as ``bos_token`` and ``eos_token``. Templates see what the transformers
    library shows them: blocks swallow their line breaks, ``tools`` and ``documents`` are None, and there are
    ``raise_exception``, ``strftime_now``, ``tojson``, loop controls and the ``generation`` block. Raises UsageError
    naming the expert.
    """
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(  # type: ignore[no-any-return]
            messages=[dict(m) for m in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special,
        )
    except _RefusedError as error:
        raise UsageError(f"expert {name!r}: its chat template refuses these messages: {error}") from error
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UsageError(
            f"expert {name!r}: its chat template cannot be rendered: {type(error).__name__}: {error}; "
            f"name another one in models.toml (template = FILE), or use raw text (--raw)"
        ) from error


class _RefusedError(Exception):
    """A template called ``raise_exception``."""


@lru_cache(maxsize=32)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@cache
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}`` marks a reply for training; here it is just its content."""

        tags = {"generation"}  # noqa: RUF012 (the library's own declaration)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return [nodes.Scope(body, lineno=line)]  # what is set inside stays inside

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without the escapes that a web page would need."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
