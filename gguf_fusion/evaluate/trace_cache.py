"""Traces on disk: what every expert expected at each byte of a document, computed once.

::

    <cache>/traces/<key>/meta.json     format, sizes and checksums of the other files, what the key was made of
                         laws.npy      float16[n_bytes, n_experts, 257], ln of the evaluated law (-inf: probability 0)
                         columns.npy   structured[n_bytes, n_experts], see ``trace.columns_dtype``

A trace appears by one rename, complete or not at all. It is keyed by everything that can change a number in it: model
files, settings, text, and the source code that computes it; a damaged one is computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gguf_fusion.errors import NoSpaceError
from gguf_fusion.hub.digests import read_json, write_json
from gguf_fusion.hub.store import MARGIN_BYTES, cache_dir

FORMAT = 1
PARTIAL = ".partial-"
"""How directories of unfinished work begin."""

_log = logging.getLogger(__name__)

_CODE = (
    "bridge", "cover", "experts", "kernels/masses.py", "kernels/softmax.py",
    "evaluate/lockstep.py", "evaluate/teacher.py", "evaluate/windows.py",
)  # fmt: skip
"""Parts of the package whose change makes traces stale."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One trace on disk; ``about`` is what ``adding`` was told."""

    key: str
    path: Path
    size_bytes: int
    about: Mapping[str, Any]


def root() -> Path:
    """Where traces are kept."""
    return cache_dir() / "traces"


def key_of(description: Mapping[str, Any]) -> str:
    """The key of a trace: a digest of its description and of the code that computes it."""
    facts = {"format": FORMAT, "code": code_digest(), **description}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def code_digest() -> str:
    """Digest of the sources that traces depend on, and of the native binding's version."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for part in _CODE:
        path = package / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    with suppress(PackageNotFoundError):  # table experts need no binding
        digest.update(version("llama-cpp-python").encode())
    return digest.hexdigest()[:16]


def find(key: str) -> Stored | None:
    """A complete, undamaged trace, else None; a damaged one is removed."""
    path = root() / key
    if not path.exists():
        return None
    meta = _meta(path)
    if meta is not None and all(_intact(path / name, *facts) for name, facts in meta["files"].items()):
        return _stored(path, meta)
    _log.warning("trace %s is damaged: computing it again", path)
    shutil.rmtree(path, ignore_errors=True)
    return None


@contextmanager
def adding(key: str, need_bytes: int, about: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an empty directory to write files into; afterwards it becomes the trace ``key``, or nothing on an error.

    ``about`` may still be filled inside the block. Raises NoSpaceError when ``need_bytes`` do not fit.
    """
    home = root()
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free
    if need_bytes + MARGIN_BYTES > free:
        raise NoSpaceError(str(home), need_bytes + MARGIN_BYTES, free)
    work = Path(tempfile.mkdtemp(dir=home, prefix=PARTIAL))
    try:
        yield work
        files = {file.name: [file.stat().st_size, _crc(file)] for file in sorted(work.iterdir())}
        write_json(work / "meta.json", {"format": FORMAT, "files": files, "about": about})
        try:
            work.rename(home / key)
        except OSError:  # another process was faster: its trace is the same
            if not (home / key / "meta.json").exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def stored() -> list[Stored]:
    """All complete traces, by key."""
    metas = [(path, _meta(path)) for path in sorted(root().glob("[0-9a-f]*"))]
    return [_stored(path, meta) for path, meta in metas if meta is not None]


def clear() -> tuple[int, int]:
    """Remove all traces and leftovers of killed runs; (how many traces, bytes freed)."""
    n = size = 0
    for path in list(root().glob("*")):
        if path.is_dir():
            size += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            n += not path.name.startswith(PARTIAL)
            shutil.rmtree(path, ignore_errors=True)
    return n, size


def _meta(path: Path) -> dict[str, Any] | None:
    """What a trace says about itself, None where that is no such thing."""
    meta = read_json(path / "meta.json")
    if not isinstance(meta, dict) or not isinstance(meta.get("files"), dict) or not isinstance(meta.get("about"), dict):
        return None
    facts = meta["files"].values()
    return meta if all(isinstance(one, list) and [type(v) for v in one] == [int, int] for one in facts) else None


def _stored(path: Path, meta: Mapping[str, Any]) -> Stored:
    size = sum(facts[0] for facts in meta["files"].values())
    return Stored(path.name, path, size, meta["about"])


def _intact(file: Path, size: int, checksum: int) -> bool:
    return file.is_file() and file.stat().st_size == size and _crc(file) == checksum


def _crc(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
