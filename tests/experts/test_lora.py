"""LoRA adapters: an adapter of zeros changes nothing, another one does, and one for another model is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_fusion import hub
from gguf_fusion.errors import LoadError
from gguf_fusion.experts.llama import LlamaExpert

NAME = "smollm2-135m-instruct"
WIDTH, RANK = 576, 4


def adapter(path: Path, *, scale: float, width: int = WIDTH) -> str:
    """A LoRA GGUF that changes the first layer's query matrix."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    writer.add_tensor("blk.0.attn_q.weight.lora_a", rng.normal(size=(RANK, width)).astype(np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", (scale * rng.normal(size=(width, RANK))).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def read(**settings: object) -> tuple[np.ndarray, np.ndarray]:
    """(row, hidden state) after a short text."""
    with LlamaExpert.load(hub.locate(NAME), n_ctx=64, n_threads=1, hidden=True, **settings) as expert:
        row = expert.evaluate(expert.tokenize(b"The capital of France is"))[0].copy()
        assert expert.hidden is not None
        return row, expert.hidden[-1].copy()


@pytest.mark.model
def test_zeros_change_nothing_and_others_do(tmp_path: Path) -> None:
    """Rows and hidden states follow the adapter."""
    plain = read()
    same = read(lora=adapter(tmp_path / "zero.gguf", scale=0.0))
    other = read(lora=adapter(tmp_path / "other.gguf", scale=0.05))
    for a, b, c in zip(plain, same, other, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-4)
        assert np.abs(c - a).max() > 0.01


@pytest.mark.model
@pytest.mark.parametrize("kind", ["missing", "another model's", "no adapter"])
def test_what_does_not_fit_is_refused(tmp_path: Path, kind: str) -> None:
    """The message names the file and what was expected."""
    path = tmp_path / "adapter.gguf"
    if kind == "another model's":
        adapter(path, scale=0.1, width=64)
    elif kind == "no adapter":
        path.write_bytes(b"GGUF, but not really")
    with pytest.raises(LoadError, match=r"adapter\.gguf"):
        read(lora=str(path))
