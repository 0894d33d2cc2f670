"""A model small enough to be loaded, quantized and measured in a moment."""

from importlib import import_module

import numpy as np
import pytest

from gguf_fusion.measure import child

WIDTH, LAYERS, HEADS = 256, 2, 4


def byte_letters():
    """The letter that byte-level tokenizers write for each byte: printable ones for themselves, others from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tiny_tensors(seed):
    """Weights of a llama with two blocks, drawn so that its law depends on what it read."""
    rng = np.random.default_rng(seed)
    n_vocab = 256 + 3
    tensors = {"token_embd.weight": rng.normal(size=(n_vocab, WIDTH))}
    for layer in range(LAYERS):
        tensors[f"blk.{layer}.attn_norm.weight"] = np.ones(WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"blk.{layer}.{name}.weight"] = rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
        tensors[f"blk.{layer}.ffn_norm.weight"] = np.ones(WIDTH)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            tensors[f"blk.{layer}.{name}.weight"] = rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
    tensors["output_norm.weight"] = np.ones(WIDTH)
    tensors["output.weight"] = rng.normal(size=(n_vocab, WIDTH)) / WIDTH**0.5
    return tensors


@pytest.fixture
def tiny_model(write_gguf):
    """A function that writes a model of 1.5 million float32 weights; ``extra`` is one more piece of its vocabulary."""

    def write(name="tiny-F32.gguf", seed=0, extra="th"):
        fields = {
            "general.file_type": 0, "llama.block_count": LAYERS, "llama.context_length": 512,
            "llama.embedding_length": WIDTH, "llama.feed_forward_length": WIDTH, "llama.attention.head_count": HEADS,
            "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": WIDTH // HEADS,
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*byte_letters(), extra, "<a>", "<b>"],
            "tokenizer.ggml.token_type": [1] * 257 + [3, 3], "tokenizer.ggml.merges": [" ".join(extra)],
            "tokenizer.ggml.eos_token_id": 258, "tokenizer.ggml.bos_token_id": 257,
        }  # fmt: skip
        return write_gguf(name, fields=fields, tensors=tiny_tensors(seed))

    return write


@pytest.fixture
def same_process(monkeypatch):
    """What would run in processes of its own runs in this one, which is faster; returns what was called."""
    called = []

    def call(module, function, *arguments):
        called.append(function)
        return getattr(import_module(module), function)(*arguments)

    monkeypatch.setattr(child, "call", call)
    return called
