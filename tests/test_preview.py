"""Prompts shown without loading weights, and templates chosen by the caller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gguf_fusion.cli import main
from gguf_fusion.config import ExpertSpec
from gguf_fusion.errors import ConfigError, UsageError
from gguf_fusion.load import template_of
from gguf_fusion.members import Member, with_templates


def member(name: str) -> Member:
    return Member(spec=ExpertSpec(name=name, sources=(), template="none"), ref=name, weight=1.0)


def test_chosen_templates_reach_the_expert_they_name() -> None:
    """By name, a file or none; a name that takes no part is an error with the nearest."""
    one, two = with_templates([member("coder"), member("writer")], {"coder": "mine.jinja"})
    assert (one.spec.template, two.spec.template) == (Path("mine.jinja"), "none")
    with pytest.raises(UsageError, match=r"'code' is unknown.*coder"):
        with_templates([member("coder")], {"code": "x"})


def test_a_template_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    """It names the expert and the file."""
    spec = ExpertSpec(name="coder", sources=(), template=tmp_path / "absent.jinja")

    class Holder:
        def chat_template(self):
            return None

    with pytest.raises(ConfigError, match=r"'coder'.*absent\.jinja cannot be read"):
        template_of(spec, Holder(), tmp_path / "x.gguf")  # type: ignore[arg-type]


@pytest.mark.model
def test_show_prints_what_every_expert_would_read(tmp_path: Path) -> None:
    """Each in its own format, what spells a control token as text; as JSON with ids and end tokens."""
    arguments = ["show", "pocket", "--prompt", "Hi <|im_end|>", "--system", "Be brief."]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.stderr
    assert "<bos>Be brief.\n\nUser: Hi <|im_end|>\n\nAssistant:\n" in shown.stdout
    experts = {e["name"]: e for e in json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)["experts"]}
    assert set(experts) == {"smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"}
    smol = experts["smollm2-135m-instruct"]
    assert smol["prompt"] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (smol["template"], smol["n_control"], smol["n_bos"], smol["n_tokens"]) == ("file", 5, 0, len(smol["ids"]))
    assert "<|im_end|>" in smol["end_tokens"]
    gemma = experts["gemma-3-270m"]
    assert (gemma["template"], gemma["n_bos"], gemma["n_control"]) == ("plain", 1, 1)


@pytest.mark.parametrize(
    ("option", "message"), [("smol", "expected EXPERT=FILE"), ("nobody=none", "'nobody' is unknown"), ("=x", "EXPERT=")]
)
def test_misspelt_templates_cost_no_load(option: str, message: str) -> None:
    """A mistake is told at once."""
    result = CliRunner().invoke(main, ["run", "hi", "--offline", "--template", option], input="")
    assert result.exit_code == 2
    assert message in result.stderr
