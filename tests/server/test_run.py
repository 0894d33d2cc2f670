"""The server as a process: its address, signals, and what it says when it cannot begin."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from gguf_fusion.cli import main
from gguf_fusion.errors import ModelFileError

_SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from conftest import babblers
from gguf_fusion.server import run
from gguf_fusion.server.service import Settings

run.serve(
    lambda: babblers(delay_s=0.02), Settings(), port=0, max_waiting=4, grace_s={grace_s},
    ready=lambda address: print(address, flush=True),
)
print("stopped", flush=True)
"""

LONG = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 400,
    "stream": True,
    "logit_bias": {"256": -100},
}


class Process:
    """A server in a process of its own."""

    def __init__(self, grace_s: float) -> None:
        script = _SCRIPT.format(here=str(Path(__file__).parent), grace_s=grace_s)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def end(self) -> tuple[str, str]:
        """(stdout, stderr) up to the end."""
        return self.process.communicate(timeout=60)


@pytest.fixture
def running() -> Iterator[list[Process]]:
    """Processes to be ended with the test."""
    processes: list[Process] = []
    yield processes
    for one in processes:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", [False, True])
def test_a_signal_ends_it_cleanly(running: list[Process], number: signal.Signals, busy: bool) -> None:
    """Exit status 0, no traceback; a reply that takes longer than the time of grace is told so in its stream."""
    server = Process(grace_s=0.2)
    running.append(server)
    lines: list[str] = []

    def read() -> None:
        with httpx2.stream("POST", server.address + "/v1/chat/completions", json=LONG, timeout=60) as response:
            lines.extend(response.iter_lines())

    reader = threading.Thread(target=read)
    if busy:
        reader.start()
        time.sleep(1.0)
    server.process.send_signal(number)
    out, err = server.end()
    assert server.process.returncode == 0 and out == "stopped\n" and "Traceback" not in err
    if busy:
        reader.join(20)
        assert any("shutting down" in line for line in lines)
    with pytest.raises(httpx2.TransportError):
        httpx2.get(server.address + "/health", timeout=5)


def test_a_port_in_use_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It is told before any model is looked for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit) as end:
            main(["serve", "--offline", "-e", "nowhere.gguf", "--port", str(taken.getsockname()[1])])
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and "--port 0 takes any" in err


def test_models_that_cannot_be_loaded_end_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The reason is one line, and the exit status is that of the error."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(SystemExit) as end:
        main(["serve", "--offline", "-e", str(file), "--port", "0"])
    err = capsys.readouterr().err
    assert end.value.code == ModelFileError.exit_status and "broken.gguf" in err and "Traceback" not in err


def test_without_the_extra_it_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the web libraries are not installed, the message says how to get them."""
    for name in [name for name in sys.modules if name.startswith("gguf_fusion.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as end:
        main(["serve"])
    assert end.value.code == 1 and "pip install 'gguf-fusion[server]'" in capsys.readouterr().err


def test_a_server_for_everybody_without_a_key_warns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond loopback a key is recommended; an empty one is refused."""
    from gguf_fusion.server import run

    monkeypatch.setattr(run, "serve", lambda *_, **__: None)
    for arguments, expected in (
        ([], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
    ):
        with pytest.raises(SystemExit):
            main(["serve", *arguments])
        assert ("warning" in capsys.readouterr().err) == expected
    with pytest.raises(SystemExit) as end:
        main(["serve", "--api-key", " "])
    assert end.value.code == 2
    assert "GGUF_FUSION_SERVE_API_KEY" not in os.environ
