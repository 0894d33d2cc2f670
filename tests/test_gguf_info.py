"""The header reader: what it finds in good files, and what it says about bad ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_fusion import gguf_info, hub
from gguf_fusion.errors import ModelFileError

Write = Callable[..., Path]


def test_reads_the_facts_of_a_small_file(write_gguf: Write) -> None:
    """Architecture, sizes, vocabulary and template come out as they were written."""
    path = write_gguf(fields={"tokenizer.chat_template": "{{ x }}", "llama.attention.sliding_window": 16})
    info = gguf_info.read(path)
    assert (info.architecture, info.name, info.quant, info.n_vocab) == ("llama", "tiny", "Q4_K_M", 5)
    assert (info.n_layers, info.n_ctx_train, info.n_embd, info.head_size_k) == (1, 64, 8, 4)
    assert info.n_head == info.n_head_kv == (2,)
    assert (info.sliding_window, info.add_bos, info.chat_template) == (16, False, "{{ x }}")
    assert info.size_bytes == path.stat().st_size
    assert (info.n_params, info.bpw) == (64, 32.0)
    assert info.layer_bytes == {None: 128, 0: 128}


def test_per_layer_settings_are_kept(write_gguf: Write) -> None:
    """A head count that differs by layer stays a list, one entry a layer."""
    info = gguf_info.read(write_gguf(fields={"llama.block_count": 3, "llama.attention.head_count_kv": [1, 2, 4]}))
    assert info.n_head_kv == (1, 2, 4)
    assert info.n_head == (2, 2, 2)


def test_named_templates_are_found(write_gguf: Write) -> None:
    """A file with a default and a tool template offers both."""
    fields = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    assert dict(gguf_info.read(write_gguf(fields=fields)).chat_templates) == {"default": "a", "tool_use": "b"}


def test_digest_follows_the_tokenizer_only(write_gguf: Write) -> None:
    """The digest changes with the vocabulary, and not with anything else."""
    digest = gguf_info.read(write_gguf("a.gguf")).tokenizer_digest
    assert digest == gguf_info.read(write_gguf("b.gguf", fields={"general.name": "other"}, tensors=3)).tokenizer_digest
    assert digest != gguf_info.read(write_gguf("c.gguf", n_tokens=6)).tokenizer_digest


def test_long_vocabulary_is_stepped_over_quickly(write_gguf: Write) -> None:
    """262,144 pieces take less than 0.3 s and are counted exactly."""
    path = write_gguf(n_tokens=262_144)
    begin = time.perf_counter()
    info = gguf_info.read(path)
    assert info.n_vocab == 262_144
    assert time.perf_counter() - begin < 0.3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an empty file"),
        (b"\0" * 4096, "zero bytes"),
        (b"<!DOCTYPE html><html>Not here</html>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
        (b'{"error":"Repository not found"}', "server's error message"),
        (b"lmgg" + b"\1" * 60, "before GGUF"),
        (b"PK\x03\x04" + b"\1" * 60, "PyTorch"),
        (b"\x40\0\0\0\0\0\0\0" + b'{"__metadata__"', "safetensors"),
        (b"\x1f\x8b" + b"\1" * 60, "unpack"),
        (b"random bytes that mean nothing at all", "something else"),
        (b"GGUF", "something else"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    """Whatever is not a GGUF is said to be what it is."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=said):
        gguf_info.read(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": 1}, "GGUF version 1"),
        ({"version": 4}, "GGUF version 4.*update"),
        ({"order": ">"}, "big-endian"),
    ],
)
def test_unreadable_versions_are_explained(write_gguf: Write, options: dict[str, object], said: str) -> None:
    """Old, future and big-endian files get their own advice."""
    with pytest.raises(ModelFileError, match=said):
        gguf_info.read(write_gguf(**options))


def test_every_truncation_is_noticed(gguf_bytes: Callable[..., bytes], tmp_path: Path) -> None:
    """A file cut anywhere, in its header or in its tensors, is never taken for a whole one."""
    content = gguf_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(24, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFileError, match="truncated"):
            gguf_info.read(path)


def test_nonsense_in_the_header_is_an_error_of_ours(gguf_bytes: Callable[..., bytes], tmp_path: Path) -> None:
    """Flipping any byte of the header gives a result or a ModelFileError, never another exception."""
    content = gguf_bytes()
    path = tmp_path / "flipped.gguf"
    for index in range(0, len(content) - 256, 3):
        path.write_bytes(content[:index] + bytes([content[index] ^ 0xFF]) + content[index + 1 :])
        try:
            gguf_info.read(path)
        except ModelFileError as error:
            assert str(path) in str(error)  # noqa: PT017 - most damage is read without an error


@pytest.mark.parametrize("name", ["m.gguf.part1of2", "m.gguf.part01", "m.gguf-split-a", "m.gguf.aa"])
def test_pieces_cut_by_size_are_explained(gguf_bytes: Callable[..., bytes], tmp_path: Path, name: str) -> None:
    """The first and the later pieces of a file that was cut by size both say how to join them."""
    path = tmp_path / name
    for content in (gguf_bytes()[:-100], b"\x55" * 200):
        path.write_bytes(content)
        if name.endswith(".aa"):
            continue  # too short a suffix to be sure
        with pytest.raises(ModelFileError, match="join all of them"):
            gguf_info.read(path)


def test_missing_and_unreadable_paths(tmp_path: Path) -> None:
    """No file and a directory have their own messages."""
    with pytest.raises(ModelFileError, match="no such file"):
        gguf_info.read(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="a directory"):
        gguf_info.read(tmp_path)


def test_any_shard_means_all(write_gguf: Write) -> None:
    """Sizes and tensors of all shards are summed, whichever is named; the path is the first one's."""
    names = [f"m-{index:05d}-of-00003.gguf" for index in (1, 2, 3)]
    paths = [write_gguf(name, tensors=index + 1, fields={"split.count": 3}) for index, name in enumerate(names)]
    info = gguf_info.read(paths[1])
    assert info.path == paths[0]
    assert info.n_shards == 3
    assert len(info.tensors) == 1 + 2 + 3
    assert info.size_bytes == sum(path.stat().st_size for path in paths)


def test_missing_shards_are_named(write_gguf: Write) -> None:
    """A missing shard is named, and so is a shard that lost its name."""
    paths = [write_gguf(f"m-{index:05d}-of-00003.gguf", fields={"split.count": 3}) for index in (1, 2, 3)]
    paths[2].unlink()
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003\.gguf"):
        gguf_info.read(paths[0])
    renamed = paths[0].rename(paths[0].with_name("first.gguf"))
    with pytest.raises(ModelFileError, match="consists of 3 files"):
        gguf_info.read(renamed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "bert"}, "encoder"),
        ({"architecture": "bert", "tensors": 0}, "encoder"),
        ({"fields": {"llama.attention.causal": False}}, "encoder"),
        ({"architecture": "t5"}, "encoder-decoder"),
        ({"architecture": "dream"}, "diffusion"),
        ({"tensors": 0}, "vocabulary only"),
        ({"fields": {"general.type": "adapter"}}, "adapter"),
        ({"n_tokens": 0}, "no vocabulary"),
    ],
)
def test_models_that_write_no_text_are_refused(write_gguf: Write, options: dict[str, object], said: str) -> None:
    """Encoders, bare vocabularies, adapters and diffusion models are refused with the reason."""
    info = gguf_info.read(write_gguf(**options))
    with pytest.raises(ModelFileError, match=f"does not generate text.*{said}"):
        gguf_info.require_generative(info)


def test_ordinary_models_are_accepted(write_gguf: Write) -> None:
    """A causal model with weights and a vocabulary passes."""
    gguf_info.require_generative(gguf_info.read(write_gguf()))


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "n_vocab", "n_layers", "window", "has_template"),
    [
        ("smollm2-135m-instruct", 49_152, 30, None, True),
        ("gemma-3-270m", 262_144, 18, 512, False),
        ("qwen2.5-coder-0.5b-instruct", 151_936, 24, None, True),
    ],
)
def test_the_three_default_experts(
    name: str, n_vocab: int, n_layers: int, window: int | None, has_template: bool
) -> None:
    """The real files say what their model cards say, and half of one is called truncated."""
    path = hub.locate(name)
    begin = time.perf_counter()
    info = gguf_info.read(path)
    assert time.perf_counter() - begin < 0.3
    assert (info.n_vocab, info.n_layers, info.sliding_window) == (n_vocab, n_layers, window)
    assert (info.chat_template is not None) == has_template
    gguf_info.require_generative(info)


@pytest.mark.model
def test_half_of_a_real_file_is_truncated(tmp_path: Path) -> None:
    """The first half of a real download is called truncated, with both sizes."""
    whole = hub.locate("smollm2-135m-instruct").read_bytes()
    half = tmp_path / "half.gguf"
    half.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=rf"truncated.*{len(whole)}.*{len(whole) // 2}"):
        gguf_info.read(half)
