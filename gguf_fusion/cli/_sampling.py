"""Options of every command that draws texts, and how a text is read in and came to its end."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import threading
from collections.abc import Callable
from math import exp
from typing import Any, TypeVar

import click

from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.records import Step
from gguf_fusion.sampling import sampling_params

_Function = TypeVar("_Function", bound=Callable[..., Any])

_LONG_PROMPT = 1000
"""Tokens, of all experts together, from which on reading a prompt shows its progress."""

_STDIN_S = 1.0
"""How long a text on stdin may take to begin where there is a prompt already."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens", "max_bytes")


def sampling_options(max_bytes: int) -> Callable[[_Function], _Function]:
    """Limits, temperature and the like, ``--seed`` and ``--stop``."""
    options = (
        click.option("-n", "--max-tokens", type=int, help="Most pieces to generate."),
        click.option("--max-bytes", type=int, default=max_bytes, show_default=True, help="Most bytes to generate."),
        click.option("--temp", "temperature", type=float, help="0 = always the most probable."),
        click.option("--top-k", type=int),
        click.option("--top-p", type=float),
        click.option("--min-p", type=float),
        click.option("--repeat-penalty", type=float, help="Subtracted from ln f for repeated text; 0 = off."),
        click.option("--seed", type=int, help="Same seed, settings and machine: same text."),
        click.option("--stop", multiple=True, help="A text that ends the reply (repeatable)."),
    )

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def sampling_given(options: dict[str, Any]) -> dict[str, Any]:
    """Take the sampling keywords that were given out of a command's options. Raises UsageError."""
    values = {name: options.pop(name) for name in _SAMPLING}
    given = {name: value for name, value in values.items() if value is not None}
    if stop := options.pop("stop"):
        given["stop"] = stop
    sampling_params(given)  # a mistake is told before anything is fetched or loaded
    return given


class Reading:
    """Shows how much of a long prompt is evaluated; lanes report from their own threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[int, int]] = {}

    def __call__(self, expert: str, n_done: int, n_total: int) -> None:
        with self._lock:
            self._tokens[expert] = n_done, max(n_total, self._tokens.get(expert, (0, 0))[1])
            done, total = (sum(column) for column in zip(*self._tokens.values(), strict=True))
            if total >= _LONG_PROMPT:
                click.echo(f"\rreading the prompt: {done} of {total} tokens\033[K", nl=False, err=True)
                if done >= total:
                    click.echo("\r\033[K", nl=False, err=True)


def ending(ensemble: Ensemble, last: Step | None) -> dict[str, Any]:
    """What ended a reply with this last step, and what every expert thought of its end."""
    if last is None or last.finish_reason != "stop":
        return {"by": "limit"}
    if last.data or last.symbol != ensemble.space.end:
        return {"by": "stop string"}
    experts = {
        name: {"probability": exp(logprob), "responsibility": float(share)}
        for name, logprob, share in zip(ensemble.names, last.expert_logprobs, last.responsibility, strict=True)
    }
    return {"by": "end of text", "experts": experts}


def piped_text(*, waits: bool) -> str:
    """What stands on stdin, empty on a terminal. Raises UsageError for what is no UTF-8.

    Unless it ``waits``, a pipe on which nothing begins within a second is left alone: whoever started this process may
    keep it open for ever.
    """
    if sys.stdin is None or sys.stdin.isatty() or not (waits or _has_begun()):
        return ""
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin: expected UTF-8, got byte {data[error.start]:#x} at {error.start}") from None


def _has_begun() -> bool:
    try:
        descriptor = sys.stdin.fileno()
    except io.UnsupportedOperation:  # not a file at all
        return True
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return True
    return bool(select.select([descriptor], [], [], _STDIN_S)[0])
