"""Streaming text: whole characters, stop strings that neither leak nor swallow."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gguf_fusion.errors import SamplingError
from gguf_fusion.text import TextStream

CUTS = st.lists(st.integers(0, 60), max_size=8)


def streamed(data: bytes, stops: tuple[str, ...], cuts: list[int]) -> tuple[str, str | None]:
    """(text, stop) of ``data`` pushed in the parts that ``cuts`` make."""
    stream, text, start = TextStream(stops), "", 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        text += stream.push(data[start:cut])
        start = max(start, cut)
    return text + stream.finish(), stream.stopped


def reference(data: bytes, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition itself: the first place where a stop is complete ends the text; there, the longest counts."""
    for end in range(len(data) + 1):
        complete = [stop for stop in stops if data[:end].endswith(stop.encode())]
        if complete:
            stop = max(complete, key=lambda s: len(s.encode()))
            return data[: end - len(stop.encode())].decode("utf-8", "replace"), stop
    return data.decode("utf-8", "replace"), None


@given(st.binary(max_size=60), CUTS)
def test_any_split_gives_the_same_text(data: bytes, cuts: list[int]) -> None:
    """Joined pieces equal the text decoded at once, for any bytes and any split."""
    assert streamed(data, (), cuts) == (data.decode("utf-8", "replace"), None)


@given(
    st.text(alphabet="abc€", max_size=30),
    st.lists(st.text(alphabet="abc€", min_size=1, max_size=4), max_size=3).map(tuple),
    CUTS,
)
@example("abc", ("abcd", "bc"), [2])
@example("xabc", ("ab", "abc"), [])
def test_stops_cut_exactly(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    """With any stop strings, overlapping ones too, every split gives the text before the first complete one."""
    assert streamed(text.encode(), stops, cuts) == reference(text.encode(), stops)


@given(st.binary(max_size=40), CUTS)
def test_stops_in_broken_text_cut_exactly(data: bytes, cuts: list[int]) -> None:
    """Stop strings are found between bytes that are no text."""
    assert streamed(data + b"\xf0\x9fSTOP!", ("STOP",), cuts) == reference(data + b"\xf0\x9fSTOP!", ("STOP",))


@given(st.text(max_size=20))
def test_at_most_three_bytes_wait(text: str) -> None:
    """Without stop strings a character appears with its last byte, and not a byte later."""
    stream, shown, data = TextStream(), "", text.encode("utf-8", "replace")
    for n, byte in enumerate(data, 1):
        shown += stream.push(bytes([byte]))
        assert n - len(shown.encode()) <= 3
        assert "\ufffd" not in shown or "\ufffd" in text
    assert shown == data.decode()


def test_emoji_waits_until_complete() -> None:
    """No broken character is ever shown; joined emoji come through as they are."""
    text = "repeat: 👩‍💻🌶️한국어歪"
    stream = TextStream()
    shown = [stream.push(bytes([b])) for b in text.encode()]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == text


def test_text_that_ends_inside_a_character_is_replaced_at_the_end_only() -> None:
    """A limit may cut an emoji: one replacement character, and not before the text is over."""
    stream = TextStream()
    assert stream.push("a👩".encode()[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_stop_hides_only_what_could_begin_it() -> None:
    """Of "The quick brown fox" with the stop "own fox" exactly "The quick br" is shown."""
    stream = TextStream(["own fox"])
    assert stream.push(b"The quick brow") == "The quick br"
    assert stream.push(b"n fox jumps") == ""
    assert stream.stopped == "own fox"
    assert stream.push(b"more") == stream.finish() == ""


def test_withheld_tail_appears_at_the_end() -> None:
    """What could have begun a stop string is released when the text ends without it."""
    stream = TextStream(["\nUser:"])
    assert stream.push(b"Hi\nUse") == "Hi"
    assert stream.finish() == "\nUse"
    assert stream.stopped is None


def test_a_special_tokens_text_can_be_a_stop() -> None:
    """Stop strings are bytes of the text, whatever they mean elsewhere."""
    assert streamed(b"done<|im_end|>\n", ("<|im_end|>",), [7, 9]) == ("done", "<|im_end|>")


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_empty_stop_is_refused(stops: list[str]) -> None:
    """An empty stop string would end every text."""
    with pytest.raises(SamplingError, match="at least one character"):
        TextStream(stops)


def test_a_stop_without_bytes_is_refused() -> None:
    """Half a surrogate pair cannot occur in a text."""
    with pytest.raises(SamplingError, match="UTF-8"):
        TextStream(["\ud83d"])
