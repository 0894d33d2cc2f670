"""A server that speaks the routes of the Hugging Face Hub, and a package index made of files."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What the server serves, how it misbehaves, and what it was asked."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: dict[str, int] = field(default_factory=dict)
    refuse_tokens: bool = False
    break_at: float | None = None
    breaks_left: int = 0
    ranges: bool = True
    chunk_delay_s: float = 0.0
    listing_delay_s: float = 0.0
    changed_after_listing: bytes | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent_bytes: int = 0

    def add(self, repository: str, **files: bytes) -> None:
        """Serve files under their names (``__`` stands for a folder, the suffix .gguf is added)."""
        self.repositories[repository] = {f"{name.replace('__', '/')}.gguf": data for name, data in files.items()}

    def asked(self, word: str) -> int:
        """How many requests had ``word`` in their path."""
        return sum(word in path for _, path, _ in self.requests)


def _handler(hub: FakeHub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _refuse(self, status: int, code: str | None, message: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            token = self.headers.get("Authorization")
            hub.requests.append((self.command, path, token))
            if path.startswith(("/cdn/", "/plain/")):
                self._send_file(path, body=body)
                return
            if token and hub.refuse_tokens:
                self._refuse(401, None, "Invalid credentials in Authorization header")
                return
            is_listing = path.startswith("/api/models/")
            repository = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
            if repository not in hub.repositories:
                self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            elif is_listing:
                self._listing(repository)
            elif repository in hub.gated:
                self._refuse(hub.gated[repository], "GatedRepo", "Access to this repository is restricted")
            else:
                self._pointer(repository, path.split("/resolve/")[1].partition("/")[2])

        def _listing(self, repository: str) -> None:
            time.sleep(hub.listing_delay_s)
            if "/revision/" in self.path and unquote(self.path.split("/revision/")[1].split("?")[0]) == "nowhere":
                self._refuse(404, "RevisionNotFound", "Invalid rev id: nowhere")
                return
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130},
                }
                for name, data in hub.repositories[repository].items()
            ]
            content = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
            if hub.changed_after_listing is not None:
                for name in hub.repositories[repository]:
                    hub.repositories[repository][name] = hub.changed_after_listing
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _pointer(self, repository: str, name: str) -> None:
            data = hub.repositories[repository].get(name)
            if data is None:
                self._refuse(404, "EntryNotFound", "Entry not found")
                return
            self.send_response(302)
            # Another host name, as in reality: the library follows redirects within one host differently.
            self.send_header("Location", f"{hub.address.replace('127.0.0.1', 'localhost')}/cdn/{repository}/{name}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send_file(self, path: str, *, body: bool) -> None:
            _, _, owner, repo, name = path.split("/", 4)
            data = hub.repositories[f"{owner}/{repo}"].get(name)
            if data is None:
                self._refuse(404, None, "gone")
                return
            start = 0
            asked = self.headers.get("Range")
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            if asked and hub.ranges and self.headers.get("If-Range", etag) == etag:
                start = int(asked.removeprefix("bytes=").split("-")[0])
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            else:
                self.send_response(200)
            self.send_header("ETag", etag)
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if not body:
                return
            end = len(data)
            if hub.break_at is not None and hub.breaks_left > 0:
                hub.breaks_left -= 1
                end = max(start, int(len(data) * hub.break_at))
            for position in range(start, end, 65536):
                piece = data[position : min(position + 65536, end)]
                try:
                    self.wfile.write(piece)
                except OSError:
                    return
                hub.sent_bytes += len(piece)
                time.sleep(hub.chunk_delay_s)
            if end < len(data):
                self.close_connection = True

    return Handler


@pytest.fixture
def server() -> Iterator[FakeHub]:
    """The running server."""
    hub = FakeHub()
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    httpd.daemon_threads = True
    hub.address = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield hub
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture
def hub_server(server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """The server as the Hugging Face Hub of this test; the library has read its variables long ago."""
    from huggingface_hub import close_session, constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65536)  # the real 10 MB exceed the files here
    close_session()
    yield server
    close_session()


class Notes:
    """A Progress that writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.started: list[tuple[str, int | None]] = []
        self.done = 0

    def note(self, message: str) -> None:
        self.lines.append(message)

    def start(self, label: str, total: int | None) -> None:
        self.started.append((label, total))

    def advance_to(self, done: int) -> None:
        self.done = max(self.done, done)

    def finish(self) -> None:
        pass


@pytest.fixture
def notes() -> Notes:
    """Records a pull."""
    return Notes()


@dataclass
class FakeIndex:
    """A directory of wheels that pip is told to use instead of any index."""

    folder: Path

    def add(self, package: str, version: str, **members: bytes) -> None:
        """Publish a wheel; ``__`` in a member's name stands for a folder, ``DOT`` for a dot."""
        name = package.replace("-", "_")
        path = self.folder / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as wheel:
            for member, data in members.items():
                wheel.writestr(member.replace("__", "/").replace("DOT", "."), data)
            info = f"{name}-{version}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """An empty package index, configured for pip by its variables only."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return FakeIndex(folder)


@pytest.fixture
def big_gguf(gguf_bytes: Callable[..., bytes]) -> bytes:
    """A valid GGUF of about 3 MB, so that a transfer has several chunks."""
    return gguf_bytes(payload=bytes(range(256)) * 12_000)
