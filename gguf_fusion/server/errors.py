"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as PlainHTTPException

from gguf_fusion.errors import ClosedError, ContextOverflowError, GgufFusionError, UsageError

_log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "unavailable_error"}


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(message.encode("utf-8", "replace").decode())  # half a surrogate pair cannot be sent back

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


class ErrorDetail(BaseModel):
    """What went wrong, in which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The form of every error, for the description of the interface."""

    error: ErrorDetail


DESCRIBED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "Refused: the message says what was expected and how to mend it"},
    "503": {"model": ErrorBody, "description": "Loading, busy or ending: try again after Retry-After seconds"},
}
"""Answers that every route may give beside its own."""


def unsupported(param: str, message: str) -> RefusedError:
    """A field that asks for what an ensemble cannot do."""
    return RefusedError(400, f"{param}: {message}", param=param, code="unsupported_parameter")


def refused(error: Exception) -> RefusedError:
    """What a client is told of an error; unexpected ones are logged and told without details."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, ContextOverflowError):
        message = (
            f"the prompt has {error.n_prompt} tokens for expert {error.expert!r}, whose context holds {error.n_ctx}, "
            f"and one must stay free for the reply; shorten the messages"
        )
        return RefusedError(400, message, param="messages", code="context_length_exceeded")
    if isinstance(error, UsageError):
        param, colon, _ = str(error).partition(": ")
        return RefusedError(400, str(error), param=param if colon and re.fullmatch(r"\w+", param) else None)
    if isinstance(error, ClosedError):
        return RefusedError(503, "the server is shutting down", headers={"Retry-After": "5"})
    if isinstance(error, GgufFusionError):
        _log.error("%s", error)
        return RefusedError(500, str(error))
    _log.error("unexpected error", exc_info=error)
    return RefusedError(500, "an unexpected error; the server's log has the details")


def add_handlers(app: FastAPI) -> None:
    """Answer every error of ``app`` in OpenAI's form."""

    async def known(_: Request, error: Exception) -> JSONResponse:
        return refused(error).response()

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        kind = request.headers.get("content-type", "no Content-Type")
        if "json" not in kind.lower():  # other sites may send other kinds without asking, so only JSON is read
            message = f"expected the header 'Content-Type: application/json', got {kind[:100]!r}"
            return RefusedError(400, message, code="content_type").response()
        found = error.errors()
        # Of the variants of a union the one that only has another type was not meant.
        first = next((one for one in found if not one["type"].endswith("_type")), found[0])
        param = ".".join(str(part) for part in first["loc"][1:] if not _is_variant(part)) or None
        message = f"{param}: {first['msg']}" if param else f"expected a JSON object: {first['msg']}"
        return RefusedError(400, message, param=param).response()

    async def plain(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, PlainHTTPException)
        message = str(error.detail)
        if error.status_code in (404, 405):
            offered = ", ".join(sorted(app.openapi()["paths"]))
            message = f"{request.method} {request.url.path[:200]} is not offered here; there is {offered}"
        return RefusedError(error.status_code, message, headers=error.headers).response()

    for kind in (RefusedError, GgufFusionError, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(PlainHTTPException, plain)
    app.add_exception_handler(HTTPException, plain)


def _is_variant(part: Any) -> bool:
    """Whether a part of a location names a variant of a union, which clients know nothing of."""
    return isinstance(part, str) and ("[" in part or "-" in part or part in ("str", "int", "bool", "float"))
