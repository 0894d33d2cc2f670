"""``gguf-fusion run``: stream one text from an ensemble."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gguf_fusion.cli._ensemble import fusion_options, load_ensemble, machine_options
from gguf_fusion.cli._output import note, print_json
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.records import Step
from gguf_fusion.reply import Reply
from gguf_fusion.sampling import sampling_params
from gguf_fusion.trace import TraceHeader, TraceWriter

_LONG_PROMPT = 1000
"""Tokens, of all experts together, from which on reading a prompt shows its progress."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens", "max_bytes")


@click.command()
@click.argument("prompt", required=False)
@fusion_options
@click.option("-s", "--system", help="A system text for the experts' templates.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without chat templates.")
@click.option("-n", "--max-tokens", type=int, help="Most pieces to generate.")
@click.option("--max-bytes", type=int, default=1024, show_default=True, help="Most bytes to generate.")
@click.option("--temp", "temperature", type=float, help="0 = always the most probable.")
@click.option("--top-k", type=int)
@click.option("--top-p", type=float)
@click.option("--min-p", type=float)
@click.option("--repeat-penalty", type=float, help="Subtracted from ln f for repeated text; 0 = off.")
@click.option("--seed", type=int, help="Same seed, settings and machine: same text.")
@click.option("--stop", multiple=True, help="A text that ends the reply (repeatable).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of the text.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write every expert's vote on every piece as JSON lines.",
)
@click.option("-v", "--verbose", is_flag=True, help="Timings on stderr at the end.")
@machine_options
def run(
    prompt: str | None,
    raw: bool,
    as_json: bool,
    verbose: bool,
    trace: Path | None,
    system: str | None,
    stop: tuple[str, ...],
    **options: Any,
) -> None:
    """Stream text from an ensemble; missing models are fetched first. Text on stdin is appended to PROMPT."""
    text = _prompt(prompt)
    sampling = {name: options.pop(name) for name in _SAMPLING}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if stop:
        sampling["stop"] = stop
    sampling_params(sampling)  # a mistake is told before anything is fetched or loaded
    with load_ensemble(options) as loaded:
        reading = _Reading() if sys.stderr.isatty() else None
        reply = loaded.generate(text, system=system, chat=None if raw else True, progress=reading, **sampling)
        pieces = []
        with _traced(loaded, reply, trace) as vote:
            for step in reply:
                pieces.append(step.text)
                if not as_json:
                    click.echo(step.text, nl=False)
                vote(step)
        timings = {**asdict(reply.timings), "bytes_per_s": reply.timings.bytes_per_s}
        if as_json:
            print_json(
                {
                    "text": "".join(pieces),
                    "finish_reason": reply.finish_reason,
                    "usage": asdict(reply.usage),
                    "timings": timings,
                    "seed": reply.seed,
                    "experts": list(loaded.names),
                }
            )
        else:
            click.echo()
        if verbose:
            _report(reply)


class _Reading:
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


def _report(reply: Reply) -> None:
    """What took how long, on stderr."""
    timings, usage = reply.timings, reply.usage
    seconds = timings.total_s - timings.prefill_s
    n_prompt = sum(usage.prompt_tokens.values())
    per_token = timings.decodes / max(1, timings.tokens * len(timings.expert_decodes))
    rates = f"{timings.bytes_per_s:.1f} bytes/s, {timings.tokens / seconds if seconds else 0.0:.1f} tokens/s"
    note(f"load        {timings.load_s:.2f} s")
    note(f"prefill     {timings.prefill_s:.2f} s, {n_prompt} tokens of all experts")
    note(f"generation  {seconds:.2f} s, {timings.bytes} bytes, {timings.tokens} tokens: {rates}")
    note(f"experts     {timings.decode_s:.2f} s, {timings.decodes} decodes, {per_token:.2f} per token and expert")
    for name, n in timings.expert_decodes.items():
        note(f"            {timings.expert_decode_s[name]:.2f} s, {n} decodes: {name}")
    note(f"bridge      {timings.bridge_s:.3f} s")
    note(f"fusion      {timings.fusion_s:.3f} s")
    note(f"sampling    {timings.sampling_s:.3f} s")
    note(f"seed        {reply.seed}")


@contextmanager
def _traced(ensemble: Ensemble, reply: Reply, path: Path | None) -> Iterator[Callable[[Step], None]]:
    """A function to call with every step; it writes the trace, if one is wanted."""
    if path is None:
        yield lambda _: None
        return
    view = ensemble.piece_view()
    header = TraceHeader(
        experts=ensemble.names, strategy=ensemble.strategy, seed=reply.seed, piece_expert=ensemble.piece_expert
    )
    with TraceWriter.open(path, header) as writer:
        yield lambda step: writer.write(view.push(step))
        writer.write(view.finish())


def _prompt(argument: str | None) -> str:
    parts = [argument] if argument is not None else []
    if not sys.stdin.isatty():
        data = sys.stdin.buffer.read()
        try:
            piped = data.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin: expected UTF-8, got byte {data[error.start]:#x} at {error.start}") from None
        if piped:
            parts.append(piped)
    if not parts:
        raise UsageError('expected a prompt, got none; write: gguf-fusion run "…" or pipe a text')
    return "\n".join(parts)
