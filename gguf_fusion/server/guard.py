"""What every request passes first: who may ask, how much they may send, and what a browser may do with the answer."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gguf_fusion.server.errors import RefusedError

OPEN_PATHS = ("/", "/page.css", "/page.js", "/favicon.ico", "/health", "/v1/health")
"""Answered without a key: they tell nothing of the models."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Guard:
    """ASGI middleware.

    keys     : API keys of which a request must bring one; none needed if empty
    max_body : most bytes of a request's body
    host     : address the server listens on. On loopback only requests that name it are answered: a page of another
               site whose name was made to point here (DNS rebinding) gets nothing
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str] = (), max_body: int, host: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_body = max_body
        self._hosts = {*_LOOPBACK, host} if host in _LOOPBACK else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Content-Security-Policy"] = _POLICY
                headers["Referrer-Policy"] = "no-referrer"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
        except RefusedError as error:
            await error.response()(scope, receive, guarded_send)
            return
        await self._app(scope, self._limited(receive), guarded_send)

    def _check(self, path: str, headers: Headers) -> None:
        host = urlsplit("//" + headers.get("host", "")).hostname or ""
        if self._hosts is not None and host not in self._hosts:
            raise RefusedError(403, f"expected the host localhost, got {host[:100]!r}; this server is for this machine")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body:
            raise self._too_large()
        if self._keys and path not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
            if scheme.lower() != "bearer" or not any(right):
                raise RefusedError(
                    401,
                    "expected the header 'Authorization: Bearer KEY' with a valid key",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"expected a body of at most {self._max_body} bytes", code="body_too_large")

    def _limited(self, receive: Receive) -> Receive:
        """Bodies may come without a length: they are counted."""
        n = 0

        async def counted() -> Message:
            nonlocal n
            message = await receive()
            n += len(message.get("body", b""))
            if n > self._max_body:
                raise HTTPException(413, str(self._too_large()))
            return message

        return counted
