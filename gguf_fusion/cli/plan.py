"""``gguf-fusion plan``: who would lie where, what that takes, and how fast it would be; nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import click

from gguf_fusion.cli._ensemble import rpc_option, workers_by_expert
from gguf_fusion.cli._output import human_size, print_json, print_line, print_table, size_in_bytes
from gguf_fusion.cli._registry import registry_option
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.errors import UsageError
from gguf_fusion.load import with_options
from gguf_fusion.members import members_from, members_of
from gguf_fusion.options import Options
from gguf_fusion.placement import budget_now, pools_of, request_of
from gguf_fusion.plan.memory import CACHE_BITS, UBATCH
from gguf_fusion.plan.planner import GPU_MARGIN, Placed, Plan, Request
from gguf_fusion.smaller import path_of, plan_with_smaller, shape_before_pull, sources_taken

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
@click.option("-c", "--n-ctx", type=click.IntRange(min=1), help="Context in tokens; each expert's own by default.")
@click.option("--type-k", type=click.Choice(list(CACHE_BITS)), help="Cache type of K.  [default: f16]")
@click.option("--type-v", type=click.Choice(list(CACHE_BITS)), help="Cache type of V.  [default: f16]")
@rpc_option
@click.option(
    "--vram-margin",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=GPU_MARGIN,
    show_default=True,
    help="Share of a card's free memory to leave free.",
)
@click.option(
    "--calibrate/--no-calibrate", default=True, show_default=True, help="Use the speeds that were measured here."
)
@click.option("-ngl", "--n-gpu-layers", type=int, help="Fix the layers of every expert on the card; -1 = all.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Cores to plan with.")
@click.option("--allow-kv-quant", is_flag=True, help="A cache of 8 bits may be planned where 16 do not fit.")
@click.option(
    "--allow-short-context", is_flag=True, help="A shorter context may be planned where this one does not fit."
)
@click.option(
    "--allow-smaller-quants",
    is_flag=True,
    help="Smaller quants that the registry lists may be planned where the usual ones do not fit.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@registry_option
def plan_command(
    registry: Registry,
    ensemble: str,
    experts: tuple[str, ...],
    vram: tuple[str, ...],
    ram: str | None,
    n_ctx: int | None,
    type_k: str | None,
    type_v: str | None,
    rpc: tuple[str, ...],
    vram_margin: float,
    calibrate: bool,
    n_gpu_layers: int | None,
    threads: int | None,
    allow_kv_quant: bool,
    allow_short_context: bool,
    allow_smaller_quants: bool,
    as_json: bool,
) -> None:
    """Plan where the experts of ENSEMBLE lie, from the headers of their files.

    Exit status 1 where no placement fits; the remedies say what to change.
    """
    members = members_from(experts, registry) if experts else members_of(registry.ensemble(ensemble), registry)
    options = Options(n_ctx=n_ctx, n_gpu_layers=n_gpu_layers, type_k=type_k, type_v=type_v, rpc=workers_by_expert(rpc))
    members = with_options([member for member in members if member.weight > 0.0], options)
    specs = [member.spec for member in members]
    paths = {member.spec.name: path for member in members if (path := path_of(member, registry)) is not None}
    shapes = [shape_before_pull(spec, paths.get(spec.name)) for spec in specs]
    pools = pools_of(specs)
    cards = tuple(size for text in vram if (size := size_in_bytes("--vram", text))) if vram else None
    budget = budget_now(
        pools, cards=cards, ram=None if ram is None else size_in_bytes("--ram", ram), cores=threads, margin=vram_margin
    )
    request = replace(
        request_of(specs, paths, calibrated=calibrate, cores=budget.cores),
        allow_kv_quant=allow_kv_quant, allow_short_ctx=allow_short_context,
    )  # fmt: skip
    if n_gpu_layers and not budget.vram and not pools:
        raise UsageError("layers on a card were asked for (-ngl), but there is none; give its memory with --vram")
    made = plan_with_smaller(members, shapes, budget, request, allowed=allow_smaller_quants)
    taken = {name: str(source) for name, source in sources_taken(members, shapes, made).items()}
    if as_json:
        print_json({**_as_json(made), "smaller_quants": taken})
    else:
        _print(made, taken)
    if not made.fits:
        raise SystemExit(1)


def _as_json(made: Plan) -> dict[str, object]:
    threads = max(1, made.budget.cores)
    return {
        "fits": made.fits,
        "experts": {
            one.name: {
                "n_gpu_layers": one.n_gpu_layers, "n_layers": one.n_layers, "weights_bytes": one.weights_bytes,
                "kv_bytes": one.kv_bytes, "buffers_bytes": one.buffers_bytes, "vram_bytes": one.vram_bytes,
                "ram_bytes": one.ram_bytes, "step_s": one.step_s, "estimated": one.estimated,
                "n_ctx": one.n_ctx, "type_k": one.type_k, "type_v": one.type_v,
                "rpc": one.pool.split(",") if one.pool else [],
                "speed": "measured" if _is_measured(one, made.request) else "guessed",
                "n_batch": 512, "n_ubatch": UBATCH, "threads": threads, "layer_bytes": list(shape.layer_bytes),
                "other_bytes": shape.other_bytes,
            }
            for one, shape in zip(made.experts, made.shapes, strict=True)
        },
        "total": {
            "vram_bytes": made.vram_bytes, "ram_bytes": made.ram_bytes,
            "worker_bytes": {pool: made.bytes_in(pool) for pool in made.budget.workers},
        },
        "budget": {"vram_bytes": list(made.budget.vram), "usable_vram_bytes": made.budget.usable_vram,
                   "ram_bytes": made.budget.ram,
                   "workers": {pool: list(free) for pool, free in made.budget.workers.items()}},
        "n_ctx": made.request.n_ctx,
        "type_k": made.request.type_k,
        "type_v": made.request.type_v,
        "tensor_split": list(made.tensor_split),
        "predicted_step_s": made.step_s,
        "remedies": list(made.remedies),
    }  # fmt: skip


def _print(made: Plan, taken: Mapping[str, str]) -> None:
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
    budget = made.budget
    on_pool = [(pool, [one.vram_bytes if one.pool == pool else 0 for one in made.experts], budget.usable(pool))
               for pool in ("", *budget.workers)]  # fmt: skip
    for where, parts, free in (*on_pool, ("RAM", [one.ram_bytes for one in made.experts], budget.ram)):
        if sum(parts) or free:
            bar = _bar(parts, max(sum(parts), free))
            print_line(f"{where or 'VRAM':5}{bar} {human_size(sum(parts))} of {human_size(free)}")
    print_line("     " + "  ".join(f"{_letter(i)} {one.name}" for i, one in enumerate(made.experts)))
    print_line()
    request = made.request
    cache = ", ".join(sorted({f"{one.type_k}/{one.type_v}" for one in made.experts}))
    how = "speeds measured" if all(_is_measured(one, request) for one in made.experts) else "speeds partly guessed"
    print_line(
        f"context {request.n_ctx} tokens, cache {cache}, about {1e3 * made.step_s:.0f} ms per step of all ({how})"
    )
    for name, source in taken.items():
        print_line(f"a smaller quant of {name}: {source}")
    if not made.fits:
        print_line("it does not fit:")
        for remedy in made.remedies:
            print_line(f"- {remedy}")


def _is_measured(one: Placed, request: Request) -> bool:
    """Whether all of the expert's time in the plan comes from measurements."""
    on_card = one.n_gpu_layers == 0 or one.name in request.card_speeds
    return on_card and (one.n_gpu_layers > one.n_layers or one.name in request.speeds)


def _bar(parts: Sequence[int], whole: int) -> str:
    """A letter per share of memory, by expert."""
    bar = "".join(_letter(i) * round(_BAR * part / max(1, whole)) for i, part in enumerate(parts))
    return f"[{bar[:_BAR]:.<{_BAR}}]"


def _letter(i: int) -> str:
    return chr(ord("A") + i % 26)
