"""One owner for the ensemble: a bounded queue, work that ends when nobody wants it, questions in between."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400, "seed": 1, "logit_bias": {"256": -100}}
PATH = "/v1/chat/completions"


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def slow(serve: Callable[..., Any], slow_babblers: Callable[..., Any]) -> Any:
    """A server whose experts take their time; one request may wait."""
    return serve(partial(slow_babblers, delay_s=0.01), max_waiting=1)


def test_a_full_queue_refuses_with_a_time_to_come_back(slow: Any) -> None:
    """One request runs, one waits, the third is told when to try again; afterwards there is room."""

    async def ask() -> None:
        async with slow.client() as client:
            tasks = [asyncio.create_task(client.post(PATH, json=BODY))]
            await asyncio.to_thread(until, lambda: slow.owner.n_running == 1 and slow.owner.n_waiting == 0)
            tasks.append(asyncio.create_task(client.post(PATH, json=BODY)))
            await asyncio.to_thread(until, lambda: slow.owner.n_waiting == 1)
            refused = await client.post(PATH, json=BODY)
            assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["error"]["code"] == "queue_full"
            for task in tasks:
                task.cancel()

    asyncio.run(ask())
    until(lambda: slow.owner.n_running == slow.owner.n_waiting == 0)
    assert slow.post(PATH, {**BODY, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_work(
    serve: Callable[..., Any], slow_babblers: Callable[..., Any], on_socket: Callable[[Any], str], stream: bool
) -> None:
    """After the connection is closed hardly another token is decoded, and the next request is answered."""
    import httpx2

    served = serve(partial(slow_babblers, delay_s=0.02))
    address = on_socket(served)
    experts = served.owner.ensemble.experts
    with httpx2.Client(base_url=address, timeout=1.0) as client:
        if stream:
            with client.stream("POST", PATH, json={**BODY, "stream": True}) as response:
                for _ in range(3):
                    next(response.iter_lines())
                    break
        else:
            with pytest.raises(httpx2.TimeoutException):
                client.post(PATH, json=BODY)
    until(lambda: served.owner.n_running == 0, 2.0)
    n = sum(expert.n_decoded for expert in experts)
    time.sleep(0.2)
    assert sum(expert.n_decoded for expert in experts) == n
    assert httpx2.post(address + PATH, json={**BODY, "max_tokens": 2}, timeout=20).status_code == 200


def test_a_client_that_leaves_the_queue_is_never_served(slow: Any) -> None:
    """A request that is given up while it waits makes room at once, and its text is not written."""

    async def ask() -> None:
        async with slow.client() as client:
            first = asyncio.create_task(client.post(PATH, json=BODY))
            await asyncio.to_thread(until, lambda: slow.owner.n_running == 1)
            second = asyncio.create_task(client.post(PATH, json=BODY))
            await asyncio.to_thread(until, lambda: slow.owner.n_waiting == 1)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            assert slow.owner.n_waiting == 0 and slow.owner.n_running == 1
            first.cancel()

    asyncio.run(ask())
    until(lambda: slow.owner.n_running == 0)


def test_questions_are_answered_while_a_text_is_written(slow: Any) -> None:
    """Tokenizing does not wait for the end of a long text."""

    async def ask() -> None:
        async with slow.client() as client:
            text = asyncio.create_task(client.post(PATH, json=BODY))
            await asyncio.to_thread(until, lambda: slow.owner.n_running == 1)
            answer = await client.post("/tokenize", json={"content": "The fox"})
            assert answer.json()["count"] == 2 and not text.done()
            text.cancel()

    asyncio.run(ask())


def test_while_loading_everything_says_so(serve: Callable[..., Any], slow_babblers: Callable[..., Any]) -> None:
    """Until the models are there, health and requests are 503 with a time to come back."""
    from gguf_fusion.server.app import make_app
    from gguf_fusion.server.owner import Owner

    go = threading.Event()

    def load() -> Any:
        assert go.wait(20)
        return slow_babblers()

    served = serve()
    late = Owner(load)
    late.start()
    served.app = make_app(late)
    for response in (served.get("/health"), served.get("/v1/models"), served.post(PATH, BODY)):
        assert response.status_code == 503 and response.json()["error"]["code"] == "loading"
        assert int(response.headers["retry-after"]) > 0
    go.set()
    until(lambda: served.get("/health").status_code == 200)
    late.stop(0.0)
    assert late.join(20)


def test_stopping_refuses_the_waiting_and_ends_the_running(slow: Any) -> None:
    """When the server stops, waiting requests get 503, the running stream ends with an error, and all is closed."""

    async def ask() -> None:
        async with slow.client() as client:
            first = asyncio.create_task(client.post(PATH, json={**BODY, "stream": True}))
            await asyncio.to_thread(until, lambda: slow.owner.n_running == 1)
            second = asyncio.create_task(client.post(PATH, json=BODY))
            await asyncio.to_thread(until, lambda: slow.owner.n_waiting == 1)
            await asyncio.sleep(0.3)
            slow.owner.stop(0.1)
            assert (await second).status_code == 503
            assert "shutting down" in (await first).text and "[DONE]" not in (await first).text
            assert (await client.post(PATH, json=BODY)).status_code == 503

    asyncio.run(ask())
    assert slow.owner.join(20)


def test_a_stop_lets_a_short_text_finish(slow: Any) -> None:
    """Within the time of grace the running text comes to its end."""

    async def ask() -> None:
        async with slow.client() as client:
            text = asyncio.create_task(client.post(PATH, json={**BODY, "max_tokens": 5}))
            await asyncio.to_thread(until, lambda: slow.owner.n_running == 1)
            slow.owner.stop(20.0)
            assert (await text).json()["usage"]["completion_tokens"] == 5

    asyncio.run(ask())


@pytest.mark.slow
def test_many_clients_get_their_own_texts(serve: Callable[..., Any], on_socket: Callable[[Any], str]) -> None:
    """16 clients with 20 requests each, a quarter dropped mid-stream: every answer is right, and nothing is left."""
    import httpx2

    served = serve(max_waiting=64)
    address = on_socket(served)
    bodies = [{**BODY, "seed": seed, "max_tokens": 6 + seed % 5, "temperature": 1.0} for seed in range(20)]
    wanted = [served.post(PATH, body).json()["choices"][0]["message"]["content"] for body in bodies]
    assert len(set(wanted)) >= 15
    n_tasks_before = threading.active_count()
    n_done = n_dropped = 0

    async def client(number: int) -> None:
        nonlocal n_done, n_dropped
        import json

        async with httpx2.AsyncClient(base_url=address, timeout=120) as http:
            for i, body in enumerate(bodies):
                if (number + i) % 4 == 0:
                    async with http.stream("POST", PATH, json={**body, "stream": True}) as response:
                        async for line in response.aiter_lines():
                            if '"content"' in line:
                                break
                    n_dropped += 1
                elif (number + i) % 4 == 1:
                    text = ""
                    async with http.stream("POST", PATH, json={**body, "stream": True}) as response:
                        async for line in response.aiter_lines():
                            if line.startswith("data: {"):
                                for choice in json.loads(line[6:])["choices"]:
                                    text += choice["delta"].get("content", "")
                    assert text == wanted[i]
                    n_done += 1
                else:
                    answer = (await http.post(PATH, json=body)).json()
                    assert answer["choices"][0]["message"]["content"] == wanted[i]
                    n_done += 1

    async def all_clients() -> None:
        await asyncio.gather(*(client(number) for number in range(16)))

    asyncio.run(all_clients())
    assert (n_done, n_dropped) == (240, 80)
    until(lambda: served.owner.n_running == served.owner.n_waiting == 0)
    assert threading.active_count() <= n_tasks_before
    assert served.post(PATH, bodies[3]).json()["choices"][0]["message"]["content"] == wanted[3]
