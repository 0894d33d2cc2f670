"""Conversations: history editing, files that survive a kill, files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_fusion.errors import UsageError
from gguf_fusion.session import Exchange, Journal, Session, read, to_json, write

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SHARES = st.tuples(TEXT, st.lists(st.floats(0, 1), max_size=2).map(tuple))
EXCHANGES = st.builds(
    Exchange,
    question=TEXT,
    answer=TEXT,
    finish_reason=st.sampled_from(["stop", "length", "interrupted"]),
    seed=st.integers(0, 2**32 - 1),
    pieces=st.lists(SHARES, max_size=3).map(tuple),
)
SESSIONS = st.builds(
    Session,
    ensemble=TEXT,
    experts=st.lists(TEXT, max_size=3).map(tuple),
    system=st.none() | TEXT,
    weights=st.none() | st.dictionaries(TEXT, st.floats(0, 9), max_size=2),
    strategy=st.none() | TEXT,
    exchanges=st.lists(EXCHANGES, max_size=3).map(tuple),
)


def talk() -> Session:
    return (
        Session(system="Be brief.").asked("Hi").answered("Hello", "stop", 1).asked("Why?").answered("So", "length", 2)
    )


@given(SESSIONS)
def test_a_file_gives_the_conversation_back(tmp_path_factory: pytest.TempPathFactory, session: Session) -> None:
    """Whatever was said, in whatever script."""
    path = tmp_path_factory.mktemp("s") / "deep" / "talk.json"
    write(session, path)
    assert read(path) == session
    assert [p.name for p in path.parent.iterdir()] == ["talk.json"]


def test_messages_are_what_the_experts_read() -> None:
    """System first, then turn by turn; an open answer is not there yet."""
    assert [m["content"] for m in talk().messages()] == ["Be brief.", "Hi", "Hello", "Why?", "So"]
    assert [m["role"] for m in talk().asked("x").messages()[-2:]] == ["assistant", "user"]


def test_history_can_be_edited() -> None:
    """Undo takes a turn back, an edit asks another question in its place, regenerating asks the same."""
    assert talk().undone().messages()[-1]["content"] == "Hello"
    assert talk().edited("How?").messages()[-1] == {"role": "user", "content": "How?"}
    assert talk().edited().messages()[-1] == {"role": "user", "content": "Why?"}
    for change in (Session().undone, Session().edited):
        with pytest.raises(UsageError, match="empty"):
            change()


@given(st.lists(TEXT, max_size=6), st.integers(0, 10))
def test_a_killed_process_loses_nothing_that_was_shown(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cut: int
) -> None:
    """Every step that was written in full is there; half a line is left out."""
    path = tmp_path_factory.mktemp("s") / "talk.json"
    session = talk().asked("And?")
    journal = Journal(path)
    journal.write(session)
    for text in texts:
        journal.add(text)
    journal.close()
    with path.open("a") as stream:
        stream.write('"half a line'[:cut])
    found = read(path)
    assert found.last.answer == "".join(texts)
    assert found.last.finish_reason == "interrupted"
    assert found.undone() == talk()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"[]",
        b'{"format": 2}',
        b'{"format": 1}',
        b"\xff",
        b'{"format": 1, "ensemble": 3}',
        to_json(talk()).replace('"Hi"', "7").encode(),
        to_json(talk()).encode() + b"\n7\n",
    ],
)
def test_other_files_are_one_clear_error(tmp_path: Path, content: bytes) -> None:
    """It names the file and says what was expected."""
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.json: expected a conversation"):
        read(path)
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "absent")


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    """A file in the way of a directory."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write(talk(), tmp_path / "file" / "talk.json")
    assert json.loads(to_json(talk()))["format"] == 1
