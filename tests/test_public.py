"""What ``import gguf_fusion`` offers, and what it leaves alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import gguf_fusion

HEAVY = ("numpy", "numba", "llama_cpp", "huggingface_hub", "httpx2", "click", "jinja2", "psutil", "tqdm")


def child(code: str) -> str:
    """Output of a fresh interpreter that finds the package where this one did."""
    place = str(Path(gguf_fusion.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": place},
    ).stdout


def test_importing_the_package_loads_nothing_heavy() -> None:
    """A fresh interpreter has none of the heavy packages after ``import gguf_fusion``."""
    loaded = child(f"import sys, gguf_fusion; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_records_and_errors_need_no_native_code() -> None:
    """Reading traces and catching errors is possible without the native library and without compiling."""
    code = (
        "import sys; from gguf_fusion import GgufFusionError, PieceView, SamplingParams, read_trace;"
        "print([m for m in ('numba', 'llama_cpp', 'huggingface_hub', 'click') if m in sys.modules])"
    )
    assert child(code).strip() == "[]"


@pytest.mark.parametrize("name", gguf_fusion.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    """What ``__all__`` promises is there."""
    assert getattr(gguf_fusion, name) is not None
    assert name in dir(gguf_fusion)


def test_type_checkers_see_the_same_names() -> None:
    """The imports for type checkers and the lazy ones name the same things in the same places."""
    tree = ast.parse(Path(gguf_fusion.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert seen == {name: f"gguf_fusion.{home}" for name, home in gguf_fusion._HOME_OF.items()}


def test_every_error_is_public() -> None:
    """Whatever is raised on purpose can be caught by a public name."""
    from gguf_fusion import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes <= set(gguf_fusion.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    """A name that does not exist is reported the usual way."""
    with pytest.raises(AttributeError, match="no attribute 'Ensembel'"):
        _ = gguf_fusion.Ensembel


def test_the_command_is_installed() -> None:
    """Where the package is installed, ``gguf-fusion`` is a command."""
    found = entry_points(group="console_scripts", name="gguf-fusion")
    if not found:
        pytest.skip("run from a source tree that is not installed")
    assert {entry.value for entry in found} == {"gguf_fusion.cli:main"}
