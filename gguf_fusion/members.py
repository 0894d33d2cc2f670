"""Members of an ensemble to be: which expert, fetched by which reference, with which weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gguf_fusion import hub
from gguf_fusion.chat import NO_TEMPLATE
from gguf_fusion.config import EnsembleSpec, ExpertSpec, Registry, check_known
from gguf_fusion.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One expert of an ensemble to be: its specification, the reference it is fetched by, and its weight."""

    spec: ExpertSpec
    ref: str
    weight: float


def members_of(spec: EnsembleSpec, registry: Registry, weights: Sequence[float] | None = None) -> list[Member]:
    """The members of a registered ensemble, with other weights if given."""
    chosen = checked_weights(spec.weights if weights is None else weights, len(spec.experts))
    return [
        Member(spec=registry.expert(name), ref=name, weight=weight)
        for name, weight in zip(spec.experts, chosen, strict=True)
    ]


def members_from(
    refs: Sequence[str | Path], registry: Registry, weights: Sequence[float] | None = None
) -> list[Member]:
    """Members from names of experts, references and paths; the same one twice gets two names."""
    if not refs:
        raise UsageError("expected at least one expert (a name, user/repo:QUANT or a path), got none")
    chosen = checked_weights([1.0] * len(refs) if weights is None else weights, len(refs))
    members: list[Member] = []
    for ref, weight in zip(map(str, refs), chosen, strict=True):
        target = hub.resolve_one(ref, registry)
        name = hub.default_name(ref, registry)
        spec = target.expert or ExpertSpec(name=name, sources=target.sources)
        n_same = sum(member.spec.name.partition("#")[0] == name for member in members)
        if n_same:
            spec = replace(spec, name=f"{name}#{n_same + 1}")
        members.append(Member(spec=spec, ref=ref, weight=weight))
    return members


def with_templates(members: Sequence[Member], templates: Mapping[str, str | Path]) -> list[Member]:
    """The members, those named in ``templates`` with other ones. Raises UsageError for a name that none has."""
    check_known("template: expert", templates, {member.spec.name: None for member in members})
    chosen = {name: NO_TEMPLATE if file == NO_TEMPLATE else Path(file) for name, file in templates.items()}
    return [replace(m, spec=replace(m.spec, template=chosen.get(m.spec.name, m.spec.template))) for m in members]


def checked_weights(weights: Sequence[float], n: int) -> tuple[float, ...]:
    """``n`` weights, finite, not negative, with a positive sum. Raises UsageError."""
    values = [float(weight) for weight in weights]
    if len(values) != n:
        raise UsageError(f"weights: expected {n}, one per expert, got {len(values)}")
    if not all(math.isfinite(value) and value >= 0.0 for value in values):
        raise UsageError(f"weights: expected finite numbers that are not negative, got {values}")
    if sum(values) <= 0.0:
        raise UsageError("weights: they sum to zero; at least one expert needs a positive weight")
    return tuple(values)
