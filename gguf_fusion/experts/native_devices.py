"""What the native library can compute on: its own devices, and those of other machines (RPC)."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as lib
from llama_cpp._ggml import libggml

from gguf_fusion.devices import DeviceInfo, DeviceKind
from gguf_fusion.errors import LoadError, UsageError
from gguf_fusion.experts import native

RPC_BUILD = 'CMAKE_ARGS="-DGGML_RPC=on" pip install --force-reinstall --no-deps --no-cache-dir llama-cpp-python'
"""The command that installs a native library with the RPC backend."""

_KINDS = {0: DeviceKind.CPU, 1: DeviceKind.GPU, 2: DeviceKind.SHARED}
_CONNECT_SECONDS = 3.0


def devices() -> list[DeviceInfo]:
    """The devices of this machine; the CPU's entry reports free = total, so ask ``gguf_fusion.devices`` for that."""
    return [_info(handle) for handle in _own()]


def supports_gpu_offload() -> bool:
    """Whether this build can place layers on a GPU (also true for builds with nothing but RPC)."""
    native.start()
    return bool(lib.llama_supports_gpu_offload())


def supports_rpc() -> bool:
    """Whether this build has the RPC backend."""
    native.start()
    return bool(lib.llama_supports_rpc())


def commit() -> str:
    """Version and commit that the native library was built from, as far as it says."""
    version, built = (_function(name, ctypes.c_char_p) for name in ("ggml_version", "ggml_commit"))
    return f"ggml {(version() or b'').decode()} ({(built() or b'').decode() or 'unknown'})"


def remote_devices(endpoints: Sequence[str]) -> list[DeviceInfo]:
    """The devices behind ``host:port`` of each worker, with the memory they report as free. Raises LoadError."""
    return [_info(handle) for handle in _remote(endpoints)]


def device_list(endpoints: Sequence[str]) -> Any:
    """The workers' devices as llama.cpp wants them: an array of pointers that ends with NULL; None for no workers."""
    handles = _remote(endpoints)
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None) if handles else None


def serve(endpoint: str, n_threads: int) -> None:
    """Lend this machine's devices (its GPUs, or else the CPU) to other machines at ``host:port``, until interrupted.

    Whoever can reach the port can use them, and the protocol checks nothing: trusted networks only. Raises LoadError
    for a build without RPC.
    """
    check_endpoint(endpoint)
    own = _own()
    kind = _function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    lent = [handle for handle in own if kind(handle) in (1, 2)] or [handle for handle in own if kind(handle) == 0]
    array = (ctypes.c_void_p * len(lent))(*lent)
    size = ctypes.c_size_t
    start = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, size, size, ctypes.c_void_p)(
        _rpc("ggml_backend_rpc_start_server")
    )
    start(endpoint.encode(), None, n_threads, len(lent), ctypes.cast(array, ctypes.c_void_p))


def check_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port). Raises UsageError unless it reads ``host:port``."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"rpc: expected host:port such as 192.168.1.7:50052, got {endpoint!r}")
    return host, int(port)


def _remote(endpoints: Sequence[str]) -> list[Any]:
    if not endpoints:
        return []
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(_rpc("ggml_backend_rpc_add_server"))
    count = _function("ggml_backend_reg_dev_count", ctypes.c_size_t, ctypes.c_void_p)
    get = _function("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    found = []
    for endpoint in endpoints:
        # Native code ends the process where nobody answers.
        try:
            socket.create_connection(check_endpoint(endpoint), _CONNECT_SECONDS).close()
        except OSError as error:
            raise LoadError(
                f"rpc: no worker answers at {endpoint} ({error.strerror or error}); start one there: "
                f"gguf-fusion worker --host ADDRESS --port {endpoint.rpartition(':')[2]}"
            ) from error
        registered = add(endpoint.encode())
        if not registered:
            raise LoadError(f"rpc: the worker at {endpoint} has no devices to lend")
        found += [get(registered, index) for index in range(count(registered))]
    return found


def _rpc(name: str) -> int:
    """The address of a function of the RPC backend. Raises LoadError for a build without it."""
    if not supports_rpc():
        raise LoadError(
            f"rpc: the installed llama-cpp-python was built without the RPC backend; build it again: {RPC_BUILD}"
        )
    by_name = _function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)
    address = _function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    found = address(by_name(b"RPC"), name.encode())
    if not found:
        raise LoadError(f"rpc: the installed native library has no {name}; install the release that was checked")
    return int(found)


def _own() -> list[Any]:
    native.start()
    count = _function("ggml_backend_dev_count", ctypes.c_size_t)
    get = _function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return [get(index) for index in range(count())]


def _info(handle: Any) -> DeviceInfo:
    text = [
        _function(f"ggml_backend_dev_{part}", ctypes.c_char_p, ctypes.c_void_p)(handle)
        for part in ("name", "description")
    ]
    pointer = ctypes.POINTER(ctypes.c_size_t)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _function("ggml_backend_dev_memory", None, ctypes.c_void_p, pointer, pointer)(
        handle, ctypes.byref(free), ctypes.byref(total)
    )
    name, description = ((part or b"").decode("utf-8", "replace") for part in text)
    return DeviceInfo(
        name=name,
        description=description,
        kind=_KINDS.get(_function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle), DeviceKind.OTHER),
        free_bytes=free.value,
        total_bytes=total.value,
    )


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the native libraries that the binding does not declare."""
    function = libggml[name]
    function.restype, function.argtypes = result, list(arguments)
    return function
