"""Where the experts of an ensemble are to lie, from what is free on this machine and on workers now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gguf_fusion import calibration
from gguf_fusion.config import ExpertSpec
from gguf_fusion.devices import DeviceInfo, DeviceKind, by_preference, free_ram_bytes, usable_cores
from gguf_fusion.errors import LoadError
from gguf_fusion.experts import native_devices, native_rpc
from gguf_fusion.gguf_info import read
from gguf_fusion.plan.memory import Shape, shape_of
from gguf_fusion.plan.planner import GPU_MARGIN, OWN, Budget, Plan, Request, place, plan

_log = logging.getLogger(__name__)

_Expert = TypeVar("_Expert")

_TIGHT = 200_000_000
"""Bytes that a card should have left after loading."""

_AT_MOST = 0.75
"""Share of the layers that failed which the retry asks for at most: the estimate was wrong there."""


def own_cards() -> list[DeviceInfo]:
    """GPUs of this machine with memory of their own, most of it first; integrated ones where there are none."""
    found = by_preference(native_devices.devices())
    own = [device for device in found if device.kind is DeviceKind.GPU]
    return own or [device for device in found if device.kind is DeviceKind.SHARED]


def card_names() -> str:
    """The cards of this machine in words, for measurements that belong to them."""
    return "+".join(device.description for device in own_cards())


def pools_of(specs: Sequence[ExpertSpec]) -> dict[str, str]:
    """Experts whose layers go to workers -> their pool: its endpoints, joined. Pools that share one are one pool."""
    pools: list[set[str]] = []
    for spec in specs:
        if spec.rpc:
            touching = [pool for pool in pools if pool & set(spec.rpc)]
            pools = [pool for pool in pools if pool not in touching] + [set(spec.rpc).union(*touching)]
    return {spec.name: _name(next(pool for pool in pools if set(spec.rpc) <= pool)) for spec in specs if spec.rpc}


def budget_now(
    pools: Mapping[str, str],
    *,
    cards: Sequence[int] | None = None,
    ram: int | None = None,
    cores: int | None = None,
    margin: float = GPU_MARGIN,
) -> Budget:
    """What is free now; ``cards``, ``ram`` and ``cores`` replace what is found. Raises LoadError without a worker."""
    return Budget(
        vram=tuple(device.free_bytes for device in own_cards()) if cards is None else tuple(cards),
        ram=free_ram_bytes() if ram is None else ram,
        cores=cores or usable_cores(),
        workers={pool: _free(pool) for pool in sorted(set(pools.values()))},
        margin=margin,
    )


def request_of(specs: Sequence[ExpertSpec], paths: Mapping[str, Path], *, calibrated: bool, cores: int) -> Request:
    """What the experts' settings ask for, with the speeds that were measured for those whose files are here."""
    pools = pools_of(specs)
    cards = card_names()
    speeds: dict[str, float] = {}
    card_speeds: dict[str, float] = {}
    for spec in specs:
        path = paths.get(spec.name) if calibrated else None
        for device, found in ((calibration.CPU, speeds), (pools.get(spec.name, cards), card_speeds)):
            if path is not None and (speed := calibration.remembered(path, device, cores)):
                found[spec.name] = speed
    return Request(
        n_ctx=max(spec.n_ctx for spec in specs),
        contexts={spec.name: spec.n_ctx for spec in specs},
        types={spec.name: (spec.type_k or "f16", spec.type_v or "f16") for spec in specs if spec.type_k or spec.type_v},
        layers={spec.name: spec.n_gpu_layers for spec in specs if spec.n_gpu_layers is not None},
        pools=pools,
        speeds=speeds,
        card_speeds=card_speeds,
    )


class Placement:
    """A plan that is carried out expert by expert, with a look at the free memory before each."""

    def __init__(self, made: Plan, shapes: Sequence[Shape], *, fewer_layers: bool) -> None:
        """Use ``decide``."""
        self.plan = made
        self._shapes = {shape.name: shape for shape in shapes}
        self._placed = {one.name: one for one in made.experts}
        self._may_change = fewer_layers

    @classmethod
    def decide(
        cls,
        specs: Sequence[ExpertSpec],
        paths: Sequence[Path],
        *,
        fewer_layers: bool = False,
        margin: float = GPU_MARGIN,
        calibrated: bool = True,
    ) -> Placement | None:
        """The fastest placement that fits; None where there is nothing to place layers on.

        Raises LoadError, with what to change, where none fits. Numbers of layers that the user fixed are tried even
        where they do not seem to fit, with a warning, or lowered where ``fewer_layers`` allows it.
        """
        pools = pools_of(specs)
        if not pools and not own_cards():
            return None
        budget = budget_now(pools, margin=margin)
        files = {spec.name: path for spec, path in zip(specs, paths, strict=True)}
        request = request_of(specs, files, calibrated=calibrated, cores=budget.cores)
        shapes = [shape_of(spec.name, read(path)) for spec, path in zip(specs, paths, strict=True)]
        made = plan(shapes, budget, request)
        if not made.fits and request.layers and fewer_layers:
            most = {name: n for name, n in request.layers.items() if n >= 0}
            made = plan(shapes, budget, replace(request, layers={}, most_layers=most))
        if not made.fits:
            advice = "; ".join(made.remedies)
            if any(spec.n_gpu_layers is None for spec in specs):
                raise LoadError(f"the experts do not fit ({_sums(made)}): {advice}; gguf-fusion plan shows more")
            _log.warning("the experts may not fit (%s), but are tried as asked for: %s", _sums(made), advice)
        for one in made.experts:
            if one.pool and not one.n_gpu_layers:
                _log.warning("expert %r stays on this machine, where it is faster than on %s; -ngl -1 sends it there",
                             one.name, one.pool)  # fmt: skip
        return cls(made, shapes, fewer_layers=fewer_layers)

    def layers_now(self, name: str) -> int:
        """Layers to load an expert with, after a look at the memory that is free now.

        Raises LoadError where it has become too little, unless fewer layers are allowed.
        """
        planned = self._placed[name]
        free = self._free_bytes(planned.pool)
        if planned.vram_bytes <= free or not self.plan.fits:
            return planned.n_gpu_layers
        shrunk = (
            f"expert {name!r} was to take {planned.vram_bytes / 1e6:.0f} MB for {planned.n_gpu_layers} layers on "
            f"{planned.pool or 'the card'}, but only {free / 1e6:.0f} MB are free there by now"
        )
        if not self._may_change:
            raise LoadError(
                f"{shrunk}; close what took the memory, ask for fewer layers (-ngl) or let them be lowered "
                f"(--fewer-layers), or use a smaller context (-c)"
            )
        n = self._most(name, free, planned.n_gpu_layers)
        _log.warning("%s; loading it with %d", shrunk, n)
        return n

    def only_device(self, name: str) -> str | None:
        """The device that holds the whole expert, as ``calibration`` names it; None where it is spread."""
        one = self._placed[name]
        if one.n_gpu_layers == 0:
            return calibration.CPU
        return (one.pool or card_names()) if one.n_gpu_layers > one.n_layers else None

    def load(self, name: str, loader: Callable[[int], _Expert]) -> _Expert:
        """What ``loader`` makes of the number of layers planned; once more with fewer where that is allowed."""
        n = self.layers_now(name)
        try:
            return loader(n)
        except LoadError as error:
            fewer = self.fewer(name, n)
            if fewer is None:
                raise
            _log.warning("%s; trying once more with %d layers on the card", error, fewer)
            return loader(fewer)

    def look_back(self) -> None:
        """Warn where less was left free on the cards than drivers need: they move memory to RAM then."""
        for device in own_cards() if self.plan.vram_bytes else ():
            if device.free_bytes < _TIGHT:
                _log.warning(
                    "only %.0f MB are left on %s: its driver may move memory to RAM, which is many times slower; ask "
                    "for fewer layers (-ngl) or a smaller context (-c), or leave more free (--vram-margin)",
                    device.free_bytes / 1e6, device.name,
                )  # fmt: skip

    def fewer(self, name: str, failed: int) -> int | None:
        """Layers for the one retry after loading with ``failed`` of them failed; None where no retry is allowed."""
        if not self._may_change or not failed:
            return None
        return self._most(name, self._free_bytes(self._placed[name].pool), int(_AT_MOST * failed))

    def _most(self, name: str, free: int, at_most: int) -> int:
        counts = range(at_most, 0, -1)
        return next((n for n in counts if place(self._shapes[name], n, self.plan.request).vram_bytes <= free), 0)

    @staticmethod
    def _free_bytes(pool: str) -> int:
        return sum(_free(pool)) if pool != OWN else sum(device.free_bytes for device in own_cards())


def _name(endpoints: set[str]) -> str:
    return ",".join(sorted(endpoints))


def _free(pool: str) -> tuple[int, ...]:
    return tuple(device.free_bytes for device in native_rpc.remote_devices(pool.split(",")))


def _sums(made: Plan) -> str:
    budget = made.budget
    parts = [f"RAM {made.ram_bytes / 1e9:.1f} of {budget.ram / 1e9:.1f} GB"]
    for pool in sorted({one.pool for one in made.experts}):
        used, free = made.bytes_in(pool), budget.usable(pool)
        parts.append(f"{pool or 'cards'} {used / 1e9:.1f} of {free / 1e9:.1f} GB")
    return ", ".join(parts)
