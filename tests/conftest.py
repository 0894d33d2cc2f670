"""Fixtures that every test gets: no settings of the user, caches of its own, no network by accident."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

_SETTINGS = ("GGUF_FUSION_", "HF_", "HUGGINGFACE_", "PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT")


@pytest.fixture(autouse=True)
def clean_environ(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the user's settings and point all caches into the test's own directory.

    Tests of real models (marker ``model``) keep the cache that ``gguf-fusion pull pocket`` has filled.
    """
    real = request.node.get_closest_marker("model") is not None
    for name in list(os.environ):
        if name.startswith(_SETTINGS) and not (real and name in ("GGUF_FUSION_CACHE", "HF_HOME", "HF_HUB_CACHE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if not real:
        monkeypatch.setenv("GGUF_FUSION_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


def gguf_bytes(
    *,
    architecture: str = "llama",
    fields: dict[str, object] | None = None,
    tensors: int | Mapping[str, np.ndarray] = 2,
    version: int = 3,
    order: str = "<",
    n_tokens: int = 5,
    payload: bytes = b"",
) -> bytes:
    """A tiny GGUF file: given float32 tensors, or so many of 32 values each; a vocabulary of ``n_tokens`` pieces."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack(f"{order}Q", len(raw)) + raw

    def value(item: object) -> bytes:
        if isinstance(item, bool):
            return struct.pack(f"{order}I?", 7, item)
        if isinstance(item, int):
            return struct.pack(f"{order}II", 4, item)
        if isinstance(item, float):
            return struct.pack(f"{order}If", 6, item)
        if isinstance(item, str):
            return struct.pack(f"{order}I", 8) + text(item)
        assert isinstance(item, list)
        if item and isinstance(item[0], str):
            return struct.pack(f"{order}IIQ", 9, 8, len(item)) + b"".join(map(text, item))
        return struct.pack(f"{order}IIQ{len(item)}i", 9, 5, len(item), *item)

    known: dict[str, object] = {
        "general.architecture": architecture,
        "general.name": "tiny",
        "general.file_type": 15,
        f"{architecture}.block_count": 1,
        f"{architecture}.context_length": 64,
        f"{architecture}.embedding_length": 8,
        f"{architecture}.attention.head_count": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(n_tokens)],
        "tokenizer.ggml.add_bos_token": False,
        **(fields or {}),
    }
    if isinstance(tensors, int):
        ones = np.frombuffer(b"\x01" * 128, np.float32)
        names = ["token_embd.weight", *(f"blk.{index}.attn_q.weight" for index in range(tensors - 1))]
        tensors = dict.fromkeys(names[:tensors], ones)
    header = b"GGUF" + struct.pack(f"{order}IQQ", version, len(tensors), len(known))
    header += b"".join(text(key) + value(item) for key, item in known.items())
    data = b""
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        header += text(name) + struct.pack(f"{order}I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += tensor.astype(np.float32).tobytes()
        data += b"\0" * (-len(data) % 32)
    header += b"\0" * (-len(header) % 32)
    return header + data + payload


@pytest.fixture(name="gguf_bytes")
def _gguf_bytes() -> Callable[..., bytes]:
    """The function that makes a tiny GGUF file."""
    return gguf_bytes


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a tiny GGUF file of that name and returns its path."""

    def write(name: str = "tiny.gguf", **options: object) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gguf_bytes(**options))  # type: ignore[arg-type]
        return path

    return write
