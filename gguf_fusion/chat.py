"""Prompts: raw text, or messages in each expert's own chat format.

What a user wrote never becomes control tokens: a template is rendered with placeholders in place of the contents, so
that scaffolding (tokenized with control tokens) and contents (tokenized as plain text) stay apart.

Base models have no chat format. Beside chat models they read the conversation as plain text::

    {system text}

    User: {first message}

    Assistant:
    {reply}

The open turn ends with a line break because the text that follows is shared: a reply of a chat model begins with a
letter, not with the space that "Assistant:" would call for. An ensemble can name another format (``plain_chat``), as a
Jinja template that should end with a line break too, in an expression: Jinja drops a bare one at the end.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from gguf_fusion.arrays import I32
from gguf_fusion.chat_template import ChatTemplate, render
from gguf_fusion.config import nearest
from gguf_fusion.cover.base import Prompt
from gguf_fusion.cover.canonical import prompt_border
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.base import Expert
from gguf_fusion.vocabulary import Kind, Vocabulary

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``"""


class Reader(Protocol):
    """What of an expert its prompts need."""

    name: str
    vocabulary: Vocabulary

    def tokenize(self, text: bytes) -> I32: ...

    def tokenize_template(self, text: bytes) -> I32: ...


Segment = tuple[bytes, bool]
"""(text, True for what a user wrote, False for scaffolding)"""

PLAIN_ROLES = {"system": "", "user": "User: ", "assistant": "Assistant:\n"}
"""What precedes a message of each role in the plain format."""

NO_TEMPLATE = "none"
"""In place of a template: this is a base model, it reads plain text."""


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


def utf8(text: str) -> bytes:
    """UTF-8 bytes of what a user wrote. Raises UsageError where the text has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # an argument of a command line that was no UTF-8, or half a surrogate pair
        raise UsageError(
            f"prompt: expected text that has UTF-8 bytes, got {text[error.start]!r} at {error.start}; "
            f"to continue bytes as they are, pass bytes"
        ) from error


def raw_prompt(expert: Expert, text: bytes) -> Prompt:
    """The text itself, BOS before it where the model wants one; its last few bytes stay open for any token border.

    A text that spells the BOS token at its start does not get a second one.
    """
    bos = _bos(expert)
    if len(bos):
        text = text.removeprefix(expert.vocabulary.piece(int(bos[0])))
    ids, tail = prompt_border(expert, text)
    return Prompt(
        ids=np.concatenate([bos, ids]),
        observed=np.concatenate([np.zeros(len(bos), np.bool_), np.ones(len(ids), np.bool_)]),
        tail=tail,
    )


def prompt_for(
    expert: Reader, template: str | None, user_text: str, system: str | None = None, plain_chat: str | None = None
) -> Prompt:
    """One question as ``expert`` wants it asked; see ``chat_prompt``."""
    messages = [{"role": "user", "content": user_text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return chat_prompt(expert, template, messages, plain_chat)


def chat_prompt(
    expert: Reader, template: str | None, messages: Sequence[Message], plain_chat: str | None = None
) -> Prompt:
    """Messages, and the assistant's open turn, as this expert wants them.

    template   : the expert's own Jinja template; ``NO_TEMPLATE`` for a base model, which reads the plain format;
                 None where nobody knows one
    plain_chat : another plain format, a Jinja template, for all experts without a template of their own

    Raises UsageError, naming the expert, where there is no template, or one that cannot be rendered or refuses.
    """
    if template is None and plain_chat is None:
        raise UsageError(
            f"expert {expert.name!r} has no chat template; name one in models.toml (template = FILE, or "
            f'template = "none" for a base model that reads plain text), or use raw text (--raw)'
        )
    if template is None or template == NO_TEMPLATE:
        return _plain_prompt(expert, plain_segments(expert, messages, plain_chat))
    ids: list[I32] = []
    observed: list[bool] = []
    for text, is_content in segments(expert, template, messages):
        part = expert.tokenize(text) if is_content else expert.tokenize_template(text)
        ids.append(part)
        observed += [is_content] * len(part)
    return _with_bos(expert, _joined(ids), observed)


def segments(expert: Reader, template: str, messages: Sequence[Message]) -> list[Segment]:
    """What a template makes of messages, contents apart; joined, the segments are the rendered text.

    Placeholders must not change the rendering. Where a template looks into a content they do (some take the thoughts
    out of earlier replies): such contents are rendered as they are, and only what spells a control token in them
    stands behind placeholders. Raises UsageError where control tokens appear all the same.
    """
    messages = _accepted(expert, template, messages)
    actual = render(expert.name, template, messages, _special_texts(expert, template))
    clean = _rendered_apart(expert, template, messages, tuple(PLAIN_ROLES))
    found = _placed(clean, actual)
    if found is not None:
        return _encoded(found)
    for whole in (("system", "user"), ()):
        parts = _rendered_apart(expert, template, messages, whole)
        # With no content whole there is nothing left to be placed, and what the template did about the spelling of
        # control tokens, which it does not see now, is not wanted.
        found = _placed(parts, actual) if whole else parts
        # A template that takes contents apart could have put a control token together.
        if found is not None and _n_control(expert, found) <= _n_control(expert, clean):
            return _encoded(found)
    raise UsageError(
        f"expert {expert.name!r}: its chat template would turn a part of the messages into control tokens; "
        f"leave out what looks like one, or use raw text (--raw)"
    )


def _accepted(expert: Reader, template: str, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, a system text before the first question where the template refuses the role of its own."""
    if [m["role"] for m in messages[:2]] != ["system", "user"]:
        return messages
    system, question, *rest = messages
    try:
        render(expert.name, template, messages, _special_texts(expert, template))
    except UsageError:
        together = f"{system['content']}\n\n{question['content']}"
        return [{"role": "user", "content": together}, *rest]
    return messages


def _encoded(parts: Sequence[tuple[str, bool]]) -> list[Segment]:
    return [(text.encode(), is_content) for text, is_content in parts if text]


def plain_segments(expert: Reader, messages: Sequence[Message], plain_chat: str | None = None) -> list[Segment]:
    """Messages as plain text, contents apart."""
    if plain_chat is not None:
        return segments(expert, plain_chat, messages)
    found: list[Segment] = []
    for message in messages:
        found += [(PLAIN_ROLES[message["role"]].encode(), False), (message["content"].encode(), True), (b"\n\n", False)]
    return [*found, (PLAIN_ROLES["assistant"].encode(), False)]


def _plain_prompt(expert: Reader, parts: Sequence[Segment]) -> Prompt:
    """The joined text in its canonical tokens; a token is the user's where most of its bytes are."""
    text = b"".join(part for part, _ in parts)
    ids = expert.tokenize(text)
    mine = np.concatenate([np.zeros(1), np.cumsum(np.repeat([own for _, own in parts], [len(p) for p, _ in parts]))])
    starts = expert.vocabulary.piece_start
    lengths = starts[ids + 1] - starts[ids]
    ends = np.cumsum(lengths)
    return _with_bos(expert, ids, (2 * (mine[ends] - mine[ends - lengths]) > lengths).tolist())


def _rendered_apart(
    expert: Reader, template: str, messages: Sequence[Message], whole: Collection[str]
) -> list[tuple[str, bool]]:
    """[(text, whether it stood behind a placeholder)]; scaffolding, perhaps empty, before, between and after.

    Contents of the roles in ``whole`` stand behind one each, of others only what spells a control token.
    """
    texts: dict[str, str] = {}

    def hide(text: str) -> str:
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        texts[mark] = text
        return mark

    def apart(message: Message) -> Message:
        content = message["content"]
        if message["role"] in whole:
            # Blank contents can do no harm, and templates ask whether a content is empty.
            return {**message, "content": hide(content) if content.strip() else content}
        spelled = sorted(_control_texts(expert, content), key=len, reverse=True)
        pattern = "|".join(map(re.escape, spelled))
        return {**message, "content": re.sub(pattern, lambda m: hide(m[0]), content) if pattern else content}

    rendered = render(expert.name, template, list(map(apart, messages)), _special_texts(expert, template))
    parts = re.split("(" + "|".join(texts) + ")", rendered) if texts else [rendered]
    return [(texts.get(part, part), i % 2 == 1) for i, part in enumerate(parts)]


def _placed(parts: Sequence[tuple[str, bool]], actual: str) -> list[tuple[str, bool]] | None:
    """``parts`` as they stand in ``actual``, where contents may have lost blanks at their ends; None if they do not."""
    found: list[tuple[str, bool]] = []
    at = 0
    for i, (text, is_content) in enumerate(parts):
        if not is_content:
            if not actual.startswith(text, at):
                return None
            end = at + len(text)
        else:
            core = text.strip()
            begin = actual.find(core, at)
            if begin < 0 or not text[: text.index(core)].endswith(actual[at:begin]):
                return None
            following = parts[i + 1][0]
            blanks = text[text.index(core) + len(core) :]
            core_end = begin + len(core)
            kept = [n for n in range(len(blanks), -1, -1) if actual.startswith(blanks[:n] + following, core_end)]
            if not kept:
                return None
            end = core_end + kept[0]
        found.append((actual[at:end], is_content))
        at = end
    return found if at == len(actual) else None


def _control_texts(expert: Reader, text: str) -> set[str]:
    """What in ``text`` a reader of scaffolding would take for control tokens."""
    vocabulary = expert.vocabulary
    ids = expert.tokenize_template(text.encode())
    pieces = {vocabulary.piece(int(t)) for t in ids[vocabulary.kinds[ids] != Kind.TEXT]}
    return {_text(piece) for piece in pieces if piece}


def _n_control(expert: Reader, parts: Sequence[tuple[str, bool]]) -> int:
    """Control tokens in the scaffolding among ``parts``."""
    kinds = expert.vocabulary.kinds
    scaffolding = (expert.tokenize_template(text.encode()) for text, is_content in parts if text and not is_content)
    return sum(int(np.count_nonzero(kinds[ids] != Kind.TEXT)) for ids in scaffolding)


def _with_bos(expert: Reader, ids: I32, observed: Sequence[bool]) -> Prompt:
    """BOS once: many templates write it themselves."""
    bos = _bos(expert)
    if len(bos) and not np.array_equal(ids[:1], bos):
        ids, observed = _joined([bos, ids]), [False, *observed]
    return Prompt(ids=ids, observed=np.array(observed, np.bool_))


def _joined(parts: Sequence[I32]) -> I32:
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)


def _bos(expert: Reader) -> I32:
    bos = expert.vocabulary.bos_id
    return np.array([] if bos is None else [bos], np.int32)


def _special_texts(expert: Reader, template: str) -> Mapping[str, str]:
    """Texts of the tokens that templates ask for by name."""
    if isinstance(template, ChatTemplate):
        return template.special
    vocabulary = expert.vocabulary
    end = int(vocabulary.end_ids[0]) if len(vocabulary.end_ids) else None
    return special_texts(expert, {"bos_token": vocabulary.bos_id, "eos_token": end})


def special_texts(expert: Reader, named: Mapping[str, int | None]) -> dict[str, str]:
    """Texts of tokens by what templates call them; empty where there is no such token."""
    vocabulary = expert.vocabulary
    return {
        name: "" if token is None or not 0 <= token < vocabulary.n_vocab else _text(vocabulary.piece(token))
        for name, token in named.items()
    }


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def own_words(prompt: str | bytes | Sequence[Message]) -> bytes:
    """The user's own words: the text, or the last message of theirs."""
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "replace")
    if isinstance(prompt, bytes):
        return prompt
    said = [message["content"] for message in prompt if message["role"] == "user"]
    return said[-1].encode("utf-8", "replace") if said else b""
