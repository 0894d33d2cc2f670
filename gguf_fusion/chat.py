"""Prompts: raw text, or messages rendered by each expert's own template.

What the user wrote never becomes control tokens: a template is rendered with placeholders instead of contents, so
that scaffolding (tokenized with control tokens) and contents (tokenized as plain text) stay apart.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import numpy as np

from gguf_fusion.arrays import I32
from gguf_fusion.cover.base import Prompt
from gguf_fusion.cover.canonical import prompt_border
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.base import Expert

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``"""

PLAIN_ROLES = {"system": "", "user": "User: ", "assistant": "Assistant: "}


def raw_prompt(expert: Expert, text: bytes) -> Prompt:
    """The text itself, BOS before it where the model wants one; its last few bytes stay open for any token border."""
    ids, tail = prompt_border(expert, text)
    bos = _bos(expert)
    return Prompt(
        ids=np.concatenate([bos, ids]),
        observed=np.concatenate([np.zeros(len(bos), np.bool_), np.ones(len(ids), np.bool_)]),
        tail=tail,
    )


def plain_text(messages: Sequence[Message]) -> str:
    """The documented plain format for base models: ``User: …`` and ``Assistant: …`` paragraphs, the last one open."""
    turns = [PLAIN_ROLES[m["role"]] + m["content"] for m in messages]
    return "\n\n".join([*turns, "Assistant:\n"])


def chat_prompt(expert: Expert, template: str | None, messages: Sequence[Message]) -> Prompt:
    """Messages as this expert wants them: by its template, or in the plain format where it has none (None)."""
    if template is None:
        return raw_prompt(expert, plain_text(messages).encode())
    ids: list[I32] = []
    observed: list[bool] = []
    for text, is_content in segments(template, messages, _special_texts(expert)):
        part = expert.tokenize(text) if is_content else expert.tokenize_template(text)
        ids.append(part)
        observed += [is_content] * len(part)
    joined = np.concatenate(ids).astype(np.int32)
    bos = _bos(expert)
    if len(bos) and joined[0] != bos[0]:  # many templates write it themselves: once, not twice
        joined, observed = np.concatenate([bos, joined]), [False, *observed]
    return Prompt(ids=joined, observed=np.array(observed, np.bool_))


def segments(template: str, messages: Sequence[Message], special: Mapping[str, str]) -> list[tuple[bytes, bool]]:
    """[(text, is_content)] of a rendered template with an open assistant turn.

    Placeholders must not change the rendering; where a template looks into a content, the text is rendered as it is
    and the contents are found in it afterwards.
    """
    marks = [f"\ue000{secrets.token_hex(8)}\ue001" for _ in messages]
    marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    contents = {mark: m["content"] for mark, m in zip(marks, messages, strict=True)}
    rendered = _render(template, marked, special)
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", rendered)
    actual = _render(template, messages, special)
    if "".join(contents.get(part, part) for part in parts) != actual:
        trimmed = {mark: text.strip() for mark, text in contents.items()}
        if "".join(trimmed.get(part, part) for part in parts) == actual:
            contents = trimmed
        else:
            found = "|".join(re.escape(text) for text in sorted(contents.values(), key=len, reverse=True) if text)
            split = re.split(f"({found})", actual) if found else [actual]
            return [(part.encode(), i % 2 == 1) for i, part in enumerate(split) if part]
    return [(contents.get(part, part).encode(), part in contents) for part in parts if contents.get(part, part)]


def _render(template: str, messages: Sequence[Message], special: Mapping[str, str]) -> str:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise UsageError(f"the chat template refuses these messages: {message}")

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().astimezone().strftime(form),
    )
    try:
        text = environment.from_string(template).render(
            messages=[dict(m) for m in messages], add_generation_prompt=True, **special
        )
    except TemplateError as error:
        raise UsageError(f"the chat template cannot be rendered: {error}; use raw text (--raw)") from error
    return str(text)


def _bos(expert: Expert) -> I32:
    bos = expert.vocabulary.bos_id
    return np.array([] if bos is None else [bos], np.int32)


def _special_texts(expert: Expert) -> dict[str, str]:
    vocabulary = expert.vocabulary
    bos = vocabulary.piece(vocabulary.bos_id).decode() if vocabulary.bos_id is not None else ""
    return {
        "bos_token": bos,
        "eos_token": vocabulary.piece(int(vocabulary.end_ids[0])).decode() if len(vocabulary.end_ids) else "",
    }
