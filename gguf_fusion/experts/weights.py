"""Models that several experts share: the same file, placed in the same way, is loaded once per process."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path

from gguf_fusion.experts import native, native_rpc

_lock = threading.Lock()
_users: dict[tuple[object, ...], tuple[native.Model, int]] = {}
"""What decides about a model -> (model, number of its users)."""
_returned: deque[native.Model] = deque()
"""Given back, and not counted yet: the garbage collector may give one back in the middle of ``borrow``."""


def borrow(
    path: Path,
    *,
    n_gpu_layers: int = 0,
    use_extra_bufts: bool = False,
    rpc: tuple[str, ...] = (),
    tensor_split: tuple[float, ...] = (),
) -> native.Model:
    """A model of the file; the one in use already, if there is one. Give it back with ``give_back``.

    Weights are mapped from the file, and read only: every expert has a context, and so a cache, of its own.
    Raises LoadError with the native reason.
    """
    about = path.stat()
    key = (os.getpid(), path.resolve(), about.st_size, about.st_mtime_ns, n_gpu_layers, use_extra_bufts, rpc,
           tensor_split)  # fmt: skip
    with _lock:
        model, users = _users.get(key, (None, 0))
        if model is None:
            with native_rpc.guarded(rpc):
                model = native.Model(
                    path,
                    n_gpu_layers=n_gpu_layers,
                    use_extra_bufts=use_extra_bufts,
                    devices=native_rpc.device_list(rpc),
                    tensor_split=tensor_split,
                )
        _users[key] = (model, users + 1)
    _settle()
    return model


def give_back(model: native.Model) -> None:
    """Free the model if nobody else uses it; where another thread is loading one, as soon as that is done."""
    _returned.append(model)
    _settle()


def in_use() -> int:
    """How many different models are loaded."""
    return len(_users)


def _settle() -> None:
    while _returned and _lock.acquire(blocking=False):
        try:
            _count_down(_returned.popleft())
        finally:
            _lock.release()


def _count_down(model: native.Model) -> None:
    key = next((key for key, (known, _) in _users.items() if known is model), None)
    users = 0 if key is None else _users[key][1] - 1
    if key is not None and users:
        _users[key] = (model, users)
        return
    if key is not None:
        del _users[key]
    model.close()
