"""Functions called in a process of their own, with JSON in and out.

Memory is then that of one model alone and given back for certain, and a native assertion ends only that process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from gguf_fusion.errors import LoadError

_MAIN = """
import json, sys
from importlib import import_module
from gguf_fusion.errors import GgufFusionError
module, function, arguments = json.loads(sys.argv[1])
try:
    answer = {"result": getattr(import_module(module), function)(*arguments)}
except GgufFusionError as error:
    answer = {"error": str(error)}
print(json.dumps(answer))
"""


def call(module: str, function: str, *arguments: Any) -> Any:
    """The result of ``module.function(*arguments)``. Raises LoadError with the child's reason, or how it ended."""
    command = [sys.executable, "-c", _MAIN, json.dumps([module, function, arguments])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise LoadError(
            f"the process that does it ended by {_how(done.returncode)}: {said[-1] if said else 'silently'}"
        )
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise LoadError(answer["error"])
    return answer["result"]


def _how(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
