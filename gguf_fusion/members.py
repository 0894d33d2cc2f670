"""Members of an ensemble to be: which expert, fetched by which reference, with which weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf_fusion import hub
from gguf_fusion.chat import NO_TEMPLATE
from gguf_fusion.config import EnsembleSpec, ExpertSpec, Registry, check_known
from gguf_fusion.errors import ModelFileError, UsageError
from gguf_fusion.hub.digests import model_digest
from gguf_fusion.hub.store import sha256_of
from gguf_fusion.router.head import Head


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


def with_router(members: Sequence[Member], head: Head, registry: Registry | None) -> list[Member]:
    """The members, and the router's own expert where it is not one of them; that one keeps its file.

    Raises UsageError for missing experts.
    """
    names = [member.spec.name for member in members]
    missing = [name for name in head.experts if name not in names]
    if missing:
        raise UsageError(
            f"the router was trained for {', '.join(head.experts)}; {missing[0]} is not among the experts "
            f"({', '.join(names)})"
        )
    read = list(members)
    if head.router not in names:
        read.append(router_member(head.router, head.card.get("lora"), registry or Registry.load()))
    return [replace(one, spec=replace(one.spec, smaller=())) if one.spec.name == head.router else one for one in read]


def router_member(name: str, lora: Mapping[str, Any] | None, registry: Registry) -> Member:
    """The router's own expert. ``lora``: its adapter as a router's card has it: ``base`` (a reference), ``path``.

    Raises UsageError where the adapter is not the one that the card names by ``sha256``.
    """
    if lora is None:
        return members_from([name], registry)[0]
    path = Path(lora["path"])
    if not path.is_file() or sha256_of(path) != lora["sha256"]:
        raise UsageError(f"the router computes with the LoRA adapter {path}, which is missing or was changed")
    base = members_from([lora["base"]], registry)[0]
    return replace(base, spec=replace(base.spec, name=name, lora=path))


def check_router(head: Head, path: Path) -> None:
    """Raise ModelFileError unless the file is the one that the router was trained with."""
    if model_digest(path) != head.router_sha256:
        raise ModelFileError(
            f"{path} is not the file of {head.router} that the router was trained with; train it again with this one"
        )
