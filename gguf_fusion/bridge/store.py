"""Disk cache for tables derived from a vocabulary: versioned, rebuilt when damaged, safe under several processes."""

from __future__ import annotations

import logging
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_fusion.bridge.tables import ByteTables, byte_tables
from gguf_fusion.hub.store import cache_dir
from gguf_fusion.vocabulary import Vocabulary

_VERSION = 1
"""Raised whenever the meaning of a stored array changes."""

_log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]


def cached_arrays(kind: str, key: str, build: Callable[[], Arrays]) -> Arrays:
    """Arrays stored under (kind, key), built and stored when absent or unreadable.

    A file appears by rename, complete or not at all; its own checksums catch later damage. Where the directory cannot
    be written the arrays are simply built again next time.
    """
    path = cache_dir() / "tables" / f"{kind}-{key}-v{_VERSION}.npz"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        _log.warning("%s is damaged (%s): building it again", path, error)
    arrays = build()
    try:
        _write(path, arrays)
    except OSError as error:
        _log.warning("%s cannot be written (%s): the tables will be built again next time", path, error.strerror)
    return arrays


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # the stub wants allow_pickle here
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def cached_byte_tables(vocabulary: Vocabulary) -> ByteTables:
    """``byte_tables(vocabulary)`` through the disk cache, keyed by the vocabulary's fingerprint."""
    names = [field.name for field in fields(ByteTables)]

    def build() -> Arrays:
        tables = byte_tables(vocabulary)
        return {name: getattr(tables, name) for name in names}

    arrays = cached_arrays("bytes", vocabulary.fingerprint, build)
    if set(names) - set(arrays):
        arrays = build()
    return ByteTables(**{name: arrays[name] for name in names})
