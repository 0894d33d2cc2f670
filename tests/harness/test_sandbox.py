"""Programs that nobody has read: right, wrong, endless, greedy, nosy."""

from __future__ import annotations

import gzip
import json
import os
import socket
import time
from pathlib import Path

import pytest

from gguf_fusion.errors import UsageError
from gguf_fusion.harness.code_task import program, read_problems
from gguf_fusion.harness.sandbox import cuts_network, run_program

PROBLEM = {
    "task_id": "T/0",
    "prompt": "def add(a, b):\n",
    "test": "def check(f):\n    assert f(2, 3) == 5",
    "entry_point": "add",
}


@pytest.mark.parametrize(
    ("answer", "reason", "detail"),
    [
        ("    return a + b\n", "passed", ""),
        ("    return a - b\n", "failed", "AssertionError"),
        ("    return a +\n", "failed", "SyntaxError"),
        ("    import sys; sys.exit(0)\n", "ended early", ""),
        ("    import os; os._exit(0)\n", "ended early", ""),
        ("    return [0] * 10**10\n", "failed", "MemoryError"),
        ("    import os; os.kill(os.getpid(), 9)\n", "failed", ""),
        ("    import numpy\n", "failed", "ModuleNotFoundError"),
        ("    open('big', 'wb').write(bytes(10**7)); return 5\n", "failed", ""),
    ],
)
def test_programs_are_judged(answer: str, reason: str, detail: str) -> None:
    """By reaching their end, not by their exit status alone."""
    verdict = run_program(program(PROBLEM, answer))
    assert (verdict.reason, verdict.passed) == (reason, reason == "passed")
    assert detail in verdict.detail


def test_endless_programs_are_ended_with_their_children() -> None:
    """In time, and nothing goes on behind."""
    began = time.monotonic()
    source = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'while True: pass # gguf-orphan'])\n"
    verdict = run_program(source + "while True: pass\n", time_s=1.0)
    assert verdict.reason == "timed out"
    assert time.monotonic() - began < 8
    time.sleep(0.2)
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if os.access(p, os.R_OK)]
    assert not [command for command in commands if b"gguf-orphan" in command and b"pytest" not in command]


def test_programs_see_nothing_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables, an empty directory that is gone afterwards."""
    monkeypatch.setenv("SECRET", "1")
    assert run_program("import os\nassert 'SECRET' not in os.environ\nassert len(os.listdir()) == 2").passed


def test_programs_have_no_network_where_it_can_be_cut() -> None:
    """A server on this machine is out of reach exactly where the sandbox says so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        verdict = run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")
    assert verdict.passed is not cuts_network()


def test_problems_are_read_from_json_lines(tmp_path: Path) -> None:
    """Plain or compressed; a line that is none is named."""
    line = json.dumps(PROBLEM)
    plain, packed = tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"
    plain.write_text(f"{line}\n\n{line}\n")
    packed.write_bytes(gzip.compress(line.encode()))
    assert read_problems(plain) == [PROBLEM, PROBLEM]
    assert read_problems(packed) == [PROBLEM]
    for content, message in (("", "got none"), (f"{line}\n[]", r"p\.jsonl:2"), ('{"prompt": "x"}', "test")):
        plain.write_text(content)
        with pytest.raises(UsageError, match=message):
            read_problems(plain)
    with pytest.raises(UsageError, match="cannot be read"):
        read_problems(tmp_path / "absent")
