"""What is told of the ensemble without a text being written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gguf_fusion.ensemble import Ensemble
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.preview import preview

TURNS = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}<s>assistant:"


@pytest.fixture
def mixed(serve: Callable[..., Any], slow_babblers: Callable[..., Any]) -> Any:
    """A server of one expert with a template and one that reads plain text."""

    def load() -> Ensemble:
        experts = slow_babblers().experts
        return Ensemble.from_experts(list(experts), weights=[2, 1], templates=[TURNS, "none"])

    return serve(load, metrics=True)


def test_the_model_and_its_experts(served: Any) -> None:
    """One model with the ensemble's name; its experts, weights and contexts are told; another name is not found."""
    assert served.get("/health").json() == served.get("/v1/health").json() == {"status": "ok"}
    [model] = served.get("/v1/models").json()["data"]
    assert served.get(f"/v1/models/{model['id']}").json() == model
    assert [expert["name"] for expert in model["meta"]["experts"]] == ["left", "right"]
    assert sum(expert["weight"] for expert in model["meta"]["experts"]) == pytest.approx(1)
    assert served.get("/v1/models/gpt-5").json()["error"]["code"] == "model_not_found"
    props = served.get("/props").json()
    assert props["fusion"]["symbols"] == "bytes" and props["fusion"]["piece_expert"] == "left"
    assert props["default_generation_settings"]["n_ctx"] == 2000
    assert served.get("/tokenizer_info").json()["eos_token"] == "</s>"


def test_tokens_of_an_expert(served: Any) -> None:
    """The heaviest expert's vocabulary, or the one that is named; pieces on request; mistakes are told."""
    text = "The quick 你好"
    for expert in (None, "right"):
        answer = served.post("/tokenize", {"content": text, "with_pieces": True, "expert": expert}).json()
        assert answer["expert"] == expert or answer["expert"] == "left"
        ids = [token["id"] for token in answer["tokens"]]
        assert len(ids) == answer["count"]
        back = served.post("/detokenize", {"tokens": ids, "expert": expert}).json()
        assert back["content"] == back["prompt"] == text
    assert served.post("/tokenize", {"prompt": text}).json()["count"] == 4
    assert served.post("/tokenize", {"content": "</s>"}).json()["count"] == 4
    assert served.post("/tokenize", {}).status_code == 400
    assert "'right'" in served.post("/tokenize", {"content": "x", "expert": "rigt"}).json()["error"]["message"]
    assert served.post("/detokenize", {"tokens": [9999]}).json()["error"]["param"] == "tokens"


def test_a_chat_as_every_expert_reads_it(mixed: Any) -> None:
    """``/apply-template`` takes the body of a chat; each prompt is told with its tokens, and nothing is decoded."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <s></s>"}]
    answer = mixed.post("/apply-template", {"messages": messages, "temperature": 0.5}).json()
    prompts = answer["fusion"]["prompts"]
    assert answer["prompt"] == prompts["left"]["prompt"] == "<s>system: Be brief.\n<s>user: Hi <s></s>\n<s>assistant:"
    assert prompts["left"]["control_tokens"] == 3, "what the user wrote stays text"
    assert prompts["right"]["prompt"] == "Be brief.\n\nUser: Hi <s></s>\n\nAssistant:\n"
    assert prompts["right"]["control_tokens"] == 0 and prompts["right"]["ends"] == ["</s>"]
    experts = mixed.owner.ensemble.experts
    assert prompts["left"]["tokens"] == len(preview(experts[0], TURNS, messages).ids)
    assert all(isinstance(expert, TableExpert) and expert.n_decoded == 0 for expert in experts)
    wrong = mixed.post("/apply-template", {"messages": [{"role": "you", "content": "x"}]})
    assert wrong.status_code == 400 and "unknown role" in wrong.json()["error"]["message"]
    assert mixed.post("/apply-template", {"messages": messages, "tools": [1]}).json()["error"]["param"] == "tools"


def test_counters_for_prometheus(mixed: Any) -> None:
    """Only with ``--metrics``; they count pieces, bytes and decodes of what was written."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1}
    usage = mixed.post("/v1/chat/completions", body).json()["usage"]
    lines = dict(line.rsplit(" ", 1) for line in mixed.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(lines["llamacpp:tokens_predicted_total"]) == usage["completion_tokens"]
    assert float(lines["llamacpp:prompt_tokens_total"]) == usage["prompt_tokens"]
    assert float(lines["gguf_fusion:decodes_total"]) > 0
    assert 'gguf_fusion:expert_seconds_total{expert="right"}' in lines
    assert "llamacpp:requests_processing" in lines and "llamacpp:requests_deferred" in lines


def test_without_the_option_there_are_no_counters(served: Any) -> None:
    """``/metrics`` is not found then."""
    assert served.get("/metrics").status_code == 404
