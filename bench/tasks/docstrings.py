"""Documents for the tasks beside this file: what Python's own modules say of their functions.

Nothing is downloaded: the texts are those of the Python that runs the evaluation.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from datasets import Dataset

MODULES = ("argparse", "bisect", "csv", "heapq", "inspect", "json", "os", "pathlib", "random", "shutil", "statistics")
N_CHOICES = 4


def texts(**_: Any) -> dict[str, Dataset]:
    """The docstrings themselves, for ``docstrings_text``."""
    return {"test": Dataset.from_list([{"text": text} for _, text in _found()])}


def choices(**_: Any) -> dict[str, Dataset]:
    """A function's name, and first lines of docstrings of which one is its own, for ``docstrings_choice``."""
    found = [(name, text.partition("\n")[0]) for name, text in _found()]
    rows = []
    for i in range(len(found)):
        wrong = [found[(i + k * 7) % len(found)][1] for k in range(1, N_CHOICES)]
        options = [*wrong[: i % N_CHOICES], found[i][1], *wrong[i % N_CHOICES :]]
        rows.append({"name": found[i][0], "options": options, "answer": i % N_CHOICES})
    return {"test": Dataset.from_list(rows)}


def _found() -> list[tuple[str, str]]:
    return [(name, text) for module in MODULES for name, text in _of_module(module)]


def _of_module(module: str) -> Iterator[tuple[str, str]]:
    for name, value in sorted(vars(importlib.import_module(module)).items()):
        if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != module:
            continue
        text = inspect.getdoc(value)
        if text and len(text) > 40:
            yield f"{module}.{name}", text
