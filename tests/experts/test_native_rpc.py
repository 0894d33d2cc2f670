"""Workers on other machines, tried on loopback where the installed library has RPC; and what stands in their way."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gguf_fusion.cli import main
from gguf_fusion.errors import LoadError, UsageError
from gguf_fusion.experts import native_devices, native_rpc

S = "smollm2-135m-instruct"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("wrong", ["", "host", "host:", ":1", "host:x", "host:0", "host:70000"])
def test_endpoints_are_checked(wrong: str) -> None:
    """What is no host:port is refused before native code sees it."""
    with pytest.raises(UsageError, match="expected host:port"):
        native_rpc.check_endpoint(wrong)


def test_nobody_silence_and_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port, a worker that is busy and a server of another kind: three messages, no hang, no dead process."""
    monkeypatch.setattr(native_rpc, "ANSWER_S", 0.3)
    with pytest.raises(LoadError, match=r"no worker answers.*gguf-fusion worker"):
        native_rpc._ask(f"127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(LoadError, match="one client at a time"):
            native_rpc._ask(endpoint)

        def answer(data: bytes) -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(data)

        server.accept()[0].close()
        for data, message in (
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no worker of this release"),
            ((28).to_bytes(8, "little") + bytes([3, 0, 0, 0]), "version 3 of the protocol"),
        ):
            thread = threading.Thread(target=answer, args=(data,))
            thread.start()
            with pytest.raises(LoadError, match=message):
                native_rpc._ask(endpoint)
            thread.join()


def test_an_environment_variable_names_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker from the environment that is not there: its address, what to start, and status 1."""
    endpoint = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("GGUF_FUSION_PLAN_RPC", endpoint)
    monkeypatch.setattr(native_devices, "supports_rpc", lambda: True)
    monkeypatch.setattr(native_rpc, "_address", lambda name: 0)
    result = CliRunner().invoke(main, ["plan", "laptop-6"])
    assert result.exit_code == 1
    assert f"no worker answers at {endpoint}" in result.stderr


def test_a_build_without_rpc_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, and being one, need the backend; the message has the command that builds it."""
    monkeypatch.setattr(native_devices, "supports_rpc", lambda: False)
    with pytest.raises(LoadError, match="-DGGML_RPC=on"):
        native_rpc.remote_devices(["127.0.0.1:1"])
    result = CliRunner().invoke(main, ["worker", "--port", str(free_port())])
    assert result.exit_code == 1
    assert "-DGGML_RPC=on" in result.stderr
    assert "only programs on this machine" in result.stderr
    loud = CliRunner().invoke(main, ["worker", "--host", "0.0.0.0", "--port", str(free_port())])
    assert "TRUSTED NETWORKS ONLY" in loud.stderr


def test_connections_get_time_limits() -> None:
    """Connections to a worker get keepalive and a limit for silence; others, and other descriptors, are left alone."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        n_open = len(list(Path("/dev/fd").iterdir()))
        with (
            socket.create_connection(server.getsockname()) as mine,
            socket.create_connection(other.getsockname()) as no,
        ):
            with native_rpc.guarded([f"127.0.0.1:{server.getsockname()[1]}"]):
                pass
            limits = [c.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for c in (mine, no)]
            assert limits == [1, 0]
            silence = mine.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
            assert int.from_bytes(silence[:8], sys.byteorder) == native_rpc.SILENCE_S
        assert len(list(Path("/dev/fd").iterdir())) == n_open


# ---- with a real worker -----------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A worker on loopback: its endpoint and its process."""
    if not native_devices.supports_rpc():
        pytest.skip("llama-cpp-python was built without RPC")
    port = free_port()
    command = [sys.executable, "-m", "gguf_fusion", "worker", "--port", str(port), "-t", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "serving at" not in (line := process.stderr.readline()):
            assert line, "the worker ended"
        yield f"127.0.0.1:{port}", process
        process.kill()


def run(*arguments: str, prompt: str = "Name three colours.", n: int = 16) -> list[str]:
    return [
        sys.executable, "-m", "gguf_fusion", "run", prompt, "-e", S, "--temp", "0", "-n", str(n),
        "-c", "512", "-t", "1", "--offline", "--no-calibrate", *arguments,
    ]  # fmt: skip


@pytest.mark.model
@pytest.mark.rpc
def test_the_text_is_that_of_a_local_expert(worker: tuple[str, subprocess.Popen[str]]) -> None:
    """An expert whose layers lie on a worker writes the same text; the plan counts the worker's memory."""
    endpoint, _ = worker
    texts = [
        subprocess.run(run(*more), capture_output=True, text=True, check=True, timeout=120, stdin=subprocess.DEVNULL)
        for more in ((), ("--rpc", endpoint))
    ]
    assert texts[0].stdout == texts[1].stdout
    assert len(texts[0].stdout) > 10
    (device,) = native_rpc.remote_devices([endpoint])
    assert device.total_bytes > 0


@pytest.mark.model
@pytest.mark.rpc
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_is_told(worker: tuple[str, subprocess.Popen[str]], how: signal.Signals) -> None:
    """Killed in the middle of a text: one line that says so, status 1, soon; what was written stays."""
    endpoint, process = worker
    command = run("--rpc", endpoint, "--max-bytes", "100000", "--raw", prompt="1, 2, 3, 4, 5, 6, 7, 8, 9,", n=450)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stderr is not None
        first = client.stdout.read(8)
        process.send_signal(how)
        died = time.monotonic()
        errors = client.stderr.read()
        assert client.wait(timeout=30) == 1
        assert time.monotonic() - died < 20
        assert "connection to a worker broke" in errors
        assert endpoint in errors
        assert "Traceback" not in errors
        assert first


@pytest.mark.rpc
def test_a_port_in_use_is_an_error(worker: tuple[str, subprocess.Popen[str]]) -> None:
    """A second worker at the same port ends with status 1 and a remedy."""
    endpoint, _ = worker
    result = CliRunner().invoke(main, ["worker", "--port", endpoint.rpartition(":")[2]])
    assert result.exit_code == 1
    assert "choose another" in result.stderr
