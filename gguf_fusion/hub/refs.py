"""What a reference on the command line or in Python means: a name of the registry or a source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gguf_fusion.config import ExpertSpec, Registry, Source, nearest, parse_source
from gguf_fusion.errors import UsageError


@dataclass(frozen=True, slots=True)
class Target:
    """One model to fetch or find: its sources in order of preference, and the expert they belong to, if any."""

    label: str
    sources: tuple[Source, ...]
    expert: ExpertSpec | None = None


def resolve(text: str, registry: Registry) -> tuple[Target, ...]:
    """All models behind a reference: one, or the experts of an ensemble.

    A name of the registry wins over a file of the same name; write ``./NAME`` for the file. Raises UsageError for
    an unknown name, listing the nearest.
    """
    if text in registry.ensembles:
        return tuple(of_expert(registry.experts[name]) for name in registry.ensembles[text].experts)
    if text in registry.experts:
        return (of_expert(registry.experts[text]),)
    source = parse_source(text)
    if source is None:
        known = [*registry.experts, *registry.ensembles]
        raise UsageError(
            f"{text!r} is no expert, ensemble or file, and no reference like user/repo:Q4_K_M{nearest(text, known)}"
        )
    return (Target(str(source), (source,)),)


def resolve_one(text: str, registry: Registry) -> Target:
    """The single model behind a reference. Raises UsageError for an ensemble."""
    targets = resolve(text, registry)
    if text in registry.ensembles:
        members = ", ".join(registry.ensembles[text].experts)
        raise UsageError(f"{text!r} is an ensemble; name one of its experts: {members}")
    return targets[0]


def default_name(text: str, registry: Registry) -> str:
    """The name under which a model shows up in outputs: its registry name, else its file or repository."""
    if text in registry.experts:
        return text
    source = resolve_one(text, registry).sources[0]
    stem = str(source).rsplit("/", 1)[-1].rsplit("\\", 1)[-1]
    return Path(stem).stem if stem.lower().endswith(".gguf") else stem


def of_expert(spec: ExpertSpec) -> Target:
    """The model of one expert."""
    return Target(spec.name, spec.sources, spec)
