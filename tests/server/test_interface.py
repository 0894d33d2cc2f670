"""Requests made up from the server's own description of its interface, right and wrong ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.slow
def test_the_answers_are_those_that_are_described(serve: Callable[..., Any], slow_babblers: Callable[..., Any]) -> None:
    """60 requests per route that fit the description and 60 that do not: 2xx or 4xx in the described form."""
    # Any host: the requests name one that does not exist. Texts end soon, whatever length is asked for.
    served = serve(partial(slow_babblers, end=0.6, n_ctx=200), host="0.0.0.0", metrics=True)
    interface = schemathesis.openapi.from_asgi("/openapi.json", served.app)
    seen: Counter[tuple[str, int]] = Counter()
    for found in interface.get_all_operations():
        operation = found.ok()
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation.body else (GenerationMode.POSITIVE,)
        for mode in modes:
            _ask(operation, mode, seen)
    texts = ("/v1/chat/completions", "/v1/completions")
    assert all(seen[path, 200] > 5 and seen[path, 400] > 30 for path in texts), seen
    assert seen["/apply-template", 200] > 5 and seen["/tokenize", 200] > 20, seen
    assert served.get("/health").status_code == 200


def _ask(operation: Any, mode: GenerationMode, seen: Counter[tuple[str, int]]) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def requests(case: Any) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body = _likely(case.body)
        response = case.call()
        case.validate_response(response, checks=CHECKS)
        seen[operation.path, response.status_code] += 1

    requests()


def _likely(body: dict[str, Any]) -> dict[str, Any]:
    """Without what is nearly always refused: unknown names, whole numbers with a point, messages that say nothing."""
    body = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in body.items()
        if name.replace("_", "").isalpha() and name.islower() and name not in ("model", "expert")
    }
    if isinstance(body.get("n"), int):
        body["n"] = min(body["n"], 3)
    for message in body.get("messages", []):
        if not isinstance(message.get("content"), str):
            message["content"] = "The quick"
    if "tokens" in body:
        body["tokens"] = [int(token) % 260 for token in body["tokens"]]
    return body
