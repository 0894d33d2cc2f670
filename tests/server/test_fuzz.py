"""Requests that nobody would write: every one gets an answer that a client can read, and none breaks the server."""

from __future__ import annotations

import asyncio
import random
from typing import Any

FIELDS = (
    "messages model max_tokens max_bytes temperature top_p top_k min_p repeat_penalty frequency_penalty seed stop n "
    "stream stream_options logit_bias response_format json_schema regex choice grammar fusion logprobs top_logprobs "
    "prompt echo tools tokens content expert user cache_prompt presence_penalty max_completion_tokens nonsense"
).split()
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value: odd numbers and texts, and containers of them."""
    plain: list[Any] = [
        None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**70), 0.5, -0.0, 1e308, "", "x", "\x00",
        "👩‍💻", "\ud800", "a(", "linear", "{}", "root ::= x", [], {}, "x" * 3000,
    ]  # fmt: skip
    kind = rng.random()
    if depth > 2 or kind < 0.6:
        return rng.choice(plain)
    if kind < 0.8:
        return [anything(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    keys = [
        "role",
        "content",
        "type",
        "text",
        "strategy",
        "weights",
        "trace",
        "left",
        "schema",
        "value",
        "256",
        "\ud800",
    ]
    return {rng.choice(keys): anything(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def request(rng: random.Random, path: str) -> dict[str, Any]:
    """A body that is right but for one to three fields."""
    right: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
        "/tokenize": {"content": "x"},
        "/detokenize": {"tokens": [1]},
    }
    body = dict(right[path])
    for _ in range(rng.randint(1, 2)):
        body[rng.choice(FIELDS)] = anything(rng)
    if "max_tokens" in body and not (isinstance(body["max_tokens"], int) and body["max_tokens"] < 3):
        body["max_bytes"] = 8
    return body


def test_odd_requests_never_break_the_server(served: Any) -> None:
    """2000 requests with wrong values get 200 or 4xx, errors in OpenAI's form; the server goes on as before."""
    statuses: dict[int, int] = {}

    async def ask() -> None:
        async with served.client() as client:
            for seed in range(2000):
                rng = random.Random(seed)
                path = rng.choice(PATHS)
                body = request(rng, path)
                response = await client.post(
                    path, content=json_bytes(body), headers={"Content-Type": "application/json"}
                )
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                assert response.status_code == 200 or 400 <= response.status_code < 500, (seed, path, body)
                if response.status_code != 200:
                    assert response.json()["error"]["message"], (seed, path, body)
                elif "event-stream" in response.headers["content-type"]:
                    assert response.text.endswith("data: [DONE]\n\n"), (seed, path, body)

    asyncio.run(ask())
    assert statuses[200] > 20 and statuses[400] > 100
    assert served.post("/tokenize", {"content": "The fox"}).json()["count"] == 2


def json_bytes(body: Any) -> bytes:
    """JSON with escapes, so that half a character can be sent too."""
    import json

    return json.dumps(body).encode()
