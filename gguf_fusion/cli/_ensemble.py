"""Options of every command that loads an ensemble, and the loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gguf_fusion.ahead import LEVELS
from gguf_fusion.cli._output import ConsoleProgress, size_in_bytes
from gguf_fusion.cli._registry import registry_option, weighted
from gguf_fusion.config import DEFAULT_ENSEMBLE
from gguf_fusion.cover.tree import EXACT_EPSILON
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.plan.memory import CACHE_BITS

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OPTIONS = (
    click.option("-e", "--expert", "experts", metavar="REF[=WEIGHT]", multiple=True, help="An expert (repeatable)."),
    click.option("--ensemble", default=DEFAULT_ENSEMBLE, show_default=True, help="An ensemble of the registry."),
    click.option("--strategy", help="pool(weight rule); see: gguf-fusion strategies."),
    click.option(
        "--router",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="A trained router instead of a strategy; see: gguf-fusion router.",
    ),
    click.option("--epsilon", type=float, help="Bits per byte that unevaluated segmentations may cost."),
    click.option(
        "--template",
        "templates",
        metavar="EXPERT=FILE",
        multiple=True,
        help='Another chat template (Jinja) for an expert; "none" for a base model (repeatable).',
    ),
    click.option("--exact", is_flag=True, help="The epsilon at which one expert alone loses nothing measurable."),
)

rpc_option = click.option(
    "--rpc",
    metavar="[EXPERT=]HOST:PORT",
    multiple=True,
    help="A worker (gguf-fusion worker) that holds the layers of this expert, or of all (repeatable). "
    "Trusted networks only.",
)

_MACHINE_OPTIONS = (
    click.option("-c", "--n-ctx", type=int, help="Context of every expert, in its tokens."),
    click.option("-t", "--threads", type=click.IntRange(min=1), help="Threads for all experts together."),
    click.option(
        "-ngl",
        "--n-gpu-layers",
        type=int,
        help="Layers of every expert on a GPU; -1 = all. By default the fastest placement that fits.",
    ),
    click.option("--type-k", type=click.Choice(list(CACHE_BITS)), help="Cache type of K.  [default: f16]"),
    click.option("--type-v", type=click.Choice(list(CACHE_BITS)), help="Cache type of V.  [default: f16]"),
    rpc_option,
    click.option(
        "--fewer-layers/--no-fewer-layers",
        default=None,
        help="Where the card's memory turns out too small, load with fewer layers instead of failing.",
    ),
    click.option(
        "--smaller-quants/--no-smaller-quants",
        default=None,
        help="Where the experts do not fit, take smaller quants that the registry lists for them.",
    ),
    click.option("--vram-margin", type=float, help="Share of a card's free memory to leave free.  [default: 0.05]"),
    click.option("--lanes", type=click.Choice(["auto", "serial", "lanes"]), default="auto", show_default=True),
    click.option(
        "--calibrate/--no-calibrate",
        default=True,
        show_default=True,
        help="Measure at the first load how fast experts are, and whether they are faster side by side.",
    ),
    click.option("--offline", is_flag=True, help="Use only what is on this machine."),
)


_AHEAD_OPTIONS = (
    click.option(
        "--lazy/--no-lazy",
        default=False,
        show_default=True,
        help="Leave the slowest expert out of symbols that it cannot change (linear pools only).",
    ),
    click.option(
        "--prefetch",
        type=click.Choice(LEVELS),
        default="off",
        show_default=True,
        help="Read guessed text in batches: exact changes nothing, law moves probabilities a little.",
    ),
    click.option("--flash-attn/--no-flash-attn", default=None, help="Attention kernels under which batches are exact."),
)


def ahead_options(function: _Function) -> _Function:
    """``--lazy``, ``--prefetch`` and ``--flash-attn``."""
    for option in reversed(_AHEAD_OPTIONS):
        function = option(function)
    return function


def fusion_options(function: _Function) -> _Function:
    """``-e``, ``--ensemble``, ``--strategy``, ``--template``, ``--epsilon`` and ``--exact``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def machine_options(function: _Function) -> _Function:
    """Context, threads, GPU, lanes, ``--offline`` and ``--config``."""
    function = registry_option(function)
    for option in reversed(_MACHINE_OPTIONS):
        function = option(function)
    return function


def load_ensemble(given: Mapping[str, Any]) -> Ensemble:
    """The ensemble that the values of both groups of options describe; missing models are fetched first."""
    keywords = {
        "registry": given["registry"],
        "offline": given["offline"],
        "strategy": given["strategy"],
        "epsilon": EXACT_EPSILON if given["exact"] else given["epsilon"],
        "n_ctx": given["n_ctx"],
        "n_threads": given["threads"],
        "n_gpu_layers": given["n_gpu_layers"],
        "type_k": given["type_k"],
        "type_v": given["type_v"],
        "rpc": workers_by_expert(given["rpc"]),
        "fewer_layers": given["fewer_layers"],
        "smaller_quants": given["smaller_quants"],
        "vram_margin": given["vram_margin"],
        "lanes": given["lanes"],
        "router": given["router"],
        "calibrate": given["calibrate"],
        "lazy": given.get("lazy", False),
        "prefetch": given.get("prefetch", "off"),
        "flash_attn": given.get("flash_attn"),
        "prompt_cache": size_in_bytes("--prompt-cache", given.get("prompt_cache", "0")),
        "space": given.get("space", "auto"),
        "chat_templates": _templates(given["templates"]),
        "progress": ConsoleProgress(),
    }
    if given["experts"]:
        refs, weights = weighted(given["experts"])
        return Ensemble.from_files(refs, weights=weights, **keywords)
    return Ensemble.from_registry(given["ensemble"], **keywords)


def workers_by_expert(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Workers by expert; those of all experts under the empty name."""
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, _, endpoint = text.rpartition("=")
        found[name] = (*found.get(name, ()), endpoint)
    return found


def _templates(given: tuple[str, ...]) -> dict[str, str]:
    """Files by expert. Raises UsageError."""
    pairs = [text.partition("=") for text in given]
    for text, (name, _, file) in zip(given, pairs, strict=True):
        if not name or not file:
            raise UsageError(f"--template {text}: expected EXPERT=FILE")
    return {name: file for name, _, file in pairs}
