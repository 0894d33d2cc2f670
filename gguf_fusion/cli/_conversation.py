"""A conversation with an ensemble: what every line and every command of ``gguf-fusion chat`` does."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gguf_fusion.chat import utf8
from gguf_fusion.cli import _why
from gguf_fusion.cli._line_input import Lines
from gguf_fusion.cli._output import note, print_line, print_pairs, print_table
from gguf_fusion.cli._sampling import Reading
from gguf_fusion.config import nearest
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import GgufFusionError, UsageError
from gguf_fusion.expressions import parse
from gguf_fusion.records import Piece
from gguf_fusion.session import INTERRUPTED, Journal, Session, Shares, read, write

COMMANDS = {
    "/help": ("", "this list"),
    "/weights": ("[EXPERT=WEIGHT … | reset]", "show or change how much each expert counts"),
    "/strategy": ("[POOL(…) | reset]", "show or change how the experts are fused"),
    "/why": ("[table]", "who carried the last answer, piece by piece"),
    "/system": ("[TEXT | none]", "show or change the system text"),
    "/undo": ("", "take the last question and its answer back"),
    "/edit": ("[TEXT]", "ask another question in place of the last one"),
    "/regenerate": ("", "answer the last question again"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("[FILE]", "go on with a conversation; without FILE with the one before"),
    "/clear": ("", "begin a new conversation"),
    "/quit": ("", "end (so does Ctrl-D)"),
}
_OTHER_NAMES = {"/bye": "/quit", "/exit": "/quit", "/?": "/help"}


class _StoppedError(Exception):
    """Ctrl-C while a prompt was read."""


class Conversation:
    """Keeps the session, answers questions and obeys commands. Errors are told on stderr, and the session goes on."""

    def __init__(
        self,
        ensemble: Ensemble,
        session: Session,
        sampling: Mapping[str, Any],
        *,
        folder: Path | None,
        lines: Lines | None = None,
        colour: bool = False,
    ) -> None:
        """``folder`` is where conversations are kept, None keeps none; ``lines`` lets a terminal edit a question."""
        self.session = replace(session, ensemble=session.ensemble or ensemble.name, experts=ensemble.names)
        self.failed = False
        """Whether anything went wrong so far."""
        self._ensemble = ensemble
        self._sampling = dict(sampling)
        self._folder = folder
        self._lines = lines
        self._colour = colour
        self._journal: Journal | None = None
        self._n_answers = 0

    def take(self, line: str) -> bool:
        """Do what a line says; False ends the conversation."""
        text = line.strip()
        if not text:
            return True
        try:
            if text.startswith("/") and not text.startswith("//"):
                return self._obey(text)
            utf8(line)
            self._answer(self.session.asked(line.removeprefix("/") if text.startswith("//") else line))
        except GgufFusionError as error:
            self.failed = True
            note(f"error: {error}")
        return True

    def close(self) -> None:
        """Close the file that keeps the conversation."""
        if self._journal is not None:
            self._journal.close()

    # ---- answers ----------------------------------------------------------------------------------------------

    def _answer(self, asked: Session) -> None:
        """Write the answer to the last question of ``asked``, which becomes the session; on errors nothing changes."""
        before = self.session
        self.session = asked
        self._keep()
        try:
            self.session = self._generated(asked)
        except GgufFusionError:
            self.session = before
            raise
        finally:
            if self.session.exchanges:
                self._keep()

    def _generated(self, asked: Session) -> Session:
        sampling = dict(self._sampling)
        if sampling.get("seed") is not None:
            sampling["seed"] = (sampling["seed"] + self._n_answers) % 2**32
        self._n_answers += 1
        text, pieces, reason = "", [], INTERRUPTED
        on_terminal = sys.stdout.isatty()
        with _interruptible() as stopped:
            reply = self._ensemble.generate(
                asked.messages(),
                reuse=True,
                weights=asked.weights,
                strategy=asked.strategy,
                progress=_progress(stopped),
                **sampling,
            )
            view = self._ensemble.piece_view(asked.weights)
            try:
                for step in reply:
                    if self._journal is not None:
                        self._journal.add(step.text)
                    text += step.text
                    pieces += view.push(step)
                    click.echo(_why.shown(step.text) if on_terminal else step.text, nl=False)
                    if stopped():
                        break
            except (_StoppedError, KeyboardInterrupt):  # the second is impatience: the step was broken off
                pass
            reason = reply.finish_reason or INTERRUPTED
            pieces += view.finish()
            reply.close()
        print_line()
        if reason == INTERRUPTED:
            note("stopped; what is there belongs to the conversation (/undo takes it back, /regenerate tries again)")
        elif reason == "length":
            note("cut at the limit; -n and --max-bytes set it, -c the context")
        return asked.answered(text, reason, reply.seed, tuple(map(_shares, pieces)))

    def _keep(self) -> None:
        if self._folder is None:
            return
        if self._journal is None:
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            free = (self._folder / f"{name}-{n}.json" for n in itertools.count(1))
            self._journal = Journal(next(path for path in free if not path.exists()))
        self._journal.write(self.session)

    # ---- commands ---------------------------------------------------------------------------------------------

    def _obey(self, text: str) -> bool:
        word, _, rest = text.partition(" ")
        word, rest = _OTHER_NAMES.get(word, word), rest.strip()
        if word not in COMMANDS:
            raise UsageError(f"unknown command {word}{nearest(word, COMMANDS)} (// begins a text with a slash)")
        if word == "/quit":
            return False
        getattr(self, f"_do_{word[1:]}")(rest)
        return True

    def _do_help(self, rest: str) -> None:
        print_pairs({f"{name} {arguments}".strip(): about for name, (arguments, about) in COMMANDS.items()})
        print_line('"""…""" takes several lines, Ctrl-C stops an answer.')

    def _do_weights(self, rest: str) -> None:
        if rest:
            weights = None if rest == "reset" else self._weights(rest)
            self._ensemble.shares(weights)
            self.session = replace(self.session, weights=weights)
        shares = self._ensemble.shares(self.session.weights)
        print_pairs({name: f"{share:.3f}" for name, share in zip(self._ensemble.names, shares, strict=True)})

    def _weights(self, text: str) -> dict[str, float]:
        """Weights by expert; names may be shortened to any part that only one has, who is not named keeps its own."""
        names = self._ensemble.names
        mean_1 = (self._ensemble.shares() * len(names)).tolist()
        weights = dict(zip(names, mean_1, strict=True)) if self.session.weights is None else dict(self.session.weights)
        for word in text.replace(",", " ").split():
            part, _, value = word.partition("=")
            found = [part] if part in names else [name for name in names if part in name]
            if len(found) != 1:
                raise UsageError(f"/weights {word}: expected EXPERT=WEIGHT{nearest(part, names)}")
            try:
                weights[found[0]] = float(value)
            except ValueError:
                raise UsageError(f"/weights {word}: expected EXPERT=WEIGHT with a number, got {value!r}") from None
        return weights

    def _do_strategy(self, rest: str) -> None:
        if rest:
            self.session = replace(self.session, strategy=None if rest == "reset" else str(parse(rest)))
        print_line(self.session.strategy or self._ensemble.strategy)

    def _do_why(self, rest: str) -> None:
        if rest not in ("", "table"):
            raise UsageError(f"/why: expected nothing or 'table', got {rest!r}")
        pieces, experts = self.session.last.pieces, self.session.experts
        if not pieces:
            raise UsageError("/why: the last answer has no pieces")
        if self._colour and not rest:
            print_line(_why.in_colour(pieces, experts))
        else:
            print_table(["PIECE", "BY", *experts], _why.table(pieces, experts))

    def _do_system(self, rest: str) -> None:
        if rest:
            self.session = replace(self.session, system=None if rest == "none" else rest)
        print_line(self.session.system or "(none)")

    def _do_undo(self, rest: str) -> None:
        question = self.session.last.question
        self.session = self.session.undone()
        self._keep()
        print_line(f"taken back: {question}")

    def _do_edit(self, rest: str) -> None:
        if not rest:
            question = self.session.last.question
            rest = (self._lines.read("edit: ", question) if self._lines is not None else None) or ""
            if not rest.strip():
                raise UsageError("/edit: expected a question, got none")
        utf8(rest)
        self._answer(self.session.edited(rest))

    def _do_regenerate(self, rest: str) -> None:
        self._answer(self.session.edited())

    def _do_save(self, rest: str) -> None:
        if not rest:
            raise UsageError("/save: expected a file name, got none")
        write(self.session, Path(rest).expanduser())
        print_line(f"saved: {rest}")

    def _do_load(self, rest: str) -> None:
        self.load(Path(rest).expanduser() if rest else self._before())

    def load(self, path: Path) -> None:
        """Go on with the conversation in a file; what is said from now on is kept in another one. Raises UsageError."""
        session = read(path)
        if session.experts != self._ensemble.names:
            note(f"this conversation had {', '.join(session.experts)}; the experts of {self._ensemble.name} go on")
            exchanges = tuple(replace(exchange, pieces=()) for exchange in session.exchanges)
            session = replace(session, experts=self._ensemble.names, weights=None, exchanges=exchanges)
        self.session = replace(session, ensemble=self._ensemble.name)
        self._renew()
        n = len(session.exchanges)
        print_line(f"loaded: {path} ({n} question{'s' * (n != 1)})")

    def _before(self) -> Path:
        """The conversation that was kept last, this one aside."""
        mine = None if self._journal is None else self._journal.path
        files = [] if self._folder is None else [p for p in self._folder.glob("[0-9]*.json") if p != mine]
        if not files:
            raise UsageError("/load: no earlier conversation is kept here; give a FILE")
        return max(files, key=lambda path: path.stat().st_mtime)

    def resume(self) -> None:
        """Go on with the conversation that was kept last. Raises UsageError where there is none."""
        self.load(self._before())

    def _do_clear(self, rest: str) -> None:
        self.session = replace(self.session, exchanges=())
        self._renew()

    def _renew(self) -> None:
        self.close()
        self._journal = None


def _shares(piece: Piece) -> Shares:
    return piece.text, tuple(round(float(share), 4) for share in piece.responsibility)


def _progress(stopped: Callable[[], bool]) -> Callable[[str, int, int], None]:
    reading = Reading() if sys.stderr.isatty() else None

    def progress(expert: str, n_done: int, n_total: int) -> None:
        if stopped():
            raise _StoppedError
        if reading is not None:
            reading(expert, n_done, n_total)

    return progress


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C was pressed; pressed twice it interrupts as usual.

    An interrupt in the middle of a step would leave experts that disagree on the text.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return

    def handler(number: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
