"""``gguf-fusion chat``: a conversation with an ensemble."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import platformdirs

from gguf_fusion.cli import _why
from gguf_fusion.cli._conversation import COMMANDS, Conversation
from gguf_fusion.cli._ensemble import fusion_options, load_ensemble, machine_options
from gguf_fusion.cli._line_input import Lines, Pipe, Terminal, read_text
from gguf_fusion.cli._output import note
from gguf_fusion.cli._sampling import sampling_given, sampling_options
from gguf_fusion.session import Session


@click.command()
@click.argument("ensemble_name", metavar="[ENSEMBLE]", required=False)
@fusion_options
@click.option("-s", "--system", help="A system text for the experts' templates.")
@sampling_options(max_bytes=4096)
@click.option("--resume", is_flag=True, help="Go on with the conversation that was kept last.")
@click.option(
    "--history",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where conversations are kept.  [default: the user's own state directory]",
)
@click.option("--no-history", is_flag=True, help="Keep nothing on disk.")
@machine_options
def chat(
    ensemble_name: str | None,
    system: str | None,
    resume: bool,
    history: Path | None,
    no_history: bool,
    **options: Any,
) -> int:
    """Talk with an ensemble; /help lists the commands.

    Everything that is said is kept on disk as it appears. On a pipe every line of stdin is a question or a command, and
    the answers go to stdout.
    """
    sampling = sampling_given(options)
    if ensemble_name is not None:
        options["ensemble"] = ensemble_name
    folder = None if no_history else history or platformdirs.user_state_path("gguf-fusion", appauthor=False) / "chats"
    on_terminal = sys.stdin.isatty()
    lines: Lines = Pipe()
    with load_ensemble(options) as ensemble:
        if on_terminal:
            lines = Terminal(list(COMMANDS), None if folder is None else folder / "input")
            note(f"{ensemble.name}: {', '.join(ensemble.names)}. /help lists the commands, Ctrl-D ends.")
        conversation = Conversation(
            ensemble,
            Session(system=system),
            sampling,
            folder=folder,
            lines=lines if on_terminal else None,
            colour=_why.coloured(),
        )
        if resume:
            conversation.resume()
        try:
            _talk(conversation, lines)
        finally:
            conversation.close()
    return int(conversation.failed and not on_terminal)


def _talk(conversation: Conversation, lines: Lines) -> None:
    """Until the end of input or /quit."""
    while True:
        try:
            text = read_text(lines)
            if text is None or not conversation.take(text):
                return
        except KeyboardInterrupt:
            if isinstance(lines, Pipe):
                raise
            note("Ctrl-D or /quit ends the conversation")
