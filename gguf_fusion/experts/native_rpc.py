"""Devices of other machines, through llama.cpp's own RPC backend; and lending those of this machine.

The protocol checks nothing and encrypts nothing: whoever reaches a worker's port can use, and probably take over, its
process. Trusted networks only.

Where a connection breaks, the native library ends its process. A callback turns that into a message and exit status 1
(``os._exit``: nothing in Python can go on from there), and every connection gets time limits, so that a machine that
has vanished breaks it at all.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gguf_fusion.devices import DeviceInfo
from gguf_fusion.errors import LoadError, UsageError
from gguf_fusion.experts import native_devices
from gguf_fusion.experts.native_devices import function

RPC_BUILD = 'CMAKE_ARGS="-DGGML_RPC=on" pip install --force-reinstall --no-deps --no-cache-dir llama-cpp-python'
"""The command that installs a native library with the RPC backend."""

ANSWER_S = 5.0
"""How long a worker may take to accept a connection and to say hello."""

SILENCE_S = 300
"""How long a worker may compute without a word before it counts as dead."""

_PEER_GONE_S = 30
_PROTOCOL = 7
_HELLO, _CAPABILITIES = 14, 24
"""Number of the command, and bytes of capabilities that it carries both ways."""

_abort_callback: Any = None
_in_use: set[str] = set()


def remote_devices(endpoints: Sequence[str]) -> list[DeviceInfo]:
    """The devices behind ``host:port`` of each worker, with the memory they report as free. Raises LoadError."""
    return [native_devices.info(handle) for handle in _remote(endpoints)]


def device_list(endpoints: Sequence[str]) -> Any:
    """The workers' devices as llama.cpp wants them: an array of pointers that ends with NULL; None for no workers."""
    handles = _remote(endpoints)
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None) if handles else None


@contextmanager
def guarded(endpoints: Sequence[str]) -> Iterator[None]:
    """Connections to these workers that appear inside of the block get time limits, for as long as they live."""
    if not endpoints:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            _limit(endpoints)

    thread = threading.Thread(target=watch, name="rpc time limits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _limit(endpoints)


def serve(endpoint: str, n_threads: int) -> None:
    """Lend this machine's devices (its GPUs, or else the CPU) to one client at a time, until the process ends.

    Raises LoadError for a build without RPC, and where nobody can listen at ``endpoint``.
    """
    host, port = check_endpoint(endpoint)
    start = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)(
        _address("ggml_backend_rpc_start_server")
    )
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise LoadError(
            f"nobody can listen at {endpoint} ({error.strerror or error}); choose another --port"
        ) from error
    lent = native_devices.lendable()
    array = (ctypes.c_void_p * len(lent))(*lent)
    start(endpoint.encode(), None, n_threads, len(lent), ctypes.cast(array, ctypes.c_void_p))
    raise LoadError(f"the native library stopped serving at {endpoint}; its own lines above say why")


def check_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port). Raises UsageError unless it reads ``host:port``."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"rpc: expected host:port such as 192.168.1.7:50052, got {endpoint!r}")
    return host, int(port)


def _remote(endpoints: Sequence[str]) -> list[Any]:
    if not endpoints:
        return []
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(_address("ggml_backend_rpc_add_server"))
    count = function("ggml_backend_reg_dev_count", ctypes.c_size_t, ctypes.c_void_p)
    get = function("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _explain_deaths()
    found: list[Any] = []
    for endpoint in endpoints:
        _ask(endpoint)
        _in_use.add(endpoint)
        registered = add(endpoint.encode())
        if not registered:
            raise LoadError(f"rpc: the worker at {endpoint} has no devices to lend")
        found += [get(registered, index) for index in range(count(registered))]
    return found


def _ask(endpoint: str) -> None:
    """Say hello in Python first: native code waits for ever for a busy worker, and dies where nobody answers."""
    address = check_endpoint(endpoint)
    if open_already := _connections([address]):
        for copy in open_already:
            copy.close()
        return  # this process is its client already
    start = f"start one there: gguf-fusion worker --host ADDRESS --port {address[1]}"
    try:
        with socket.create_connection(address, ANSWER_S) as connection:
            connection.settimeout(ANSWER_S)
            connection.sendall(struct.pack("<BQ", _HELLO, _CAPABILITIES) + bytes(_CAPABILITIES))
            answer = b""
            while len(answer) < 9 and (part := connection.recv(64)):
                answer += part
    except TimeoutError as error:
        raise LoadError(
            f"rpc: the worker at {endpoint} does not answer within {ANSWER_S:.0f} seconds; it serves one client at a "
            f"time, so another one may be using it"
        ) from error
    except OSError as error:
        raise LoadError(f"rpc: no worker answers at {endpoint} ({error.strerror or error}); {start}") from error
    if len(answer) < 9 or struct.unpack_from("<Q", answer)[0] != 4 + _CAPABILITIES:
        raise LoadError(f"rpc: what answers at {endpoint} is no worker of this release; {start}")
    if answer[8] != _PROTOCOL:
        raise LoadError(
            f"rpc: the worker at {endpoint} speaks version {answer[8]} of the protocol, this machine {_PROTOCOL}; "
            f"install the same llama-cpp-python on both"
        )
    time.sleep(0.05)  # until the worker has noticed that this connection is closed


def _limit(endpoints: Sequence[str]) -> None:
    """Give connections to the workers limits after which the system breaks them."""
    for connection in _connections([check_endpoint(endpoint) for endpoint in endpoints]):
        with connection, suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (
                ("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4),
                ("TCP_USER_TIMEOUT", 1000 * _PEER_GONE_S),
            ):  # fmt: skip
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SILENCE_S, 0))


def _connections(addresses: Sequence[tuple[str, int]]) -> list[socket.socket]:
    """Copies of the connections that this process has to these addresses. Close them; the connections stay open."""
    wanted = set()
    for host, port in addresses:
        with suppress(OSError):
            wanted |= {entry[4][:2] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    found = []
    for file in Path("/dev/fd").iterdir():
        with suppress(OSError, ValueError):
            number = int(file.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(number))
            if copy.family in (socket.AF_INET, socket.AF_INET6) and _peer(copy) in wanted:
                found.append(copy)
            else:
                copy.close()
    return found


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    try:
        host, port, *_ = connection.getpeername()
    except OSError:  # it listens
        return None
    return host, port


def _explain_deaths() -> None:
    """Have the native library say why it ends the process, in one line and with exit status 1."""
    global _abort_callback
    if _abort_callback is None:

        def explain(message: bytes) -> None:
            if b"RPC" not in message:
                os.write(2, message + b"\n")
                return
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            workers = ", ".join(sorted(_in_use))
            os.write(
                2,
                f"\nerror: the connection to a worker broke ({workers}): it ended, ran out of memory or cannot be "
                f"reached; start it again there (gguf-fusion worker), then this command\n".encode(),
            )
            os._exit(1)

        # A reference is kept: native code calls it as long as the process lives.
        _abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(explain)
        function("ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p)(
            ctypes.cast(_abort_callback, ctypes.c_void_p)
        )


def _address(name: str) -> int:
    """The address of a function of the RPC backend. Raises LoadError for a build without it."""
    if not native_devices.supports_rpc():
        raise LoadError(
            f"rpc: the installed llama-cpp-python was built without the RPC backend; build it again: {RPC_BUILD}"
        )
    by_name = function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)
    address = function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    found = address(by_name(b"RPC"), name.encode())
    if not found:
        raise LoadError(f"rpc: the installed native library has no {name}; install the release that was checked")
    return int(found)
