"""Where a record comes from: the keys under which every measurement names its machine and what ran on it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from gguf_fusion import __version__


def cpu() -> str:
    """The processor's name, or its kind where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


ORIGIN = {
    "version": __version__,
    "llama_cpp_python": version("llama-cpp-python"),
    "machine": platform.machine(),
    "cpu": cpu(),
    "cores": os.cpu_count(),
}
