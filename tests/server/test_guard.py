"""Who may ask what: keys, hosts, sizes, kinds of content; and what a browser is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
PATH = "/v1/chat/completions"


def test_a_key_is_asked_for_where_one_is_set(serve: Callable[..., Any]) -> None:
    """Requests need one of the keys; health and the page do not."""
    served = serve(keys=("one", "two"))
    for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"Authorization": "Basic one"}):
        response = served.post(PATH, BODY, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    for key in ("one", "two"):
        assert served.post(PATH, BODY, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert [served.get(path).status_code for path in ("/health", "/", "/page.js", "/v1/models")] == [200, 200, 200, 401]
    assert served.get("/metrics").status_code == 401


def test_only_this_machine_is_answered_on_loopback(serve: Callable[..., Any]) -> None:
    """A name that some other site made point here is refused; on other addresses any name will do."""
    served = serve()
    for host, status in (("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403)):
        assert served.get("/health", headers={"Host": host}).status_code == status
    assert serve(host="0.0.0.0").get("/health", headers={"Host": "box.local"}).status_code == 200


def test_bodies_are_limited(serve: Callable[..., Any]) -> None:
    """Too large a body is 413, with and without a length given beforehand."""
    served = serve(max_body=1000)
    big = b'{"messages": "' + b"x" * 2000 + b'"}'

    async def parts() -> Any:
        for i in range(0, len(big), 100):
            yield big[i : i + 100]

    headers = {"Content-Type": "application/json"}
    for content in (big, parts()):
        response = served.request("POST", PATH, content=content, headers=headers)
        assert response.status_code == 413 and "at most 1000 bytes" in response.json()["error"]["message"]
    assert served.post(PATH, BODY).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"messages": [{"role": "user", "content": "x"}]}', "text/plain"),
        (b"{", "application/json"),
        (b"", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "application/json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}', "application/json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "application/json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e999}', "application/json"),
    ],
)
def test_what_is_no_request_is_400(served: Any, content: bytes, kind: str) -> None:
    """Broken JSON, half characters and other kinds of content, which a foreign page could send unasked, are refused."""
    response = served.request("POST", PATH, content=content, headers={"Content-Type": kind})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and message
    assert ("Content-Type: application/json" in message) == (kind != "application/json")


def test_unknown_paths_and_methods(served: Any) -> None:
    """They are 404 and 405 in OpenAI's form, also for what OpenAI has and an ensemble has not."""
    for path in ("/v1/embeddings", "/v1/images/generations", "/v1/responses", "/api/generate"):
        response = served.post(path, {})
        assert response.status_code == 404
        assert f"POST {path} is not offered here; there is /apply-template" in response.json()["error"]["message"]
    assert served.get(PATH).status_code == 405 and "error" in served.get(PATH).json()


def test_browsers_are_told_to_load_nothing_from_elsewhere(served: Any) -> None:
    """Every answer brings a policy without any other source, and none may be framed."""
    for response in (served.get("/"), served.get("/health"), served.get("/nowhere")):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in response.headers
