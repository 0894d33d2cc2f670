"""What an expert may be asked for, and what it will cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_fusion.errors import LoadError, UsageError
from gguf_fusion.experts import settings as module
from gguf_fusion.experts.settings import Settings, cache_bytes, check_against_model, depends_on_threads, flash
from gguf_fusion.gguf_info import ModelInfo, read


@pytest.fixture
def info(write_gguf: Callable[..., Path]) -> ModelInfo:
    """A model with 2 heads of 32 values, one of them with K and V, in 3 layers."""
    fields = {"llama.embedding_length": 64, "llama.attention.head_count_kv": 1, "llama.block_count": 3}
    return read(write_gguf(fields=fields))


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_ctx": 0}, {"n_ctx": 2**31}, {"n_ctx": True}, {"n_ctx": 1.5}, {"n_ctx": "8"}, {"n_batch": 0},
        {"n_ubatch": -1}, {"n_threads": 513}, {"n_threads": -1}, {"n_gpu_layers": -2}, {"max_rows": 0},
        {"type_k": "q3"},
        {"type_v": None}, {"max_rows": 9, "n_batch": 8}, {"max_rows": 9, "n_ctx": 8},
    ],
)  # fmt: skip
def test_values_out_of_range(wrong: dict[str, object]) -> None:
    """What native code would abort on, or misread, is refused by name."""
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Settings(**wrong)  # type: ignore[arg-type]


def test_unknown_settings_are_errors() -> None:
    """A misspelt setting is not ignored."""
    with pytest.raises(TypeError, match="n_ctxx"):
        Settings(n_ctxx=4)  # type: ignore[call-arg]


def test_cache_size(info: ModelInfo) -> None:
    """Cells are padded to 256; bytes per cell are layers x heads x (key + value) x type size."""
    assert cache_bytes(info, Settings(n_ctx=100)) == 256 * 3 * 1 * (32 + 32) * 2
    assert cache_bytes(info, Settings(n_ctx=257, type_k="q8_0")) == int(512 * 3 * (32 * 1.0625 + 32 * 2))


def test_more_memory_than_there_is(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names expert, context, layers, bytes asked and free, and two remedies."""
    monkeypatch.setattr(module, "free_ram_bytes", lambda: 4_000_000_000)
    with pytest.raises(LoadError) as caught:
        check_against_model("tiny", info, Settings(n_ctx=50_000_000))
    message = str(caught.value)
    for word in (
        "'tiny'",
        "50000000 tokens",
        "0 layers",
        "MB asked",
        "4000 MB free",
        "smaller context",
        "smaller quant",
    ):
        assert word in message
    check_against_model("tiny", info, Settings(n_ctx=5_000))


def test_quantized_cache_rules(info: ModelInfo, write_gguf: Callable[..., Path]) -> None:
    """A quantized V cache needs flash attention; blocks must divide the head size; f16 is offered."""
    check_against_model("t", info, Settings(n_ctx=256, type_v="q8_0"))
    with pytest.raises(LoadError, match=r"flash attention.*type_v='f16'"):
        check_against_model("t", info, Settings(n_ctx=256, type_v="q8_0", flash_attn=False))
    odd = read(write_gguf("odd.gguf", fields={"llama.embedding_length": 48}))
    with pytest.raises(LoadError, match=r"head size 24.*type_k='f16'"):
        check_against_model("t", odd, Settings(n_ctx=256, type_k="q8_0"))


def test_flash_attention_by_default(info: ModelInfo) -> None:
    """Left out on the CPU where the scores are small, left to the native library elsewhere, forced where asked."""
    assert flash(info, Settings()) is False
    assert not depends_on_threads(info, Settings())
    assert flash(info, Settings(n_gpu_layers=-1)) is None
    assert flash(info, Settings(type_v="q8_0")) is None
    assert flash(info, Settings(n_ctx=1_000_000)) is None
    assert flash(info, Settings(flash_attn=True)) is True
