"""How commands name models: the ``--config`` option, and experts with weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gguf_fusion.config import Registry
from gguf_fusion.errors import ConfigError, MissingExtraError, StrategyError, UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _load(ctx: click.Context, parameter: click.Parameter, value: tuple[Path, ...]) -> Registry:
    registry = Registry.load(value)
    for name, strategy in ((spec.name, spec.strategy) for spec in registry.ensembles.values() if spec.strategy):
        from gguf_fusion.expressions import parse  # compiled code, which most registries do without

        try:
            parse(strategy)
        except StrategyError as error:
            raise ConfigError(f"[ensembles.{name}] strategy: {error}") from error
    return registry


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


def weighted(experts: tuple[str, ...]) -> tuple[list[str], list[float]]:
    """(references, weights) of ``-e REF[=WEIGHT]``, weight 1 where none is given. Raises UsageError."""
    refs, weights = [], []
    for given in experts:
        ref, sign, weight = given.rpartition("=")
        try:
            refs.append(ref if sign else given)
            weights.append(float(weight) if sign else 1.0)
        except ValueError:
            raise UsageError(f"-e {given}: expected REF=WEIGHT with a number, got {weight!r}") from None
    return refs, weights


def require_extra(extra: str, *packages: str) -> None:
    """Raise MissingExtraError, before any work is done, unless the packages of an extra are installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra)
