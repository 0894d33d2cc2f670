"""Borders of the canonical tokenization, judged from a few words around a place."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from gguf_fusion import hub
from gguf_fusion.cover.canonical import border_holds, borders, word_start
from gguf_fusion.experts.llama import LlamaExpert

POCKET = ("smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct")


@pytest.mark.model
@pytest.mark.parametrize("name", POCKET)
def test_a_border_is_judged_alike_from_some_words_and_from_the_whole_text(name: str) -> None:
    """However far behind the end of the text a place is, the answer is that of all the text around it."""
    code = Path(argparse.__file__).read_text(encoding="utf-8")[4000:5200]
    prose = "Größe zählt nicht, sagte sie; und 今天天气很好，我们去公园。 Привет, мир! 👩‍💻🌶️\n\n- 3.14159, 1,000,000\n"
    text = (code + prose).encode()
    with LlamaExpert.load(hub.locate(name), name=name, n_ctx=256) as expert:
        wrong = []
        for position in range(20, len(text), 5):
            start = word_start(text, position)
            whole = position == start or position - start in borders(expert, text[start:])
            if border_holds(expert, text, position) != whole:
                wrong.append((position, text[max(0, position - 20) : position], text[position : position + 20]))
    assert not wrong
