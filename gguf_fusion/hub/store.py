"""The directory where gguf-fusion keeps what it fetched itself: locks, unfinished work, finished files.

::

    <cache>/models/<key>/<file>.gguf    complete files only: they arrive by rename
    <cache>/partial/<key>/…             unfinished work, worthless without its lock
    <cache>/locks/<key>.lock            held while <key> is fetched
    <cache>/refs/<key>.json             what a Hugging Face reference led to (the files live in its own cache)

A killed process can leave things only under ``partial``; the next pull removes them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from gguf_fusion.errors import HubError, NoSpaceError
from gguf_fusion.hub.progress import Progress

MARGIN_BYTES = 64 << 20
"""Kept free beyond what a download needs, so that it never fills the disk to the last byte."""
CHUNK_BYTES = 1 << 20


def cache_dir() -> Path:
    """``$GGUF_FUSION_CACHE`` or the user's cache directory."""
    chosen = os.environ.get("GGUF_FUSION_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(platformdirs.user_cache_dir("gguf-fusion", appauthor=False))


def key_of(*parts: str) -> str:
    """A short directory name for something that is identified by ``parts``."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def model_path(key: str, file: str) -> Path:
    """Where the finished file lies (or would)."""
    return cache_dir() / "models" / key / file


@contextmanager
def exclusive(key: str, label: str, progress: Progress) -> Iterator[Path]:
    """Hold the lock of ``key`` and yield an empty working directory on the file system of the finished files.

    Waits while another process works on the same key. Unfinished work whose process has died is removed first.
    """
    root = cache_dir()
    try:
        (root / "locks").mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(root / "locks" / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            progress.note(f"waiting for another pull of {label}")
            lock.acquire()
    except OSError as error:
        raise HubError(f"the cache {root} cannot be written ({error.strerror}); set GGUF_FUSION_CACHE") from error
    try:
        _remove_dead_work(root, key)
        home = root / "partial" / key
        home.mkdir(parents=True, exist_ok=True)
        # A fresh name inside: a child of a killed process may still write into the old one.
        work = Path(tempfile.mkdtemp(dir=home))
        try:
            yield work
        finally:
            shutil.rmtree(home, ignore_errors=True)
    finally:
        lock.release()


def _remove_dead_work(root: Path, own_key: str) -> None:
    for home in (root / "partial").glob("*"):
        if home.name == own_key:
            shutil.rmtree(home, ignore_errors=True)
            continue
        lock = filelock.FileLock(root / "locks" / f"{home.name}.lock")
        try:
            lock.acquire(timeout=0)
        except (filelock.Timeout, OSError):
            continue
        try:
            shutil.rmtree(home, ignore_errors=True)
        finally:
            lock.release()


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise NoSpaceError unless the disk of ``folder`` (which need not exist) can take so much and a margin."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + MARGIN_BYTES:
        raise NoSpaceError(str(folder), needed_bytes + MARGIN_BYTES, free)


@contextmanager
def disk_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn a disk that fills up meanwhile, or a refused write, into an error of ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder if folder.exists() else cache_dir()).free
            raise NoSpaceError(str(folder), needed_bytes, free) from error
        raise HubError(f"writing to {folder} failed: {error.strerror or error}") from error


def publish(partial: Path, target: Path) -> None:
    """Move a complete, synced file to its final name in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.replace(target)
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remember(reference: str, facts: dict[str, Any]) -> None:
    """Store what a reference led to, so that it is found again without a network."""
    target = cache_dir() / "refs" / f"{key_of(reference)}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"reference": reference, **facts}, file)
    Path(name).replace(target)


def recall(reference: str) -> dict[str, Any] | None:
    """What ``remember`` stored, or None."""
    return _read_facts(cache_dir() / "refs" / f"{key_of(reference)}.json")


def forget(reference: str) -> None:
    """Drop what ``remember`` stored."""
    (cache_dir() / "refs" / f"{key_of(reference)}.json").unlink(missing_ok=True)


def remembered() -> list[dict[str, Any]]:
    """Everything stored by ``remember``."""
    found = (_read_facts(path) for path in sorted((cache_dir() / "refs").glob("*.json")))
    return [facts for facts in found if facts is not None]


def _read_facts(path: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent or damaged: as if never stored
        return None
    return facts if isinstance(facts, dict) and isinstance(facts.get("reference"), str) else None
