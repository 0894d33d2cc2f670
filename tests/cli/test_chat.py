"""Conversations: commands, history, interrupts, what is kept, and a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from gguf_fusion.cli import _why, main
from gguf_fusion.cli._conversation import COMMANDS, Conversation
from gguf_fusion.cli._line_input import read_text
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.session import Session, read
from gguf_fusion.vocabulary import Kind, Vocabulary

ECHO = "{% for m in messages %}{{ '<u>' ~ m.content ~ '<a>' if m.role == 'user' else m.content }}{% endfor %}"
KINDS = [Kind.TEXT] * 256 + [Kind.CONTROL] * 2 + [Kind.END]
VOCABULARY = Vocabulary.from_pieces([bytes([b]) for b in range(256)] + [b"<u>", b"<a>", b"</s>"], KINDS)


class Echo(TableExpert):
    """Answers with the last question, once; every other expert is unsure. Ctrl-C comes while it writes a given byte."""

    interrupt_at = b""
    interrupt_reading = False

    def __init__(self, name: str, sure: float) -> None:
        def law(path: tuple[int, ...]) -> np.ndarray:
            head, _, answer = b"".join(map(VOCABULARY.piece, path)).rpartition(b"<a>")
            question = head.rpartition(b"<u>")[2]
            probs = np.full(VOCABULARY.n_vocab, (1 - sure) / VOCABULARY.n_vocab)
            more = question.removeprefix(answer) if question != answer else b""
            probs[more[0] if more else 258] += sure
            if self.interrupt_reading and not head:
                os.kill(os.getpid(), signal.SIGINT)
            if self.interrupt_at and head and answer.endswith(self.interrupt_at):
                os.kill(os.getpid(), signal.SIGINT)
            return probs

        super().__init__(VOCABULARY, law, name=name)


class Typed:
    """Lines as somebody types them."""

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)
        self.defaults: list[str] = []

    def read(self, prompt: str, default: str = "") -> str | None:
        self.defaults.append(default)
        return self._lines.pop(0) if self._lines else None


@pytest.fixture
def ensemble() -> Iterator[Ensemble]:
    experts = [Echo("sure-one", 0.999), Echo("vague-two", 0.9)]
    with Ensemble.from_experts(experts, templates=[ECHO, ECHO], strategy="linear", space="byte") as made:
        yield made


@pytest.fixture
def talk(ensemble: Ensemble, tmp_path: Path) -> Conversation:
    return Conversation(ensemble, Session(), {"temperature": 0.0}, folder=tmp_path)


def last_words(talk: Conversation) -> list[str]:
    return [message["content"] for message in talk.session.messages()]


def test_turns_follow_each_other(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers go to stdout, the history grows, blank lines say nothing, two slashes are a slash."""
    for line in ("hello", "  ", "and you?", "//x"):
        assert talk.take(line)
    assert capsys.readouterr().out == "hello\nand you?\n/x\n"
    assert last_words(talk) == ["hello", "hello", "and you?", "and you?", "/x", "/x"]
    assert not talk.failed


def test_history_commands(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    """Undo, edit, regenerate, clear and the system text."""
    for line in ("one", "two", "/undo", "/edit three", "/regenerate", "/system Be brief."):
        talk.take(line)
    assert last_words(talk) == ["Be brief.", "three", "three"]
    talk.take("/clear")
    assert last_words(talk) == ["Be brief."]
    talk.take("/system none")
    assert last_words(talk) == []
    capsys.readouterr()
    for command in ("/undo", "/edit x", "/regenerate", "/why"):
        assert talk.take(command)
        assert "empty" in capsys.readouterr().err
    assert talk.failed


def test_edit_offers_the_last_question(ensemble: Ensemble) -> None:
    """On a terminal the question stands there to be changed."""
    typed = Typed("corrected")
    talk = Conversation(ensemble, Session(), {"temperature": 0.0}, folder=None, lines=typed)
    talk.take("corected")
    talk.take("/edit")
    assert typed.defaults == ["corected"]
    assert last_words(talk) == ["corrected", "corrected"]


def test_weights_and_strategy(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    """Names may be shortened; what is set holds for the next answers and is kept with the conversation."""
    talk.take("/weights two=3")
    assert capsys.readouterr().out == "sure-one   0.250\nvague-two  0.750\n"
    talk.take("/weights sure=0")
    talk.take("/strategy average")
    talk.take("hi")
    assert talk.session.weights == {"sure-one": 0.0, "vague-two": 3.0}
    assert talk.session.strategy == "linear(w=static)"
    assert all(shares == (0.0, 1.0) for _, shares in talk.session.last.pieces)
    capsys.readouterr()
    talk.take("/weights reset")
    talk.take("/strategy reset")
    assert (talk.session.weights, talk.session.strategy) == (None, None)
    assert "0.500" in capsys.readouterr().out
    for wrong, message in (
        ("/weights e=1", "EXPERT=WEIGHT"),
        ("/weights two=x", "a number"),
        ("/weights two=-1", "not negative"),
        ("/weights sure=0 two=0", "sum to zero"),
        ("/strategy linar", "linear"),
        ("/why not", "'table'"),
        ("/save", "a file name"),
    ):
        talk.take(wrong)
        assert message in capsys.readouterr().err
    assert (talk.session.weights, talk.session.strategy) == (None, None)


@pytest.mark.parametrize(("typo", "meant"), [("/wehy", "/why"), ("/regenrate", "/regenerate"), ("/zzz", "/help")])
def test_unknown_commands_name_the_nearest(
    talk: Conversation, capsys: pytest.CaptureFixture[str], typo: str, meant: str
) -> None:
    """A typo is no question."""
    assert talk.take(typo)
    assert meant in capsys.readouterr().err
    assert not talk.session.exchanges


def test_help_lists_every_command(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    """And every listed command exists."""
    talk.take("/?")
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)
    assert all(hasattr(talk, f"_do_{command[1:]}") for command in COMMANDS if command != "/quit")
    assert not talk.take("/quit")
    assert not talk.take("/bye")


def test_why_tells_who_carried_each_piece(ensemble: Ensemble, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table without colours; with them the text itself, a colour per expert, nothing that drives a terminal."""
    for colour in (False, True):
        talk = Conversation(ensemble, Session(), {"temperature": 0.0}, folder=None, colour=colour)
        talk.take("hi \x1b]0;x\x07")
        capsys.readouterr()
        talk.take("/why")
        shown = capsys.readouterr().out
        if colour:
            assert "\x1b]" not in shown
            assert "sure-one 5" in shown
            drawn = _why.in_colour(talk.session.last.pieces, ensemble.names)
            assert drawn.count("\x1b[36m") > 4
            assert click.unstyle(drawn) + "\n" == shown
        else:
            assert "\x1b" not in shown
            lines = shown.splitlines()
            assert lines[0].split() == ["PIECE", "BY", "sure-one", "vague-two"]
            assert lines[1].split()[:2] == ["'h'", "sure-one"]
            assert lines[-1].startswith("(all)")


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR, a pipe and a dumb terminal take none."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert _why.coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not _why.coloured()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not _why.coloured()


def test_interrupt_stops_the_answer_and_keeps_the_session(
    talk: Conversation, ensemble: Ensemble, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was said stays, the next question is answered, and Ctrl-C works as before afterwards."""
    before = signal.getsignal(signal.SIGINT)
    sure = ensemble.experts[0]
    assert isinstance(sure, Echo)
    sure.interrupt_at = b"wor"
    talk.take("hello world")
    sure.interrupt_at = b""
    assert "stopped" in capsys.readouterr().err
    answer = talk.session.last
    assert (answer.answer[:9], len(answer.answer) <= 10, answer.finish_reason) == ("hello wor", True, "interrupted")
    assert "".join(text for text, _ in answer.pieces) == answer.answer
    talk.take("next")
    assert last_words(talk)[-3:] == [answer.answer, "next", "next"]
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_stops_reading_too(talk: Conversation, ensemble: Ensemble) -> None:
    """Before the first word: an empty answer, and the next question is answered as if nothing had been."""
    sure = ensemble.experts[0]
    assert isinstance(sure, Echo)
    sure.interrupt_reading = True
    talk.take("hello world")
    sure.interrupt_reading = False
    assert (talk.session.last.answer, talk.session.last.finish_reason) == ("", "interrupted")
    talk.take("/regenerate")
    assert last_words(talk) == ["hello world", "hello world"]


def test_everything_is_kept_and_can_be_loaded(
    talk: Conversation, ensemble: Ensemble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest file of the folder is the conversation; saving and loading give it back."""
    talk.take("one")
    talk.take("/weights two=2")
    talk.take("two")
    (kept,) = tmp_path.glob("*.json")
    assert read(kept) == talk.session
    talk.take(f"/save {tmp_path / 'mine'}")
    talk.close()
    other = Conversation(ensemble, Session(), {"temperature": 0.0}, folder=tmp_path)
    other.take("/load")
    assert other.session == talk.session
    other.take("three")
    assert read(kept) == talk.session
    assert len(list(tmp_path.glob("*.json"))) <= 2
    other.take(f"/load {tmp_path / 'mine'}")
    assert other.session == talk.session
    other.take("/load absent.json")
    assert "absent.json" in capsys.readouterr().err


def test_a_conversation_goes_on_with_other_experts(ensemble: Ensemble, tmp_path: Path) -> None:
    """Weights and shares of experts that are not here are left behind, the words stay."""
    path = tmp_path / "old.json"
    old = Session(experts=("a",), weights={"a": 1.0}).asked("x").answered("y", "stop", 1, (("y", (1.0,)),))
    from gguf_fusion.session import write

    write(old, path)
    talk = Conversation(ensemble, Session(), {"temperature": 0.0}, folder=None)
    talk.take(f"/load {path}")
    talk.take("z")
    assert last_words(talk) == ["x", "y", "z", "z"]
    assert (talk.session.weights, talk.session.experts) == (None, ensemble.names)
    assert not talk.session.exchanges[0].pieces


def test_a_failed_answer_leaves_the_conversation_as_it_was(
    talk: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question that does not fit the context is told, and the session goes on."""
    talk.take("one")
    talk.take("x" * 5000)
    assert "context holds" in capsys.readouterr().err
    assert last_words(talk) == ["one", "one"]
    talk.take("two")
    assert last_words(talk)[-1] == "two"


def test_the_second_turn_reads_only_what_is_new(talk: Conversation, ensemble: Ensemble) -> None:
    """Counted: what the first turn read and wrote is not decoded again."""
    talk.take("a long first question, " * 20)
    before = [expert.n_decoded for expert in ensemble.experts]
    talk.take("short")
    new = len(b"short") * 2 + 3
    assert all(e.n_decoded - n <= new + 3 for e, n in zip(ensemble.experts, before, strict=True))


def test_seeds_differ_from_answer_to_answer(ensemble: Ensemble) -> None:
    """One seed for the conversation gives every answer its own, the same ones every time."""
    seeds = []
    for _ in range(2):
        talk = Conversation(ensemble, Session(), {"seed": 2**32 - 1}, folder=None)
        talk.take("a")
        talk.take("/regenerate")
        seeds.append(talk.session.last.seed)
    assert seeds == [0, 0]


def test_texts_of_several_lines() -> None:
    """Triple quotes hold a text together."""
    assert read_text(Typed('"""one', "two", 'three"""')) == "one\ntwo\nthree"
    assert read_text(Typed('"""one"""')) == "one"
    assert read_text(Typed('"""one', "two")) == "one\ntwo"
    assert read_text(Typed("one")) == "one"
    assert read_text(Typed()) is None


@pytest.mark.parametrize(
    ("arguments", "message"), [(["pockett"], "pocket"), (["--temp", "-1"], "temperature"), (["--stop", ""], "stop")]
)
def test_bad_input(arguments: list[str], message: str) -> None:
    """One line, before anything is loaded."""
    result = CliRunner().invoke(main, ["chat", *arguments, "--offline", "--no-history"], input="")
    assert result.exit_code in {1, 2}
    assert message in result.stderr


# ---- real experts ---------------------------------------------------------------------------------------------

COMMAND = [
    sys.executable,
    "-m",
    "gguf_fusion",
    "chat",
    "pocket",
    "--offline",
    "--seed",
    "1",
    "--lanes",
    "serial",
    "-t",
    "1",
]


@pytest.mark.model
def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """After kill -9 in the middle of an answer all that was printed is on disk, and --resume goes on from there."""
    command = [*COMMAND, "--history", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(b"Tell a long story about the sea.\n")
        chat.stdin.flush()
        shown = b""
        while len(shown) < 12:
            shown += os.read(chat.stdout.fileno(), 100)
        chat.kill()
        shown += chat.stdout.read()
    (kept,) = tmp_path.glob("*.json")
    assert read(kept).last.answer.encode().startswith(shown)
    again = subprocess.run(
        [*command, "--resume"], input=b"/undo\n", capture_output=True, check=True, timeout=120
    ).stdout.decode()
    assert "(1 question)" in again
    assert "taken back: Tell a long story about the sea." in again


@pytest.mark.model
@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal(tmp_path: Path, no_color: bool) -> None:
    """Ctrl-C stops the answer, the session goes on, /why has colours unless NO_COLOR, Ctrl-D ends it."""
    place = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    place.pop("NO_COLOR", None)
    if no_color:
        place["NO_COLOR"] = "1"
    child, descriptor = pty.fork()
    if child == 0:  # pragma: no cover (the new process)
        os.execvpe(COMMAND[0], [*COMMAND, "--history", str(tmp_path)], place)
    seen = ""

    def until(pattern: str, since: int) -> int:
        nonlocal seen
        end = time.monotonic() + 60
        while not (found := re.search(pattern, seen[since:])):
            assert time.monotonic() < end, repr(seen[since:])
            if select.select([descriptor], [], [], 1)[0]:
                seen += os.read(descriptor, 4096).decode("utf-8", "replace")
        return since + found.end()

    try:
        at = until(r">>>", 0)
        os.write(descriptor, b"Tell a very long story.\r")
        at = until(r"\x1b\[\?2004l\W*[A-Za-z]{2}", at)  # the line editor has gone, the answer has begun
        os.write(descriptor, b"\x03")
        at = until(r"stopped; ", at)
        at = until(r">>>", at)
        os.write(descriptor, b"/why\r")
        at = until(r"2004l", at)
        end = until(r">>>", until(r"%", at))
        assert (re.search(r"\x1b\[3[3-6]m", seen[at:end]) is not None) is not no_color
        os.write(descriptor, b"\x03")
        until(r">>>", until(r"Ctrl-D or /quit", end))
        os.write(descriptor, b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        os.close(descriptor)
