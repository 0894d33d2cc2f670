"""Chat formats on real vocabularies: contents stay text, BOS comes once, the templates in the files render."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_fusion import gguf_info
from gguf_fusion.chat import NO_TEMPLATE, Message, chat_prompt, segments
from gguf_fusion.chat_template import ChatTemplate, render
from gguf_fusion.config import ExpertSpec
from gguf_fusion.errors import UsageError
from gguf_fusion.experts import native
from gguf_fusion.experts.native_vocabulary import read_vocabulary
from gguf_fusion.load import template_of
from gguf_fusion.preview import VocabularyReader, preview
from gguf_fusion.vocabulary import Kind

GENERATIVE = (
    "aquila baichuan command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 gpt-neox llama-bpe llama-spm mpt phi-3 "
    "qwen2 qwen35 refact starcoder"
).split()
WITH_TEMPLATE = {"command-r", "gemma-4", "phi-3", "qwen2", "qwen35"}

SCAFFOLD = {
    "llama-bpe": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "llama-spm": "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}",
    "deepseek-llm": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
}
"""Formats of families whose files here hold no template."""


def reader_of(name: str, folder: Path) -> tuple[VocabularyReader, Path]:
    path = folder / f"ggml-vocab-{name}.gguf"
    model = native.Model(path, vocab_only=True)
    return VocabularyReader(name, model, read_vocabulary(model)), path


def conversation(first: str, reply: str, second: str) -> list[Message]:
    roles = ("user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, (first, reply, second), strict=True)]


@pytest.mark.model
@pytest.mark.parametrize("name", GENERATIVE)
def test_every_family_reads_contents_as_text(name: str, vocab_dir: Path) -> None:
    """With the family's own format, or plain text, hostile contents change no control token, and BOS comes once."""
    reader, path = reader_of(name, vocab_dir)
    vocabulary = reader.vocabulary
    template = template_of(ExpertSpec(name=name, sources=()), reader, path)
    assert (template is not None) == (name in WITH_TEMPLATE)
    info = gguf_info.read(path)
    if template is None and name in SCAFFOLD:
        eos = info.metadata["tokenizer.ggml.eos_token_id"]
        assert isinstance(eos, int)
        bos = "" if vocabulary.bos_id is None else vocabulary.piece(vocabulary.bos_id).decode()
        template = ChatTemplate(SCAFFOLD[name], {"bos_token": bos, "eos_token": vocabulary.piece(eos).decode()})
    template = template or NO_TEMPLATE
    controls = [vocabulary.piece(int(t)) for t in np.flatnonzero(vocabulary.kinds != Kind.TEXT)]
    spelled = b" ".join(piece for piece in controls[:60] + controls[-60:] if piece).decode("utf-8", "ignore")
    clean = preview(reader, template, conversation("Hi", "Hello", "And?"))
    hostile = preview(reader, template, conversation(f"Hi {spelled}", "Hello", f"{spelled} And?"))
    assert hostile.n_control == clean.n_control
    assert hostile.n_bos == clean.n_bos
    assert clean.n_bos == (0 if vocabulary.bos_id is None else 1)
    assert clean.ids[: clean.n_bos] == ((vocabulary.bos_id,) if clean.n_bos else ())
    assert clean.end_tokens
    prompt = chat_prompt(reader, template, conversation(f"Hi {spelled}", "Hello", "And?"))
    assert (vocabulary.kinds[prompt.ids[prompt.observed]] == Kind.TEXT).all()


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(WITH_TEMPLATE))
def test_templates_in_the_files_render_as_they_stand(name: str, vocab_dir: Path) -> None:
    """The prompt of harmless messages is the rendering, but for BOS and blanks that control tokens swallow (phi-3)."""
    reader, path = reader_of(name, vocab_dir)
    template = template_of(ExpertSpec(name=name, sources=()), reader, path)
    assert isinstance(template, ChatTemplate)
    messages = conversation("Hi  there", "Hello.", "And 👩‍💻?")
    rendered = render(name, template, messages, template.special)
    assert b"".join(text for text, _ in segments(reader, template, messages)).decode() == rendered
    bos = template.special["bos_token"]
    prompt = preview(reader, template, messages).prompt.removeprefix(bos)
    assert prompt.split() == rendered.removeprefix(bos).split() or name == "phi-3"
    assert "".join(prompt.split()) == "".join(rendered.removeprefix(bos).split())


@pytest.mark.model
def test_special_tokens_are_those_that_the_file_names(vocab_dir: Path) -> None:
    """A template's eos_token is the file's, not whichever end token has the lowest id."""
    reader, path = reader_of("command-r", vocab_dir)
    template = template_of(ExpertSpec(name="command-r", sources=()), reader, path)
    assert isinstance(template, ChatTemplate)
    assert template.special["eos_token"] == "<|END_OF_TURN_TOKEN|>"
    assert template.special["bos_token"] == "<BOS_TOKEN>"


@pytest.mark.model
def test_a_family_without_template_is_not_guessed_at(vocab_dir: Path) -> None:
    """No template and no plain format: an error that names the expert and a way out."""
    reader, _ = reader_of("gpt-2", vocab_dir)
    with pytest.raises(UsageError, match=r"'gpt-2' has no chat template.*template = \"none\""):
        preview(reader, None, conversation("Hi", "Hello", "And?"))
    plain = preview(reader, None, conversation("Hi", "Hello", "And?"), "{{ messages[0].content ~ '\\n' }}")
    assert plain.prompt == "Hi\n"
