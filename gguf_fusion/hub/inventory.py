"""What has been fetched, and deleting it."""

from __future__ import annotations

import shutil
from pathlib import Path

from gguf_fusion.config import HubSource, PathSource, Registry, UrlSource, WheelSource, parse_source
from gguf_fusion.hub import refs, store
from gguf_fusion.hub.obtain import Found, local_paths, memo


def fetched(target: refs.Target) -> list[Found]:
    """Every fetched copy of a model, one per source. Files that the user keeps elsewhere are not ours to count."""
    sources = [source for source in target.sources if not isinstance(source, PathSource)]
    return [Found(target, source, paths) for source in sources if (paths := local_paths(source))]


def fetched_outside(registry: Registry) -> list[Found]:
    """Models fetched by a reference that belongs to no expert of the registry."""
    of_experts = {str(source) for spec in registry.experts.values() for source in spec.sources}
    found = []
    for facts in store.remembered():
        label = str(facts["reference"]).partition(":")[2]
        source = parse_source(label)
        if label in of_experts or not isinstance(source, (HubSource, UrlSource)):
            continue
        paths = local_paths(source)
        if paths:
            found.append(Found(refs.Target(label, (source,)), source, paths))
    return found


def remove(found: Found) -> int:
    """Delete a fetched model; returns the bytes freed."""
    if isinstance(found.source, HubSource):
        from gguf_fusion.hub import huggingface

        freed = sum(huggingface.remove(path) for path in found.paths)
        store.forget(memo(found.source))
        return freed
    if isinstance(found.source, (WheelSource, UrlSource)):
        freed = found.size_bytes
        for path in found.paths:
            _remove_own(path)
        store.forget(memo(found.source))
        return freed
    return 0


def _remove_own(path: Path) -> None:
    """The file with its directory, which holds nothing else."""
    path.unlink(missing_ok=True)
    shutil.rmtree(path.parent, ignore_errors=True)
