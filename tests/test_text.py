"""Streaming text: whole characters, stop strings that neither leak nor swallow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_fusion.errors import SamplingError
from gguf_fusion.text import TextStream


def streamed(data: bytes, stops: tuple[str, ...], cuts: list[int]) -> tuple[str, str | None]:
    stream, text, start = TextStream(stops), "", 0
    for cut in [*sorted(cuts), len(data)]:
        text += stream.push(data[start:cut])
        start = max(start, cut)
    return text + stream.finish(), stream.stopped


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_any_split_gives_the_same_text(data: bytes, cuts: list[int]) -> None:
    """Joined pieces equal the text decoded at once, for any bytes and any split."""
    cuts = [min(cut, len(data)) for cut in cuts]
    assert streamed(data, (), cuts)[0] == data.decode("utf-8", "replace")


@given(st.text(alphabet="ab€x", max_size=30), st.lists(st.integers(0, 60), max_size=8))
def test_stops_cut_exactly(text: str, cuts: list[int]) -> None:
    """The text ends right before the first stop string, wherever the bytes were split."""
    data = text.encode()
    first = min((at for stop in ("ab", "€x") if (at := text.find(stop)) >= 0), default=len(text))
    assert streamed(data, ("ab", "€x"), [min(c, len(data)) for c in cuts])[0] == text[:first]


def test_emoji_waits_until_complete() -> None:
    """No broken character is ever shown."""
    stream = TextStream()
    shown = [stream.push(bytes([b])) for b in "a👩‍💻".encode()]
    assert "�" not in "".join(shown)
    assert "".join(shown) == "a👩‍💻"


def test_withheld_tail_appears() -> None:
    """What could have begun a stop string is released at the end (D2)."""
    stream = TextStream(["\nUser:"])
    assert stream.push(b"Hi\nUse") == "Hi"
    assert stream.finish() == "\nUse"
    stream = TextStream(["own fox"])
    assert stream.push(b"The quick brown fox") == "The quick br"
    assert stream.stopped == "own fox"


def test_empty_stop_is_refused() -> None:
    """An empty stop string would end every text."""
    with pytest.raises(SamplingError, match="at least one character"):
        TextStream([""])
