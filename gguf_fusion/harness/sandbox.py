"""Runs a program that nobody has read, in a process of its own.

Limits: time, memory, size of files, open files; its own empty directory, no variables of the user, no packages beyond
the standard library, and no network where the system lets an ordinary user cut it (``unshare``). That keeps mistakes of
generated programs harmless; it is no jail for a determined attacker, who can still read what the user can read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TIME_S = 10.0
MEMORY_BYTES = 1 << 30
_FILE_BYTES = 1 << 20
_OPEN_FILES = 64

_LIMITS = """
import resource, runpy, sys
time, memory, file, opened = map(int, sys.argv[1:5])
for name, value in (("CPU", time), ("AS", memory), ("FSIZE", file), ("NOFILE", opened), ("CORE", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    except (ValueError, OSError):
        pass
sys.argv = [sys.argv[5]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a program ended."""

    passed: bool
    reason: str
    """``passed``, ``failed``, ``timed out``, or ``ended early`` where its last line was never reached."""
    detail: str = ""
    """The end of what it wrote to stderr."""


def run_program(source: str, *, time_s: float = TIME_S, memory_bytes: int = MEMORY_BYTES) -> Verdict:
    """Run Python code; it passes if it comes to its end without an error. Takes at most about ``time_s`` seconds."""
    done = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="gguf-fusion-", ignore_cleanup_errors=True) as folder:
        program, errors = Path(folder) / "program.py", Path(folder) / "stderr"
        # Leaving by sys.exit(0) before the last test must not count as passing it.
        end = f"\n__import__('pathlib').Path({done!r}).touch()\n"
        program.write_text(source + end, encoding="utf-8", errors="surrogateescape")
        limits = [str(int(time_s) + 1), str(memory_bytes), str(_FILE_BYTES), str(_OPEN_FILES), str(program)]
        command = [*_without_network(), sys.executable, "-I", "-S", "-B", "-c", _LIMITS, *limits]
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(time_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # children of the program too
                process.wait()
        detail = errors.read_bytes()[-2000:].decode("utf-8", "replace").strip()
        if status is None or -status == signal.SIGXCPU:
            return Verdict(passed=False, reason="timed out", detail=detail)
        if status:
            return Verdict(passed=False, reason="failed", detail=detail)
        if not (Path(folder) / done).exists():
            return Verdict(passed=False, reason="ended early", detail=detail)
        return Verdict(passed=True, reason="passed")


def cuts_network() -> bool:
    """Whether programs run without a network here."""
    return bool(_without_network())


@cache
def _without_network() -> tuple[str, ...]:
    """What precedes a command that is to run without network; nothing where the system does not allow it."""
    tool = shutil.which("unshare")
    if tool is None:
        return ()
    command = (tool, "--map-root-user", "--net")
    tried = subprocess.run([*command, sys.executable, "-I", "-S", "-c", ""], capture_output=True, check=False)
    return command if tried.returncode == 0 else ()
