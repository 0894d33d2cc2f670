"""Chat completions and completions: whole, streamed, with log-probabilities, limits and mistakes."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

HELLO = [{"role": "user", "content": "Hello"}]


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The objects of a stream, which has to end as OpenAI's do."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str, str | None, list[Any]]:
    """(text, finish reason, logprobs) of one choice of a chat stream."""
    text, reasons, logprobs = "", [], []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["delta"].get("content", "")
                logprobs += (choice["logprobs"] or {}).get("content", [])
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(reasons) == 1
    return text, reasons[0], logprobs


def test_a_chat_completion_has_all_parts(served: Any) -> None:
    """A reply, why it ended, counts in pieces, timings, and what is ours under ``fusion``."""
    answer = served.post("/v1/chat/completions", {"messages": HELLO, "seed": 3, "max_tokens": 10}).json()
    [choice] = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["model"] == "ensemble"
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["completion_tokens"] == 10 and usage["total_tokens"] == usage["prompt_tokens"] + 10
    assert answer["timings"]["predicted_n"] == 10
    assert answer["fusion"]["seed"] == 3 and answer["fusion"]["experts"] == ["left", "right"]


@pytest.mark.slow
def test_streams_are_the_whole_texts(served: Any) -> None:
    """200 seeded requests with emoji, Chinese and stop strings across pieces: the stream is the text, byte for byte."""
    stops = ["fox", "好世", "🎉", "own", "é", "n f", "日本", "lo to", "🦊 ju"]

    async def compare() -> int:
        n_special = 0
        async with served.client() as client:
            for seed in range(200):
                rng = random.Random(seed)
                body = {
                    "messages": [{"role": "user", "content": rng.choice(["The", "你好", "🎉 und", "Hello"])}],
                    "seed": seed,
                    "max_tokens": rng.randint(1, 24),
                    "stop": rng.sample(stops, rng.randint(0, 2)),
                    "logprobs": seed % 2 == 0,
                    "temperature": rng.choice([0.0, 0.8, 1.0]),
                }
                whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
                stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
                text, reason, logprobs = joined(chunks_of(stream.text))
                assert text == whole["message"]["content"], seed
                assert reason == whole["finish_reason"], seed
                n_special += any(ord(c) > 0x2000 for c in text)
                assert not any(stop in text for stop in body["stop"])
                if body["logprobs"]:
                    assert logprobs == whole["logprobs"]["content"]
                    said = b"".join(bytes(entry["bytes"]) for entry in logprobs)
                    assert said.decode("utf-8", "replace") == text
        return n_special

    assert asyncio.run(compare()) > 50


def test_stream_ends_with_usage_and_done(served: Any) -> None:
    """The usage chunk has no choices and comes last before ``[DONE]``; it comes only when asked for."""
    body = {"messages": HELLO, "seed": 3, "max_tokens": 5, "stream": True}
    chunks = chunks_of(served.post("/v1/chat/completions", body).text)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    chunks = chunks_of(served.post("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}).text)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 5


def test_the_same_seed_gives_the_same_text(served: Any) -> None:
    """A seed repeats its text, 0 too; without one texts differ, and the seed that was drawn is told."""
    body = {"messages": HELLO, "max_tokens": 20, "temperature": 1.5}

    def say(**more: Any) -> tuple[str, int]:
        answer = served.post("/v1/chat/completions", {**body, **more}).json()
        return answer["choices"][0]["message"]["content"], answer["fusion"]["seed"]

    assert say(seed=0) == say(seed=0) and say(seed=0)[1] == 0
    text, seed = say()
    assert say(seed=seed)[0] == text
    assert len({say(seed=-1)[0] for _ in range(5)}) > 1


def test_several_choices_have_seeds_of_their_own(served: Any) -> None:
    """``n`` texts: the first is that of the seed, the others those of the following seeds; streams mark them."""
    body = {"messages": HELLO, "max_tokens": 15, "temperature": 1.2, "seed": 7}
    three = served.post("/v1/chat/completions", {**body, "n": 3}).json()
    texts = [choice["message"]["content"] for choice in three["choices"]]
    for i, text in enumerate(texts):
        alone = served.post("/v1/chat/completions", {**body, "seed": 7 + i}).json()
        assert alone["choices"][0]["message"]["content"] == text
        assert alone["usage"]["prompt_tokens"] == three["usage"]["prompt_tokens"]
    chunks = chunks_of(served.post("/v1/chat/completions", {**body, "n": 3, "stream": True}).text)
    assert [joined(chunks, i)[0] for i in range(3)] == texts


def test_logprobs_are_those_of_the_law(served: Any) -> None:
    """Alternatives of a piece exclude each other; greedy texts have the chosen piece first; at most 20 are told."""
    body = {"messages": HELLO, "max_tokens": 12, "logprobs": True, "top_logprobs": 20, "seed": 5}
    for temperature in (0.0, 1.0):
        answer = served.post("/v1/chat/completions", {**body, "temperature": temperature}).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 12
        for entry in content:
            top = entry["top_logprobs"]
            assert 1 <= len(top) <= 20
            assert sum(math.exp(other["logprob"]) for other in top) <= 1.0 + 1e-9
            assert top[0]["logprob"] >= entry["logprob"] - 1e-12
            assert [a["logprob"] for a in top[1:]] == sorted((a["logprob"] for a in top[1:]), reverse=True)
            if temperature == 0.0:
                assert top[0]["bytes"] == entry["bytes"]


def test_n_probs_asks_for_logprobs_too(served: Any) -> None:
    """llama-server's field gives what OpenAI's give."""
    body = {"messages": HELLO, "max_tokens": 3, "seed": 5}
    usual = served.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2}).json()["choices"]
    assert served.post("/v1/chat/completions", {**body, "n_probs": 2}).json()["choices"] == usual
    body = {"prompt": "The", "max_tokens": 3, "seed": 5}
    usual = served.post("/v1/completions", {**body, "logprobs": 2}).json()["choices"]
    assert served.post("/v1/completions", {**body, "n_probs": 2}).json()["choices"] == usual


def test_echo_scores_the_prompt(served: Any) -> None:
    """With ``echo`` and ``logprobs`` the prompt's pieces come first, the first without a value, and offsets fit."""
    body = {"prompt": "The quick 你好 fox", "max_tokens": 4, "seed": 1, "echo": True, "logprobs": 2}
    answer = served.post("/v1/completions", body).json()
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(body["prompt"])
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)
    assert logprobs["top_logprobs"][0] is None and all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 4
    none = served.post("/v1/completions", {**body, "max_tokens": 0}).json()
    assert none["choices"][0]["text"] == body["prompt"]
    n = len(none["choices"][0]["logprobs"]["tokens"])
    assert none["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:n]
    plain = served.post("/v1/completions", {**body, "logprobs": None}).json()
    assert plain["choices"][0]["text"].startswith(body["prompt"])
    stream = chunks_of(served.post("/v1/completions", {**body, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in stream) == choice["text"]
    told = [chunk["choices"][0]["logprobs"] for chunk in stream if chunk["choices"][0]["logprobs"]]
    assert [token for one in told for token in one["tokens"]] == logprobs["tokens"]
    assert [offset for one in told for offset in one["text_offset"]] == logprobs["text_offset"]


def test_prompts_of_token_ids_and_several_prompts(served: Any) -> None:
    """Token ids are read in the piece expert's vocabulary; each prompt of a list gets its choices."""
    text = "The quick fox"
    ids = served.post("/tokenize", {"content": text}).json()["tokens"]
    assert served.post("/detokenize", {"tokens": ids}).json()["content"] == text
    body = {"max_tokens": 6, "seed": 4}
    alone = served.post("/v1/completions", {**body, "prompt": text}).json()["choices"][0]["text"]
    assert served.post("/v1/completions", {**body, "prompt": ids}).json()["choices"][0]["text"] == alone
    both = served.post("/v1/completions", {**body, "prompt": [ids, "Hello", text], "n": 2}).json()["choices"]
    assert [choice["index"] for choice in both] == list(range(6))
    assert both[0]["text"] == both[4]["text"] == alone
    default = served.post("/v1/completions", {"prompt": text, "seed": 4, "temperature": 0}).json()
    assert default["usage"]["completion_tokens"] <= 16


def test_logit_bias_and_truncation(served: Any) -> None:
    """A bias decides what is said, 256 is END; top_k 1 is greedy."""
    body = {"messages": HELLO, "max_tokens": 4, "seed": 1}
    forced = served.post("/v1/chat/completions", {**body, "logit_bias": {str(ord("x")): 100}}).json()
    assert forced["choices"][0]["message"]["content"] == "xxxx"
    ended = served.post("/v1/chat/completions", {**body, "logit_bias": {"256": 100}}).json()
    assert ended["choices"][0]["finish_reason"] == "stop" and not ended["choices"][0]["message"]["content"]
    greedy = served.post("/v1/chat/completions", {**body, "temperature": 0}).json()["choices"][0]
    assert served.post("/v1/chat/completions", {**body, "top_k": 1, "temperature": 2}).json()["choices"][0] == greedy


def test_fusion_of_one_text(served: Any) -> None:
    """A request may bring weights and a strategy, and is told who carried each piece of its text."""
    body = {"messages": HELLO, "max_tokens": 8, "seed": 2}
    fusion = {"weights": {"right": 1}, "strategy": "linear", "trace": True}
    answer = served.post("/v1/chat/completions", {**body, "fusion": fusion}).json()
    assert answer["fusion"]["weights"] == {"left": 0.0, "right": 1.0}
    assert answer["fusion"]["strategy"] == "linear(w=static)"
    [pieces] = answer["fusion"]["pieces"]
    assert "".join(piece["text"] for piece in pieces) == answer["choices"][0]["message"]["content"]
    for piece in pieces:
        assert piece["experts"]["right"]["responsibility"] == pytest.approx(1.0)
        assert piece["divergence"] == pytest.approx(0.0, abs=1e-9)
        assert 0 < sum(other["probability"] for other in piece["alternatives"]) <= 1.0 + 1e-9
    stream = served.post("/v1/chat/completions", {**body, "fusion": fusion, "stream": True}).text
    assert [piece for chunk in chunks_of(stream) for piece in chunk.get("fusion", {}).get("pieces", [])] == pieces


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("chat/completions", {}, 400, "messages", "required"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least 1"),
        ("chat/completions", {"messages": HELLO, "temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
        ("chat/completions", {"messages": HELLO, "temperature": -1}, 400, "temperature", "expected a number in"),
        ("chat/completions", {"messages": HELLO, "temperature": "1"}, 400, "temperature", "valid number"),
        ("chat/completions", {"messages": HELLO, "seed": 2**40}, 400, "seed", "expected 0"),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs", "logprobs: true"),
        ("chat/completions", {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools", "cannot be called"),
        ("chat/completions", {"messages": HELLO, "logit_bias": {"257": 1}}, 400, "logit_bias", "expected symbols"),
        ("chat/completions", {"messages": HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias", "numbers of symbols"),
        ("chat/completions", {"messages": HELLO, "stop": [""]}, 400, "stop", "at least one character"),
        ("chat/completions", {"messages": HELLO, "n": 1000}, 400, "n", "less than or equal"),
        ("chat/completions", {"messages": HELLO, "model": "gpt-5"}, 404, "model", "not served here"),
        ("chat/completions", {"messages": HELLO, "presence_penalty": 1}, 400, "presence_penalty", "frequency_penalty"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role", "tools"),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content", "null"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            400,
            "messages.0.content",
            "parts of type text",
        ),
        ("chat/completions", {"messages": [{"role": "you", "content": "x"}]}, 400, "messages", "unknown role"),
        ("chat/completions", {"messages": HELLO, "fusion": {"weights": {"lef": 1}}}, 400, "weights", "'left'"),
        ("chat/completions", {"messages": HELLO, "fusion": {"strategy": "linea"}}, 400, None, "'linear'"),
        ("completions", {"prompt": [5, 999999]}, 400, "prompt", "token ids of expert 'left'"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix", "not filled in"),
        ("completions", {"prompt": ["x"] * 129}, 400, "prompt", "at most 128"),
        ("completions", {"prompt": ["x"] * 100, "n": 2}, 400, "n", "at most 128"),
    ],
)
def test_mistakes_are_told_in_openais_form(
    served: Any, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    """What is wrong, in which field, and how to mend it."""
    response = served.post(f"/v1/{path}", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert message in error["message"] and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(serve: Callable[..., Any], stream: bool) -> None:
    """It is a 400 that names the tightest expert and both numbers, streamed or not."""
    served = serve()
    body = {"messages": [{"role": "user", "content": "x" * 3000}], "stream": stream}
    response = served.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "'left'" in error["message"] and "2000" in error["message"]


def test_what_changes_nothing_is_ignored(served: Any) -> None:
    """Accounts, caches and empty wishes are taken without a word; text parts are joined."""
    body = {
        "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": "Ann"}],
        "user": "me", "store": False, "metadata": {}, "tools": [], "tool_choice": "none", "n": None, "stop": None,
        "temperature": None, "logit_bias": None, "seed": 1, "max_completion_tokens": 5, "presence_penalty": 0,
    }  # fmt: skip
    one = served.post("/v1/chat/completions", body).json()
    plain = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "seed": 1,
        "max_tokens": 5,
    }
    assert one["choices"] == served.post("/v1/chat/completions", plain).json()["choices"]
