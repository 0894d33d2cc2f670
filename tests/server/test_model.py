"""The server on a real expert."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gguf_fusion.ensemble import Ensemble

pytestmark = pytest.mark.model


def test_a_real_expert_answers_streams_and_keeps_to_a_schema(serve: Callable[..., Any]) -> None:
    """The same seed gives the same text, streamed or not, and a schema holds."""
    served = serve(lambda: Ensemble.from_registry("pocket", weights=[1, 0, 0], offline=True, n_ctx=512))
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8,
        "seed": 1,
    }
    text = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text
    stream = served.post("/v1/chat/completions", {**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == text
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    answer = served.post(
        "/v1/chat/completions", {**body, "max_tokens": 40, "json_schema": {**schema, "additionalProperties": False}}
    )
    assert json.loads(answer.json()["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")
