"""Modules import only what lies below them, and heavy packages have one door each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_import_contracts_hold() -> None:
    """``lint-imports`` accepts the package; without import-linter this is left to CI."""
    beside = Path(sys.executable).with_name("lint-imports")
    tool = str(beside) if beside.is_file() else shutil.which("lint-imports")
    if tool is None:
        pytest.skip("import-linter is not installed; it comes with the extra dev")
    place = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([tool, "--no-cache"], check=False, cwd=ROOT, capture_output=True, text=True, env=place)
    assert result.returncode == 0, result.stdout


def test_modules_are_short() -> None:
    """No module is longer than 400 lines, no kernel longer than 200."""
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "gguf_fusion").rglob("*.py")
    }
    assert {path: n for path, n in lengths.items() if n > (200 if "kernels" in path.parts else 400)} == {}
