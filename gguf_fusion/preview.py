"""What every expert would read of a chat, without loading more of it than its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguf_fusion import gguf_info, hub
from gguf_fusion.arrays import I32
from gguf_fusion.chat import NO_TEMPLATE, Message, Reader, chat_prompt
from gguf_fusion.config import Registry
from gguf_fusion.experts import native
from gguf_fusion.experts.native_vocabulary import read_vocabulary
from gguf_fusion.experts.tokenizer import Tokenizer
from gguf_fusion.load import template_of
from gguf_fusion.members import Member, with_templates
from gguf_fusion.vocabulary import Kind, Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """One expert's prompt."""

    name: str
    template: str
    """``file`` (the model's own), ``plain``, ``plain_chat`` (the ensemble's plain format), or a path."""
    prompt: str
    """The text, BOS and control tokens spelled out; bytes that are no UTF-8 are replaced."""
    ids: tuple[int, ...]
    n_control: int
    """Ids that are control tokens; none of them comes from what a user wrote."""
    n_bos: int
    end_tokens: tuple[str, ...]
    """Tokens that end a reply; their probabilities are added up."""


class VocabularyReader:
    """The tokenizer of a model file; fulfils ``chat.Reader``."""

    def __init__(self, name: str, model: native.Model, vocabulary: Vocabulary) -> None:
        """Use ``opened``."""
        self.name = name
        self.vocabulary = vocabulary
        self._model = model
        self._tokenizer = Tokenizer(name, vocabulary, lambda text, special: model.tokenize(text, parse_special=special))

    @classmethod
    @contextmanager
    def opened(cls, member: Member, path: Path) -> Iterator[VocabularyReader]:
        """Read the vocabulary of a member's file, with its edits of the END set. Raises LoadError, ModelFileError."""
        spec = member.spec
        gguf_info.require_generative(gguf_info.read(path))
        model = native.Model(path, vocab_only=True)
        try:
            vocabulary = read_vocabulary(model, add_end=spec.add_end, remove_end=spec.remove_end)
            yield cls(spec.name, model, vocabulary)
        finally:
            model.close()

    def tokenize(self, text: bytes) -> I32:
        """int32[n]: canonical ids of plain text."""
        return self._tokenizer.text(text)

    def tokenize_template(self, text: bytes) -> I32:
        """int32[n]: ids of template scaffolding."""
        return self._tokenizer.template(text)

    def chat_template(self) -> str | None:
        """The template in the file, or None."""
        return self._model.chat_template()


def previews(
    members: Sequence[Member],
    messages: Sequence[Message],
    *,
    registry: Registry | None = None,
    templates: Mapping[str, str | Path] | None = None,
    plain_chat: str | None = None,
) -> list[Preview]:
    """Every member's prompt for ``messages``; the files must be on this machine.

    Raises NotCachedError, and what ``chat.chat_prompt`` raises.
    """
    found = []
    for member in with_templates(members, templates or {}):
        path = hub.locate(member.ref, registry)
        with VocabularyReader.opened(member, path) as reader:
            template = template_of(member.spec, reader, path)
            found.append(preview(reader, template, messages, plain_chat, _origin(member, template, plain_chat)))
    return found


def preview(
    reader: Reader,
    template: str | None,
    messages: Sequence[Message],
    plain_chat: str | None = None,
    origin: str = "file",
) -> Preview:
    """One expert's prompt, see ``chat.chat_prompt``."""
    prompt, vocabulary = chat_prompt(reader, template, messages, plain_chat), reader.vocabulary
    ids = prompt.ids.tolist()
    return Preview(
        name=reader.name,
        template=origin,
        prompt=_text(vocabulary, ids),
        ids=tuple(ids),
        n_control=int(np.count_nonzero(vocabulary.kinds[prompt.ids] != Kind.TEXT)),
        n_bos=0 if vocabulary.bos_id is None else ids.count(vocabulary.bos_id),
        end_tokens=tuple(_text(vocabulary, [token]) for token in vocabulary.end_ids.tolist()),
    )


def _text(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    return b"".join(map(vocabulary.piece, ids)).decode("utf-8", "replace")


def _origin(member: Member, template: str | None, plain_chat: str | None) -> str:
    if template is None or template == NO_TEMPLATE:
        return "plain" if plain_chat is None else "plain_chat"
    return str(member.spec.template) if isinstance(member.spec.template, Path) else "file"
