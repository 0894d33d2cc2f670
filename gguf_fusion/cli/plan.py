"""``gguf-fusion plan``: who would lie where, what that takes, and how fast it would be; nothing is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from gguf_fusion import hub
from gguf_fusion.cli._output import human_size, print_json, print_line, print_table
from gguf_fusion.cli._registry import registry_option
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.devices import DeviceKind, by_preference, free_ram_bytes, usable_cores
from gguf_fusion.errors import NotCachedError, UsageError
from gguf_fusion.gguf_info import read
from gguf_fusion.members import Member, members_from, members_of
from gguf_fusion.plan.memory import CACHE_BITS, UBATCH, Shape, guessed, shape_of, size_by_name
from gguf_fusion.plan.planner import Budget, Plan, Request, plan

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*\Z", re.IGNORECASE)
_BAR = 40


@click.command("plan")
@click.argument("ensemble", default=DEFAULT_ENSEMBLE)
@click.option(
    "-e", "--expert", "experts", metavar="REF", multiple=True, help="Plan these experts instead (repeatable)."
)
@click.option(
    "--vram", metavar="SIZE", multiple=True, help="Free memory of a card, such as 6GB (repeatable); 0 = none."
)
@click.option("--ram", metavar="SIZE", help="Free RAM; what is free now by default.")
@click.option("-c", "--n-ctx", type=click.IntRange(min=1), default=4096, show_default=True, help="Context in tokens.")
@click.option(
    "--type-k", type=click.Choice(list(CACHE_BITS)), default="f16", show_default=True, help="Cache type of K."
)
@click.option(
    "--type-v", type=click.Choice(list(CACHE_BITS)), default="f16", show_default=True, help="Cache type of V."
)
@click.option("-ngl", "--n-gpu-layers", type=int, help="Fix the layers of every expert on the card; -1 = all.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Cores to plan with.")
@click.option("--allow-kv-quant", is_flag=True, help="A cache of 8 bits may be planned where 16 do not fit.")
@click.option(
    "--allow-short-context", is_flag=True, help="A shorter context may be planned where this one does not fit."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@registry_option
def plan_command(
    registry: Registry,
    ensemble: str,
    experts: tuple[str, ...],
    vram: tuple[str, ...],
    ram: str | None,
    n_ctx: int,
    type_k: str,
    type_v: str,
    n_gpu_layers: int | None,
    threads: int | None,
    allow_kv_quant: bool,
    allow_short_context: bool,
    as_json: bool,
) -> None:
    """Plan where the experts of ENSEMBLE lie, from the headers of their files.

    Exit status 1 where no placement fits; the remedies say what to change.
    """
    members = members_from(experts, registry) if experts else members_of(registry.ensemble(ensemble), registry)
    shapes = [_shape(member, registry) for member in members if member.weight > 0.0]
    cards = _cards(vram)
    budget = Budget(
        vram=cards,
        ram=free_ram_bytes() if ram is None else size_in_bytes("--ram", ram),
        cores=threads or usable_cores(),
    )
    request = Request(
        n_ctx=n_ctx, type_k=type_k, type_v=type_v,
        layers={} if n_gpu_layers is None else {shape.name: n_gpu_layers for shape in shapes},
        allow_kv_quant=allow_kv_quant, allow_short_ctx=allow_short_context,
    )  # fmt: skip
    if n_gpu_layers and not cards:
        raise UsageError("layers on a card were asked for (-ngl), but there is none; give its memory with --vram")
    made = plan(shapes, budget, request)
    if as_json:
        print_json(_as_json(made, shapes))
    else:
        _print(made)
    if not made.fits:
        raise SystemExit(1)


def _cards(given: Sequence[str]) -> tuple[int, ...]:
    if given:
        return tuple(size for text in given if (size := size_in_bytes("--vram", text)))
    from gguf_fusion.experts import native_devices

    found = by_preference(native_devices.devices())
    own = tuple(device.free_bytes for device in found if device.kind is DeviceKind.GPU)
    return own or tuple(device.free_bytes for device in found if device.kind is DeviceKind.SHARED)


def size_in_bytes(option: str, text: str) -> int:
    """Bytes of a size as people write it; raises UsageError naming the option."""
    match = _SIZE.match(text)
    if not match:
        raise UsageError(f"{option}: expected a size such as 6GB, 512MB or 8GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _shape(member: Member, registry: Registry) -> Shape:
    """From the header of the file; guessed from its size or name where it is not on this machine yet."""
    name = member.spec.name
    try:
        return shape_of(name, read(hub.locate(member.ref, registry)))
    except NotCachedError:
        size = next((source.size_bytes for source in member.spec.sources if source.size_bytes), None)
        return guessed(name, size or size_by_name(" ".join((name, *map(str, member.spec.sources)))))


def _as_json(made: Plan, shapes: Sequence[Shape]) -> dict[str, object]:
    threads = max(1, made.budget.cores)
    return {
        "fits": made.fits,
        "experts": {
            one.name: {
                "n_gpu_layers": one.n_gpu_layers, "n_layers": one.n_layers, "weights_bytes": one.weights_bytes,
                "kv_bytes": one.kv_bytes, "buffers_bytes": one.buffers_bytes, "vram_bytes": one.vram_bytes,
                "ram_bytes": one.ram_bytes, "step_s": one.step_s, "estimated": one.estimated,
                "n_ctx": made.request.n_ctx, "type_k": made.request.type_k, "type_v": made.request.type_v,
                "n_batch": 512, "n_ubatch": UBATCH, "threads": threads, "layer_bytes": list(shape.layer_bytes),
                "other_bytes": shape.other_bytes,
            }
            for one, shape in zip(made.experts, shapes, strict=True)
        },
        "total": {"vram_bytes": made.vram_bytes, "ram_bytes": made.ram_bytes},
        "budget": {"vram_bytes": list(made.budget.vram), "usable_vram_bytes": made.budget.usable_vram,
                   "ram_bytes": made.budget.ram},
        "n_ctx": made.request.n_ctx,
        "type_k": made.request.type_k,
        "type_v": made.request.type_v,
        "tensor_split": list(made.tensor_split),
        "predicted_step_s": made.step_s,
        "remedies": list(made.remedies),
    }  # fmt: skip


def _print(made: Plan) -> None:
    rows = [
        (
            one.name + (" (guessed from its size)" if one.estimated else ""),
            f"{min(one.n_gpu_layers, one.n_layers)} of {one.n_layers}",
            human_size(one.weights_bytes), human_size(one.kv_bytes), human_size(one.buffers_bytes),
            human_size(one.vram_bytes), human_size(one.ram_bytes), f"{1e3 * one.step_s:.0f} ms",
        )
        for one in made.experts
    ]  # fmt: skip
    print_table(("EXPERT", "ON CARD", "WEIGHTS", "CACHE", "BUFFERS", "VRAM", "RAM", "PER TOKEN"), rows)
    print_line()
    for where, used, free, part in (
        ("VRAM", made.vram_bytes, made.budget.usable_vram, "vram_bytes"),
        ("RAM", made.ram_bytes, made.budget.ram, "ram_bytes"),
    ):
        if used or free:
            print_line(f"{where:5}{_bar(made, part, max(used, free))} {human_size(used)} of {human_size(free)}")
    print_line("     " + "  ".join(f"{_letter(i)} {one.name}" for i, one in enumerate(made.experts)))
    print_line()
    request = made.request
    print_line(f"context {request.n_ctx} tokens, cache {request.type_k}/{request.type_v}, "
               f"about {1e3 * made.step_s:.0f} ms per step of all")  # fmt: skip
    if not made.fits:
        print_line("it does not fit:")
        for remedy in made.remedies:
            print_line(f"- {remedy}")


def _bar(made: Plan, part: str, whole: int) -> str:
    """A letter per share of memory, by expert."""
    bar = "".join(_letter(i) * round(_BAR * getattr(one, part) / max(1, whole)) for i, one in enumerate(made.experts))
    return f"[{bar[:_BAR]:.<{_BAR}}]"


def _letter(i: int) -> str:
    return chr(ord("A") + i % 26)
