"""The server as a process: socket, signals, and an end without loose ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.server.app import make_app
from gguf_fusion.server.owner import Owner
from gguf_fusion.server.service import Settings

_log = logging.getLogger(__name__)

_MARGIN_S = 2.0
"""Seconds between telling the running request that it is over and cutting connections."""

_JOIN_S = 30.0
"""Longest wait for the experts' memory to be given back; a decode in progress ends first."""


def serve(
    load: Callable[[], Ensemble],
    settings: Settings,
    *,
    port: int,
    max_waiting: int,
    grace_s: float,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C; call it in the main thread.

    The port is taken before ``load`` is called, so that a port in use costs nothing; requests are answered with 503
    until the ensemble is there, then ``ready`` is called with the address. On a signal no more requests are taken,
    and the running one has ``grace_s`` seconds to finish (a second Ctrl-C: none). Raises UsageError where the address
    cannot be used, and what ``load`` raises.
    """
    sock = _bind(settings.host, port)
    address = _address(settings.host, sock.getsockname()[1])

    def loading() -> Ensemble:
        try:
            ensemble = load()
        except BaseException:
            server.should_exit = True
            raise
        ready(address)
        return ensemble

    owner = Owner(loading, max_waiting=max_waiting)
    config = uvicorn.Config(
        make_app(owner, settings),
        lifespan="off",
        log_config=None,
        access_log=_log.isEnabledFor(logging.INFO),
        server_header=False,
        timeout_graceful_shutdown=round(grace_s + _MARGIN_S),
    )
    server = _Server(config, owner, grace_s)
    owner.start()
    # The server handles both itself, and then raises the signal again for whoever would like to know.
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[sock])
    finally:
        owner.stop(0.0)
        if not owner.join(_JOIN_S):
            _log.warning("the step in progress does not end; leaving it behind")
        for number, handler in before.items():
            signal.signal(number, handler)
        sock.close()
    if owner.error is not None:
        raise owner.error


class _Server(uvicorn.Server):
    """Tells the owner when the end is near."""

    def __init__(self, config: uvicorn.Config, owner: Owner, grace_s: float) -> None:
        super().__init__(config)
        self._owner = owner
        self._grace_s = grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        grace_s = 0.0 if self.should_exit else self._grace_s
        super().handle_exit(sig, frame)
        # Not here: a signal may have interrupted the main thread while it holds the owner's lock.
        self._loop.call_soon_threadsafe(self._owner.stop, grace_s)


def _bind(host: str, port: int) -> socket.socket:
    sock = None
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except OSError as error:
        if sock is not None:
            sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--host {host} --port {port}: {reason}; choose another one (--port 0 takes any)") from error
    return sock


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ignore(*_: Any) -> None:
    """A signal that has done its work."""
