"""SHA-256 of model files, remembered; and small JSON files that appear by one rename."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf_fusion.gguf_info import shard_paths
from gguf_fusion.hub.store import cache_dir, sha256_of


def model_digest(path: Path) -> str:
    """SHA-256 over all shards of a model file, remembered by name, size and time of change."""
    memory = cache_dir() / "digests.json"
    shards = [shard.resolve() for shard in shard_paths(path)]
    facts = {str(s): [s.stat().st_size, s.stat().st_mtime_ns] for s in shards}
    known = read_json(memory) or {}
    name = json.dumps(facts, sort_keys=True)
    found = known.get(name)
    if not isinstance(found, str):
        parts = [sha256_of(shard) for shard in shards]
        found = parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()
        write_json(memory, {**known, name: found})
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none or it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".json.partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
