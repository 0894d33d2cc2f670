"""``gguf-fusion run``: stream one text from an ensemble."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gguf_fusion.cli._ensemble import ahead_options, fusion_options, load_ensemble, machine_options
from gguf_fusion.cli._output import note, print_json
from gguf_fusion.cli._sampling import Reading, ending, piped_text, sampling_given, sampling_options
from gguf_fusion.cli._show import Insights, legend, line, topics_of
from gguf_fusion.cli._why import shown
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.records import Piece, Step
from gguf_fusion.reply import Reply
from gguf_fusion.roles import checked_task
from gguf_fusion.trace import TraceHeader, TraceWriter


@click.command()
@click.argument("prompt", required=False)
@fusion_options
@click.option("-s", "--system", help="A system text for the experts' templates.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without chat templates.")
@sampling_options(max_bytes=1024)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of the text.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write every expert's vote on every piece as JSON lines.",
)
@click.option(
    "--show",
    metavar="TOPICS",
    help="Per piece on stderr, in bits: divergence, gain, route, entropy (separated by commas).",
)
@click.option("--task", default="", help="The kind of task, for strategies that weigh experts by it.")
@click.option("-v", "--verbose", is_flag=True, help="Timings on stderr at the end.")
@machine_options
@ahead_options
def run(
    prompt: str | None,
    raw: bool,
    as_json: bool,
    verbose: bool,
    trace: Path | None,
    show: str | None,
    task: str,
    system: str | None,
    **options: Any,
) -> None:
    """Stream text from an ensemble; missing models are fetched first. Text on stdin is appended to PROMPT.

    Beside a PROMPT, stdin must begin within a second, or nothing is expected to come.
    """
    text = _prompt(prompt)
    sampling = sampling_given(options)
    topics = () if show is None else topics_of(show)
    checked_task(task)
    with load_ensemble(options) as loaded:
        reading = Reading() if sys.stderr.isatty() else None
        reply = loaded.generate(
            text, system=system, chat=None if raw else True, progress=reading,
            insight=bool(topics) or trace is not None, task=task, **sampling,
        )  # fmt: skip
        insights = Insights(loaded) if topics else None
        pieces: list[str] = []
        last: Step | None = None
        on_terminal = sys.stdout.isatty()
        with _traced(loaded, reply, trace) as vote:
            for step in reply:
                pieces.append(step.text)
                if not as_json:
                    click.echo(shown(step.text) if on_terminal else step.text, nl=False)
                vote(step)
                if insights is not None:
                    insights.push(step)
                last = step
        if insights is not None:
            insights.finish()
        timings = {**asdict(reply.timings), "bytes_per_s": reply.timings.bytes_per_s}
        if as_json:
            print_json(
                {
                    "text": "".join(pieces),
                    "finish_reason": reply.finish_reason,
                    "end": ending(loaded, last),
                    "usage": asdict(reply.usage),
                    "timings": timings,
                    "seed": reply.seed,
                    "experts": list(loaded.names),
                    **({} if insights is None else {"show": [{"text": p.text, **told} for p, told in insights.rows]}),
                }
            )
        else:
            click.echo()
            if insights is not None:
                note(legend(loaded.names, topics))
                for piece, told in insights.rows:
                    note(line(piece, told, topics))
        if verbose:
            _report(reply, ending(loaded, last))


def _report(reply: Reply, end: dict[str, Any]) -> None:
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
    if timings.lazy_steps or timings.rows_ahead:
        note(f"lazy        {timings.lazy_steps} bytes without the slowest expert")
        note(f"ahead       {timings.rows_ahead} rows read in batches, {timings.rows_saved} of them used")
    note(f"sampling    {timings.sampling_s:.3f} s")
    note(f"end         by {end['by']}")
    for name, vote in end.get("experts", {}).items():
        note(f"            {vote['responsibility']:.2f} of it, probability {vote['probability']:.2g}: {name}")
    note(f"seed        {reply.seed}")


@contextmanager
def _traced(ensemble: Ensemble, reply: Reply, path: Path | None) -> Iterator[Callable[[Step], None]]:
    """A function to call with every step; it writes the trace, if one is wanted."""
    if path is None:
        yield lambda _: None
        return
    insights = Insights(ensemble)
    header = TraceHeader(
        experts=ensemble.names, strategy=ensemble.strategy, seed=reply.seed, piece_expert=ensemble.piece_expert
    )
    with TraceWriter.open(path, header) as writer:

        def write(rows: list[tuple[Piece, dict[str, Any]]]) -> None:
            writer.write([piece for piece, _ in rows], [told for _, told in rows])

        yield lambda step: write(insights.push(step))
        write(insights.finish())


def _prompt(argument: str | None) -> str:
    piped = piped_text(waits=argument is None)
    parts = [part for part in (argument, piped or None) if part is not None]
    if not parts:
        raise UsageError('expected a prompt, got none; write: gguf-fusion run "…" or pipe a text')
    return "\n".join(parts)
