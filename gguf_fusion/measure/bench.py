"""Speed of experts and of their ensembles over every combination of settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gguf_fusion import hub
from gguf_fusion.config import DEFAULT_ENSEMBLE, EnsembleSpec, Registry
from gguf_fusion.devices import DeviceInfo, DeviceKind, usable_cores
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.experts import native_devices
from gguf_fusion.gguf_info import read
from gguf_fusion.load import load, load_expert
from gguf_fusion.measure.speed import Case, Peak, Row, cases, ensemble_row, expert_rows
from gguf_fusion.members import Member, members_from, members_of
from gguf_fusion.options import Options

_SPARE = 72
"""Tokens of context beside those generated: the prompt of the fused test."""


def bench(
    models: Sequence[str] = (DEFAULT_ENSEMBLE,), *, n_prompt: Sequence[int] = (512,), n_gen: Sequence[int] = (128,),
    n_threads: Sequence[int] = (), n_ctx: Sequence[int] = (0,), type_k: Sequence[str] = ("f16",),
    type_v: Sequence[str] = ("f16",), n_gpu_layers: Sequence[int] = (0,), repetitions: int = 5, fused: bool = True,
    strategy: str | None = None, registry: Registry | None = None, offline: bool = False,
    progress: hub.Progress | None = None, tell: Callable[[str], None] = lambda text: None,
    devices: Callable[[], Sequence[DeviceInfo]] = native_devices.devices,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield one record per expert, test and combination of settings, with llama-bench's names; then the ensembles.

    models     : experts and ensembles, by name or reference;  fused : whether ensembles are measured as a whole
    n_prompt, n_gen : tokens of the two tests, 0 leaves one out;  n_ctx : 0 = what the tests need
    n_threads  : none = the usable cores;  devices : what tells the memory of GPUs
    Raises UsageError where there is nothing to measure, and what loading raises.
    """
    if not any(n_prompt) and not any(n_gen):
        raise UsageError("nothing to measure: both -p and -n are 0")
    registry = registry or Registry.load()
    members, ensembles = _members(models, registry)
    wanted = cases(
        n_threads=n_threads or [usable_cores()], n_ctx=n_ctx, type_k=type_k, type_v=type_v,
        n_gpu_layers=n_gpu_layers, n_prompt=n_prompt, n_gen=n_gen,
    )  # fmt: skip
    for member in members:
        hub.pull(member.ref, registry, progress=progress, offline=offline)
    return _rows(members, ensembles if fused else [], registry, wanted, repetitions, strategy, tell, devices)


def _members(names: Sequence[str], registry: Registry) -> tuple[list[Member], list[EnsembleSpec]]:
    """(experts to measure one by one, ensembles to measure as a whole)."""
    members: list[Member] = []
    for name in names:
        is_ensemble = name in registry.ensembles
        found = members_of(registry.ensemble(name), registry) if is_ensemble else members_from([name], registry)
        members += [member for member in found if member.ref not in {m.ref for m in members}]
    return members, [registry.ensemble(name) for name in names if name in registry.ensembles]


def _rows(
    members: Sequence[Member], ensembles: Sequence[EnsembleSpec], registry: Registry, wanted: Sequence[Case],
    repetitions: int, strategy: str | None, tell: Callable[[str], None], devices: Callable[[], Sequence[DeviceInfo]],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    infos = {member.ref: read(hub.locate(member.ref, registry)) for member in members}
    for case in wanted:
        n_ctx = case.n_ctx or max(256, case.n_prompt + 8, case.n_gen + _SPARE)
        options = Options(n_ctx=n_ctx, n_threads=case.n_threads, n_gpu_layers=case.n_gpu_layers)
        names = backends(case.n_gpu_layers, devices())
        for member in members:
            spec, info = _with_types(member, case).spec, infos[member.ref]
            with Peak(devices) as peak, load_expert(spec, info.path, options) as expert:
                for row in expert_rows(expert, info, case, repetitions, tell, names, peak):
                    yield _record(row, n_ctx)
        for ensemble in ensembles if case.n_gen else ():
            parts = [_with_types(m, case) for m in members_of(ensemble, registry) if m.weight > 0.0]
            chosen = replace(options, strategy=strategy or ensemble.strategy, epsilon=ensemble.epsilon)
            with Peak(devices) as peak, Ensemble(load(parts, chosen, registry=registry, offline=True)) as loaded:
                files = [infos[part.ref] for part in parts]
                row = ensemble_row(loaded, files, case, repetitions, tell, names, peak)
                yield _record(row, n_ctx) | {"ensemble": ensemble.name}


def _record(row: Row, n_ctx: int) -> dict[str, Any]:
    return row.as_json() | {"n_ctx": n_ctx}


def _with_types(member: Member, case: Case) -> Member:
    return replace(member, spec=replace(member.spec, type_k=case.type_k, type_v=case.type_v))


def backends(n_gpu_layers: int, devices: Sequence[DeviceInfo]) -> str:
    """What computes, in llama-bench's words: the kinds of GPU in use ("CUDA,Vulkan"), else "CPU"."""
    kinds = (DeviceKind.GPU, DeviceKind.SHARED)
    names = [device.name.rstrip("0123456789") for device in devices if device.kind in kinds]
    return ",".join(dict.fromkeys(names)) if names and n_gpu_layers else "CPU"
