"""What has been fetched, and deleting it."""

from __future__ import annotations

import shutil
from pathlib import Path

from gguf_fusion.config import HubSource, PathSource, Registry, UrlSource, parse_source
from gguf_fusion.errors import HubError
from gguf_fusion.hub import refs, store
from gguf_fusion.hub.obtain import Found, local_paths, memo


def fetched(target: refs.Target) -> list[Found]:
    """Every fetched copy of a model, one per source. Files that the user keeps elsewhere are not ours to count."""
    sources = [source for source in target.sources if not isinstance(source, PathSource) or _is_own(source.path)]
    return [Found(target, source, paths) for source in sources if (paths := local_paths(source))]


def fetched_outside(registry: Registry) -> list[Found]:
    """Models fetched by a reference, or for an expert that has since left the registry."""
    of_experts = [source for spec in registry.experts.values() for source in spec.sources]
    known = {str(source) for source in of_experts}
    found = []
    for facts in store.remembered():
        label = str(facts["reference"]).partition(":")[2]
        source = parse_source(label)
        if label not in known and isinstance(source, (HubSource, UrlSource)) and (paths := local_paths(source)):
            found.append(Found(refs.Target(label, (source,)), source, paths))
    listed = {path for item in found for path in item.paths}
    listed |= {path for source in of_experts if not isinstance(source, HubSource) for path in local_paths(source)}
    for path in sorted((store.cache_dir() / "models").glob("*/*.gguf")):
        if path not in listed:
            stray = PathSource(path)
            found.append(Found(refs.Target(str(path), (stray,)), stray, (path,)))
    return found


def remove(found: Found) -> int:
    """Delete a fetched model; returns the bytes freed."""
    if isinstance(found.source, HubSource):
        from gguf_fusion.hub import huggingface

        freed = sum(huggingface.remove(path) for path in found.paths)
        store.forget(memo(found.source))
        return freed
    freed = found.size_bytes
    for path in found.paths:
        if not _is_own(path):
            raise HubError(f"{path} was not fetched by gguf-fusion; delete it yourself if you want to")
        path.unlink(missing_ok=True)
        shutil.rmtree(path.parent, ignore_errors=True)  # it holds nothing else
    store.forget(memo(found.source))
    return freed


def _is_own(path: Path) -> bool:
    return path.is_relative_to(store.cache_dir() / "models")
