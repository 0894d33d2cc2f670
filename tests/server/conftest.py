"""A server over table experts: in process, and on a real socket."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
import uvicorn

from gguf_fusion.ensemble import Ensemble
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.server.app import make_app
from gguf_fusion.server.owner import Owner
from gguf_fusion.server.service import Settings
from gguf_fusion.vocabulary import Kind, Vocabulary


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests in a browser unless they are asked for: not every machine has one."""
    if "browser" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("browser")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


CORPUS = (
    "The quick brown fox says 👩‍💻 hello to 你好世界 and 🦊 jumps over the lazy dog. "
    "Ein schöner Tag: ça va? 日本語 and emoji 🎉🎉 mix, the fox sleeps. The dog says 你好. "
).encode() * 2


def vocabulary(*pieces: str) -> Vocabulary:
    """All bytes, some longer pieces, two ends."""
    extra = [piece.encode() for piece in pieces]
    kinds = [Kind.TEXT] * (256 + len(extra)) + [Kind.CONTROL, Kind.END]
    return Vocabulary.from_pieces([bytes([b]) for b in range(256)] + extra + [b"<s>", b"</s>"], kinds)


class Babbler(TableExpert):
    """Goes on as ``CORPUS`` does after the last few bytes; now and then it says anything, or ends."""

    def __init__(self, words: Vocabulary, *, order: int, end: float, delay_s: float = 0.0, **options: Any) -> None:
        pieces = [words.piece(i) for i in range(words.n_vocab)]
        counts: dict[bytes, np.ndarray] = {}
        for n in range(order + 1):
            for i in range(n, len(CORPUS)):
                context = CORPUS[i - n : i]
                row = counts.setdefault(context, np.zeros(words.n_vocab))
                for token in words.text_ids.tolist():
                    row[token] += CORPUS.startswith(pieces[token], i) * len(pieces[token]) ** 2

        def law(path: tuple[int, ...]) -> np.ndarray:
            if delay_s:
                time.sleep(delay_s)
            done = words.text(np.array(path[-20:], np.int32))
            context = next(done[len(done) - n :] for n in range(order, -1, -1) if done[len(done) - n :] in counts)
            probs = counts[context] / counts[context].sum() + 1e-4
            probs[words.end_ids] = end
            return probs

        super().__init__(words, law, **options)


_EXPERTS: dict[float, tuple[Any, Any]] = {}


def babblers(*, delay_s: float = 0.0, end: float = 0.01, n_ctx: int = 2000, **options: Any) -> Ensemble:
    """Two experts with different pieces, and another idea of what comes next each."""
    left = Babbler(
        vocabulary("The", " quick", " fox", "你好", " and"), order=3, end=end, delay_s=delay_s, name="left", n_ctx=n_ctx
    )
    right = Babbler(
        vocabulary(" the", "qui", "ck", "🎉", "emoji"), order=2, end=end, delay_s=delay_s, name="right", n_ctx=n_ctx
    )
    return Ensemble.from_experts([left, right], weights=[2, 1], templates=["none", "none"], **options)


@pytest.fixture
def slow_babblers() -> Callable[..., Ensemble]:
    """The function that makes the ensemble; ``delay_s`` makes its experts slow."""
    return babblers


class Served:
    """A server's application with its owner, and clients to ask it."""

    def __init__(self, load: Callable[[], Ensemble], settings: Settings, max_waiting: int) -> None:
        self.owner = Owner(load, max_waiting=max_waiting)
        self.app = make_app(self.owner, settings)
        self.owner.start()
        assert self.owner.loaded.wait(300)

    def close(self) -> None:
        self.owner.stop(0.0)
        assert self.owner.join(30)

    def client(self, **options: Any) -> httpx2.AsyncClient:
        """Talks to the application in process; errors inside are answers, as over a socket."""
        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=600, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        """One request in process."""
        return self.request("POST", path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """One request in process."""
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """One request in process."""

        async def ask() -> httpx2.Response:
            async with self.client() as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """A function that makes a server of table experts."""
    made: list[Served] = []

    def make(load: Callable[[], Ensemble] = babblers, *, max_waiting: int = 32, **settings: Any) -> Served:
        made.append(Served(load, Settings(**settings), max_waiting))
        return made[-1]

    yield make
    for served in made:
        served.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """A server of two table experts."""
    return serve()


@pytest.fixture
def on_socket() -> Iterator[Callable[[Served], str]]:
    """A function that puts a server on a socket of this machine and returns its address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def listen(served: Served) -> str:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(served.app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    yield listen
    for server, thread in running:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
