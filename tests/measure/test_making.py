"""Levels made from a reference: complete or not at all, once, and only with leave from a quantized file."""

import shutil
from typing import NamedTuple

import pytest

from gguf_fusion.errors import LoadError, NoSpaceError, UsageError
from gguf_fusion.gguf_info import read
from gguf_fusion.hub.store import cache_dir
from gguf_fusion.measure.making import check_levels, made, needs_leave


def make(reference, level, requantize=False):
    return made(reference, level, requantize=requantize, n_threads=1, tell=lambda text: None)


def test_levels_are_checked():
    """Levels are taken in any case; an unknown one names the nearest."""
    assert check_levels(["q4_k_m", "Q8_0", "q8_0"]) == ["Q4_K_M", "Q8_0"]
    with pytest.raises(UsageError, match="Q4_K_M"):
        check_levels(["Q4_KM"])
    with pytest.raises(UsageError, match="no level"):
        check_levels([" "])


def test_a_level_is_made_once(tiny_model, same_process):
    """The file is complete and is found the next time; from an unquantized reference it is not quantized twice."""
    file, twice = make(tiny_model(), "Q8_0")
    assert read(file).quant == "Q8_0" and not twice
    assert make(tiny_model(), "Q8_0") == (file, False)
    assert same_process == ["write_level"]
    assert not list((cache_dir() / "partial").iterdir())


def test_levels_of_quantized_files_need_leave(tiny_model, same_process):
    """A level of a level is refused unless asked for, and then told apart; its own level is itself."""
    base, _ = make(tiny_model(), "Q8_0")
    with pytest.raises(UsageError, match="--requantize"):
        make(base, "Q4_0")
    with pytest.raises(UsageError, match="quantized already"):
        needs_leave(read(base), ["Q8_0", "Q4_0"], requantize=False)
    needs_leave(read(base), ["Q8_0"], requantize=False)
    assert make(base, "Q8_0") == (base, False)
    file, twice = make(base, "Q4_0", requantize=True)
    assert read(file).quant == "Q4_0" and twice


def test_what_cannot_be_written_says_why(tiny_model, same_process):
    """The native reason is in the message, and nothing that looks like a level stays behind."""
    with pytest.raises(LoadError, match=r"Q2_K_S: .*importance matrix"):
        make(tiny_model(), "Q2_K_S")
    assert not list((cache_dir() / "quants").rglob("*.gguf"))


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_no_space_is_told_before_writing(tiny_model, same_process, monkeypatch):
    """A full disk is refused with both figures before the native library starts."""
    reference = tiny_model()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(NoSpaceError, match=r"MB needed, 1 MB free"):
        make(reference, "Q8_0")
    assert same_process == []


def test_a_disk_that_fills_up_is_told_as_such(tiny_model, monkeypatch):
    """If writing fails and the disk is full by then, the message speaks of space."""
    from gguf_fusion.measure import child

    frees = iter([10**12, 10**6])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, next(frees)))

    def fail(*_):
        raise LoadError("basic_ios::clear: iostream error")

    monkeypatch.setattr(child, "call", fail)
    with pytest.raises(NoSpaceError, match="not enough disk space"):
        make(tiny_model(), "Q8_0")


def test_sizes_are_not_guessed_too_low(tiny_model, same_process):
    """The space asked for covers what is written, for every level."""
    from gguf_fusion.measure.making import _bits

    info = read(tiny_model())
    for level in ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16"):
        asked = sum(_bits(level, tensor) * tensor.n_values for tensor in info.tensors) // 8
        written = sum(tensor.size_bytes for tensor in read(make(info.path, level)[0]).tensors)
        assert 0.9 * written < asked < 2.2 * written, level
