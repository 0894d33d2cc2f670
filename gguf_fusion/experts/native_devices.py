"""What the native library of this machine can compute on."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as lib
from llama_cpp._ggml import libggml

from gguf_fusion.devices import DeviceInfo, DeviceKind
from gguf_fusion.experts import native

_KINDS = {0: DeviceKind.CPU, 1: DeviceKind.GPU, 2: DeviceKind.SHARED}


def devices() -> list[DeviceInfo]:
    """The devices of this machine; the CPU's entry reports free = total, so ask ``gguf_fusion.devices`` for that."""
    return [info(handle) for handle in _own()]


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
    version, built = (function(name, ctypes.c_char_p) for name in ("ggml_version", "ggml_commit"))
    return f"ggml {(version() or b'').decode()} ({(built() or b'').decode() or 'unknown'})"


def lendable() -> list[Any]:
    """Native handles of what a worker lends: this machine's GPUs, or the CPU where there are none."""
    own = [(handle, info(handle).kind) for handle in _own()]
    cards = [handle for handle, kind in own if kind in (DeviceKind.GPU, DeviceKind.SHARED)]
    return cards or [handle for handle, kind in own if kind is DeviceKind.CPU]


def info(handle: Any) -> DeviceInfo:
    """What the native library says about a device."""
    text = [
        function(f"ggml_backend_dev_{part}", ctypes.c_char_p, ctypes.c_void_p)(handle)
        for part in ("name", "description")
    ]
    pointer = ctypes.POINTER(ctypes.c_size_t)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    function("ggml_backend_dev_memory", None, ctypes.c_void_p, pointer, pointer)(
        handle, ctypes.byref(free), ctypes.byref(total)
    )
    name, description = ((part or b"").decode("utf-8", "replace") for part in text)
    return DeviceInfo(
        name=name,
        description=description,
        kind=_KINDS.get(function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle), DeviceKind.OTHER),
        free_bytes=free.value,
        total_bytes=total.value,
    )


def function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the native libraries that the binding does not declare."""
    found = libggml[name]
    found.restype, found.argtypes = result, list(arguments)
    return found


def _own() -> list[Any]:
    native.start()
    count = function("ggml_backend_dev_count", ctypes.c_size_t)
    get = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return [get(index) for index in range(count())]
