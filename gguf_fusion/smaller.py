"""Smaller quants of the experts, where the usual ones do not fit and the user allows it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gguf_fusion import hub
from gguf_fusion.config import ExpertSpec, Registry, Source
from gguf_fusion.errors import ConfigError, NotCachedError
from gguf_fusion.gguf_info import read
from gguf_fusion.members import Member
from gguf_fusion.placement import budget_now, pools_of, request_of
from gguf_fusion.plan.memory import Shape, bits_per_weight, guessed, scaled, shape_of, size_by_name
from gguf_fusion.plan.planner import GPU_MARGIN, Budget, Plan, Request, plan

_log = logging.getLogger(__name__)

_USUAL_BITS = 4.8
"""Bits per weight of a file that does not say."""


def path_of(member: Member, registry: Registry) -> Path | None:
    """The member's file, if it is on this machine."""
    try:
        return hub.locate(member.ref, registry)
    except NotCachedError:
        return None


def shape_before_pull(spec: ExpertSpec, path: Path | None) -> Shape:
    """From the header of the file; guessed from its size or name where it is not on this machine yet."""
    if path is not None:
        return shape_of(spec.name, read(path))
    size = next((source.size_bytes for source in spec.sources if source.size_bytes), None)
    return guessed(spec.name, size or size_by_name(" ".join((spec.name, *map(str, spec.sources)))))


def offers(member: Member, shape: Shape) -> list[tuple[Source, Shape]]:
    """The quants that the registry lists for an expert and that are smaller than its usual one, with their shapes.

    An expert that was named twice, or by a path, keeps its file.
    Raises ConfigError for one of unknown size, ModelFileError for a path without a file.
    """
    if member.ref != member.spec.name:
        return []
    found = [(source, _shape_of_quant(member, source, shape)) for source in member.spec.smaller]
    return [(source, one) for source, one in found if one.weights < shape.weights]


def plan_with_smaller(
    members: Sequence[Member], shapes: Sequence[Shape], budget: Budget, request: Request, *, allowed: bool
) -> Plan:
    """``planner.plan``, with the smaller quants of the registry where they are allowed; a remedy where they are not."""
    offered = {
        member.spec.name: [quant for _, quant in offers(member, shape)]
        for member, shape in zip(members, shapes, strict=True)
    }
    made = plan(shapes, budget, request, offered if allowed else None)
    if made.fits or allowed or not any(offered.values()):
        return made
    other = plan(shapes, budget, request, offered)
    if not other.fits or not other.smaller:
        return made
    remedy = (
        f"smaller quants of {', '.join(other.smaller)} that the registry lists fit: allow them"
        " (plan: --allow-smaller-quants, run: --smaller-quants)"
    )
    return replace(made, remedies=(*made.remedies, remedy))


def sources_taken(members: Sequence[Member], shapes: Sequence[Shape], made: Plan) -> dict[str, Source]:
    """Where the smaller quants of a plan come from, by expert. ``shapes``: those of the usual files."""
    pairs = zip(members, shapes, strict=True)
    listed = {member.spec.name: offers(member, shape) for member, shape in pairs if member.spec.name in made.smaller}
    return {name: listed[name][i][0] for name, i in made.smaller.items()}


def choose(
    members: Sequence[Member], registry: Registry | None, *, margin: float = GPU_MARGIN, calibrated: bool = True
) -> tuple[list[Member], Registry]:
    """Members and registry with smaller quants of those that would not fit into what is free now, told in the log.

    Both as they were where everything fits, or where nothing would.
    """
    registry = registry or Registry.load()
    paths = {member.spec.name: path for member in members if (path := path_of(member, registry)) is not None}
    specs = [member.spec for member in members]
    shapes = [shape_before_pull(spec, paths.get(spec.name)) for spec in specs]
    budget = budget_now(pools_of(specs), margin=margin)
    request = request_of(specs, paths, calibrated=calibrated, cores=budget.cores)
    made = plan_with_smaller(members, shapes, budget, request, allowed=True)
    if not made.fits or not made.smaller:
        return list(members), registry
    experts, changed = dict(registry.experts), {member.spec.name: member for member in members}
    for name, source in sources_taken(members, shapes, made).items():
        _log.warning("expert %r would not fit beside the others: its smaller quant %s is taken", name, source)
        experts[name] = replace(changed[name].spec, sources=(source,), smaller=())
        changed[name] = replace(changed[name], spec=experts[name])
    return list(changed.values()), Registry(experts, registry.ensembles)


def _shape_of_quant(member: Member, source: Source, shape: Shape) -> Shape:
    name = member.spec.name
    path = path_of(member, Registry({name: replace(member.spec, sources=(source,))}, {}))
    if path is not None:
        return shape_of(name, read(path))
    bits = bits_per_weight(str(source))
    if source.size_bytes is None and bits is None:
        raise ConfigError(f"expert {name!r}: the size of its smaller quant {source} is unknown; give 'size' in bytes")
    usual = bits_per_weight(" ".join(map(str, member.spec.sources))) or _USUAL_BITS
    return scaled(shape, source.size_bytes or int(shape.weights * (bits or usual) / usual))
