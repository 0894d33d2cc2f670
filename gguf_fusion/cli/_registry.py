"""The ``--config`` option that every command with models has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gguf_fusion.config import Registry

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _load(ctx: click.Context, parameter: click.Parameter, value: tuple[Path, ...]) -> Registry:
    return Registry.load(value)


def registry_option(function: _Function) -> _Function:
    """Give a command the repeatable option ``--config`` and pass it the loaded ``registry``."""
    return click.option(
        "--config",
        "registry",
        metavar="FILE",
        multiple=True,
        type=click.Path(path_type=Path),
        envvar="GGUF_FUSION_CONFIG",
        callback=_load,
        help="Read this registry of experts and ensembles first (repeatable).",
    )(function)
