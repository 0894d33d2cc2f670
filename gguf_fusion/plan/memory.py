"""What one expert takes: weights per layer, cache, buffers; from its file's header, or guessed from its size."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gguf_fusion.gguf_info import ModelInfo

CACHE_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5}
"""Bits per value of cache types, block scales included."""

ROWS = 8
UBATCH = 128

_BASE_BYTES = 12_000_000
"""The native library's own structures for one model and context (measured, three small models on a CPU)."""

_TOKEN_BYTES, _MERGE_BYTES = 110, 90
"""Per entry of the native vocabulary and of its merges (measured likewise)."""

_SMALL_SCORES = 128 << 20
_CELL = 256


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one expert. ``weights``: the file;  ``kv``: cache;  ``buffers``: everything else."""

    weights: int
    kv: int
    buffers: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.weights + self.kv + self.buffers


@dataclass(frozen=True, slots=True)
class Shape:
    """What planning must know of an expert.

    layer_bytes : weights of each block, in order;  other_bytes : embeddings and the rest
    output_bytes: the part of ``other_bytes`` that is read at every step (output matrix, tied or not)
    kv_values   : (K values, V values) per layer and cell;  estimated : guessed from the size of the file alone
    """

    name: str
    layer_bytes: tuple[int, ...]
    other_bytes: int
    output_bytes: int
    kv_values: tuple[tuple[int, int], ...]
    n_vocab: int
    n_merges: int
    n_embd: int
    n_ff: int
    n_head: int
    n_ctx_train: int = 0
    estimated: bool = False

    @property
    def n_layers(self) -> int:
        """Blocks."""
        return len(self.layer_bytes)

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum(self.layer_bytes) + self.other_bytes

    def kv_layer(self, layer: int, n_ctx: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes of one layer's cache."""
        k, v = self.kv_values[layer]
        return int(cells(n_ctx) * (k * CACHE_BITS[type_k] + v * CACHE_BITS[type_v]) / 8)

    def kv(self, n_ctx: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes of the whole cache."""
        return sum(self.kv_layer(layer, n_ctx, type_k, type_v) for layer in range(self.n_layers))

    def compute(self, n_ctx: int, ubatch: int = UBATCH, rows: int = ROWS) -> int:
        """Bytes of one compute buffer: activations, attention scores where they are kept, output rows."""
        batch = min(ubatch, n_ctx)
        scores = 4 * batch * cells(n_ctx) * self.n_head
        kept = scores if scores <= _SMALL_SCORES else 0  # beyond, flash attention keeps none
        return 4 * batch * (3 * self.n_ff + 8 * self.n_embd) + kept + 4 * self.n_vocab * rows

    def buffers(self, n_ctx: int, ubatch: int = UBATCH, rows: int = ROWS) -> int:
        """Bytes of RAM beside weights and cache: compute buffer, output rows, cells, the native vocabulary."""
        vocabulary = _TOKEN_BYTES * self.n_vocab + _MERGE_BYTES * self.n_merges
        return (
            _BASE_BYTES + vocabulary + self.compute(n_ctx, ubatch, rows) + 4 * self.n_vocab * rows + 64 * cells(n_ctx)
        )

    def need(
        self, *, n_ctx: int, type_k: str = "f16", type_v: str = "f16", ubatch: int = UBATCH, rows: int = ROWS
    ) -> Need:
        """What the expert takes on the CPU, with the context filled."""
        return Need(self.weights, self.kv(n_ctx, type_k, type_v), self.buffers(n_ctx, ubatch, rows))


def cells(n_ctx: int) -> int:
    """Cache cells the native library allocates: padded to a multiple of 256."""
    return -(-n_ctx // _CELL) * _CELL


def shape_of(name: str, info: ModelInfo) -> Shape:
    """The shape of a model whose file is here."""
    sums = info.layer_bytes
    layers = tuple(sums.get(layer, 0) for layer in range(info.n_layers))
    other = sum(size for layer, size in sums.items() if layer is None or layer >= info.n_layers)
    embeddings = {tensor.name: tensor.size_bytes for tensor in info.tensors if tensor.layer is None}
    output = embeddings.get("output.weight", embeddings.get("token_embd.weight", 0))
    merges = info.metadata.get("tokenizer.ggml.merges")
    n_merges = info.n_vocab if info.tokenizer == "gpt2" and merges is None else 0
    return Shape(
        name=name,
        layer_bytes=layers,
        other_bytes=other,
        output_bytes=output,
        kv_values=tuple(_kv_values(info, layer) for layer in range(info.n_layers)),
        n_vocab=info.n_vocab,
        n_merges=n_merges,
        n_embd=info.n_embd,
        n_ff=_n_ff(info),
        n_head=max(info.n_head, default=1),
        n_ctx_train=info.n_ctx_train,
    )


def _kv_values(info: ModelInfo, layer: int) -> tuple[int, int]:
    """K and V values per cell of a layer; models with compressed attention keep one latent vector."""
    rank = info.metadata.get(f"{info.architecture}.attention.kv_lora_rank")
    if isinstance(rank, int) and rank:
        rope = info.metadata.get(f"{info.architecture}.rope.dimension_count")
        return rank + (rope if isinstance(rope, int) else 0), 0
    heads = info.n_head_kv[layer] if layer < len(info.n_head_kv) else 0
    return heads * info.head_size_k, heads * info.head_size_v


def _n_ff(info: ModelInfo) -> int:
    value = info.metadata.get(f"{info.architecture}.feed_forward_length", 0)
    found = [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, int)]
    return max(found, default=0) or 4 * info.n_embd


def guessed(name: str, size_bytes: int) -> Shape:
    """A shape for a file that is not here yet: that of a usual model of this size at about 4.8 bits per weight."""
    billions = size_bytes * 8 / 4.8 / 1e9
    n_layers, n_embd, kv_heads = next(shape for limit, shape in _USUAL if billions <= limit)
    n_vocab = 150_000
    output = min(size_bytes // 3, n_vocab * n_embd * 6 // 8)
    layer = (size_bytes - output) // n_layers
    layers = (layer,) * n_layers
    return Shape(
        name=name,
        layer_bytes=layers,
        other_bytes=size_bytes - sum(layers),
        output_bytes=output,
        kv_values=((kv_heads * 128, kv_heads * 128),) * n_layers,
        n_vocab=n_vocab,
        n_merges=n_vocab,
        n_embd=n_embd,
        n_ff=4 * n_embd,
        n_head=max(8, n_embd // 128),
        estimated=True,
    )


def scaled(shape: Shape, size_bytes: int) -> Shape:
    """The shape of another quant of the same model, by the size of its file: every tensor shrinks alike."""
    ratio = size_bytes / shape.weights
    return replace(
        shape,
        layer_bytes=tuple(int(ratio * layer) for layer in shape.layer_bytes),
        other_bytes=int(ratio * shape.other_bytes),
        output_bytes=int(ratio * shape.output_bytes),
        estimated=True,
    )


def bits_per_weight(text: str) -> float | None:
    """Bits per weight by the quant that is named in a file's name or a reference; None where none is."""
    found = [name for name in _BITS if re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9_])", text, re.IGNORECASE)]
    return _BITS[found[-1]] if found else None


_BITS = {
    "Q2_K": 3.16, "Q3_K_S": 3.64, "Q3_K_M": 4.0, "Q3_K_L": 4.3, "IQ3_M": 3.77, "IQ4_XS": 4.46, "IQ4_NL": 4.68,
    "Q4_0": 4.66, "Q4_1": 5.12, "Q4_K_S": 4.67, "Q4_K_M": 4.89, "Q5_0": 5.57, "Q5_1": 6.04, "Q5_K_S": 5.57,
    "Q5_K_M": 5.7, "Q6_K": 6.56, "Q8_0": 8.5, "F16": 16.0, "BF16": 16.0,
}  # fmt: skip
"""Of a whole file, tables included, for a model of 8 billion weights (llama.cpp, tools/quantize/README.md)."""


def size_by_name(text: str) -> int:
    """Bytes of a file at about 4.8 bits per weight, by the billions in a model's name; 4 where none stand there."""
    found = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)b\b", text.lower())
    billions = float(found[1]) if found else _UNNAMED_BILLIONS
    return int(billions * 1e9 * 4.8 / 8)


_UNNAMED_BILLIONS = 4.0

_USUAL = (
    (0.7, (24, 896, 2)),
    (2.2, (28, 1536, 4)),
    (4.5, (32, 2560, 8)),
    (9.9, (36, 4096, 8)),
    (16.0, (48, 5120, 8)),
    (float("inf"), (64, 6144, 8)),
)
"""Up to so many billions of weights: usual (layers, width, KV heads of 128)."""
