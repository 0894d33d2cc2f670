"""The contract: the official ``openai`` client, in process and over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

HELLO: Any = [{"role": "user", "content": "Hello"}]


async def everything(client: openai.AsyncOpenAI) -> list[str]:
    """Uses each part of the interface once; returns the texts that came."""
    models = await client.models.list()
    [model] = models.data
    assert (await client.models.retrieve(model.id)).id == model.id
    common: Any = {"model": model.id, "seed": 5, "max_tokens": 12}

    whole = await client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **common)
    text = whole.choices[0].message.content
    assert text and whole.usage and whole.usage.completion_tokens <= 12
    logprobs = whole.choices[0].logprobs
    assert logprobs and logprobs.content
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode("utf-8", "replace") == text
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    assert whole.model_extra and whole.model_extra["fusion"]["seed"] == 5

    streamed, reason, usage = "", None, None
    stream = await client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **common
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            streamed += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert streamed == text and reason == whole.choices[0].finish_reason
    assert usage and usage.total_tokens == whole.usage.total_tokens

    completion = await client.completions.create(prompt="The quick", echo=True, logprobs=1, **common)
    assert completion.choices[0].text.startswith("The quick")
    assert completion.choices[0].logprobs and completion.choices[0].logprobs.tokens
    parts = [
        part.choices[0].text async for part in await client.completions.create(prompt="The", stream=True, **common)
    ]

    traced = await client.chat.completions.create(
        messages=HELLO,
        extra_body={"fusion": {"weights": {"left": 1}, "trace": True}, "min_p": 0.1, "top_k": 5},
        **common,
    )
    assert traced.model_extra and traced.model_extra["fusion"]["pieces"]

    parsed = await client.chat.completions.create(
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}},
        **common,
    )
    assert parsed.choices[0].message.content in ('"yes"', '"no"')

    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.chat.completions.create(model="gpt-5", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=model.id, messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "x" * 4000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=model.id, input="x")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    return [text, completion.choices[0].text, "".join(parts)]


def test_the_official_client_gets_the_same_in_process_and_over_a_socket(
    serve: Callable[..., Any], on_socket: Callable[[Any], str]
) -> None:
    """Every call works with the client's own types and errors, and both ways give the same texts."""
    served = serve(keys=("secret",))

    async def in_process() -> list[str]:
        async with served.client() as http:
            return await everything(
                openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="secret", http_client=http, max_retries=0)
            )

    async def over_socket() -> list[str]:
        async with openai.AsyncOpenAI(base_url=on_socket(served) + "/v1", api_key="secret", max_retries=0) as client:
            return await everything(client)

    assert asyncio.run(in_process()) == asyncio.run(over_socket())
