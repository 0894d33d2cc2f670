"""How fast weights are read on this machine: measured when a file is loaded for the first time, and remembered.

Decoding one token reads all weights once, so bytes over seconds is a speed that plans can use for any number of layers.
"""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from gguf_fusion.gguf_info import read
from gguf_fusion.hub.digests import read_json, write_json
from gguf_fusion.hub.store import cache_dir
from gguf_fusion.lanes import ThreadedExpert, seconds_per_token
from gguf_fusion.plan.memory import shape_of
from gguf_fusion.plan.planner import STEP_OVERHEAD

CPU = "CPU"
"""The name of the device for layers that lie in RAM."""

_LOADS = 3
"""Loads that a speed is the best of."""

_LEAST_SECONDS = 1e-4
"""What a decode takes at least beside the fixed cost; keeps speeds finite for tiny models."""


def remembered(path: Path, device: str, n_threads: int) -> float | None:
    """Bytes per second that were measured for this file on this device, None where nothing was."""
    return _measured(path, device, n_threads)[0]


def measure(expert: ThreadedExpert, path: Path, device: str, n_threads: int) -> float:
    """Bytes per second with a few decodes: the best of the first loads of a file, since other programs only slow down.

    The expert must lie on ``device`` with all of its layers and compute with ``n_threads``.
    """
    best, n = _measured(path, device, n_threads)
    if best is not None and n >= _LOADS:
        return best
    shape = shape_of(expert.name, read(path))
    seconds = max(_LEAST_SECONDS, seconds_per_token(expert) - STEP_OVERHEAD)
    speed = max((sum(shape.layer_bytes) + shape.output_bytes) / seconds, best or 0.0)
    with suppress(OSError):  # a cache that cannot be written costs a moment at the next start
        write_json(_memory(), {**(read_json(_memory()) or {}), _key(path, device, n_threads): [speed, n + 1]})
    return speed


def _measured(path: Path, device: str, n_threads: int) -> tuple[float | None, int]:
    """(best speed so far, loads it was measured at)."""
    match (read_json(_memory()) or {}).get(_key(path, device, n_threads)):
        case [float() | int() as speed, int() as n] if speed > 0:
            return float(speed), n
    return None, 0


def _memory() -> Path:
    return cache_dir() / "speeds.json"


def _key(path: Path, device: str, n_threads: int) -> str:
    file = path.resolve()
    about = file.stat()
    facts = (
        str(file), about.st_size, about.st_mtime_ns, device, n_threads, version("llama-cpp-python"),
        platform.machine(), platform.node(),
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
