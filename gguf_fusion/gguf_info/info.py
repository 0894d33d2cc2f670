"""What a model is, from the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gguf_fusion.errors import ModelFileError
from gguf_fusion.gguf_info.header import TensorInfo, Value, read_header

SHARD = re.compile(r"(?P<base>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf\Z", re.IGNORECASE)
"""The names of a split model; every shard is a GGUF file of its own."""

_FILE_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS",
    20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
    39: "NVFP4", 40: "Q1_0",
}  # fmt: skip
_ENCODERS = frozenset(
    [
        "bert",
        "modern-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "eurobert",
        "gemma-embedding",
        "llama-embed",
        "t5encoder",
        "clip",
        "wavtokenizer-dec",
    ]
)
_OTHER_KINDS = {
    "t5": "an encoder-decoder model",
    "dream": "a diffusion model, which does not write from left to right",
    "llada": "a diffusion model, which does not write from left to right",
    "llada-moe": "a diffusion model, which does not write from left to right",
    "rnd1": "a diffusion model, which does not write from left to right",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model file (all shards of it). Head sizes are values per head; 0 or None where the file does not say."""

    path: Path
    architecture: str
    name: str
    quant: str
    size_bytes: int
    n_params: int
    n_layers: int
    n_ctx_train: int
    n_embd: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    head_size_k: int
    head_size_v: int
    sliding_window: int | None
    n_vocab: int
    tokenizer: str
    tokenizer_digest: str
    add_bos: bool | None
    chat_templates: Mapping[str, str]
    n_shards: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, Value]

    @property
    def bpw(self) -> float:
        """Bits per weight, of the tensors alone."""
        return 8 * sum(tensor.size_bytes for tensor in self.tensors) / self.n_params if self.n_params else 0.0

    @property
    def chat_template(self) -> str | None:
        """The template for ordinary chat."""
        return self.chat_templates.get("default")

    @property
    def layer_bytes(self) -> dict[int | None, int]:
        """Bytes of weights per block; those outside of any block are under None."""
        sums: dict[int | None, int] = {}
        for tensor in self.tensors:
            sums[tensor.layer] = sums.get(tensor.layer, 0) + tensor.size_bytes
        return sums


def read(path: Path | str) -> ModelInfo:
    """Read and check a GGUF file; any shard stands for all. Raises ModelFileError with a diagnosis."""
    shards = shard_paths(Path(path))
    headers = [read_header(shard) for shard in shards]
    fields, lengths = headers[0].fields, headers[0].array_lengths
    declared = fields.get("split.count")
    if isinstance(declared, int) and declared > len(shards):
        raise ModelFileError(
            f"{path}: the model consists of {declared} files, but this one is not named like one of them "
            f"(NAME-00001-of-{declared:05d}.gguf); give all of them their original names back"
        )
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    architecture = _text(fields, "general.architecture")

    def number(key: str) -> int:
        value = fields.get(f"{architecture}.{key}", 0)
        found = [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, int)]
        return max(found, default=0)

    def per_layer(key: str) -> tuple[int, ...]:
        value = fields.get(f"{architecture}.{key}", 0)
        if isinstance(value, tuple):
            return tuple(item for item in value if isinstance(item, int))
        return (number(key),) * n_layers

    n_layers = number("block_count")
    n_head = per_layer("attention.head_count")
    widest = max(n_head, default=0)
    head_size = number("embedding_length") // widest if widest else 0
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    file_type = fields.get("general.file_type")
    quant = _FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else ""
    return ModelInfo(
        path=shards[0],
        architecture=architecture,
        name=_text(fields, "general.name") or shards[0].stem,
        quant=quant or _commonest_type(tensors),
        size_bytes=sum(shard.stat().st_size for shard in shards),
        n_params=sum(tensor.n_values for tensor in tensors),
        n_layers=n_layers,
        n_ctx_train=number("context_length"),
        n_embd=number("embedding_length"),
        n_head=n_head,
        n_head_kv=per_layer("attention.head_count_kv")
        if f"{architecture}.attention.head_count_kv" in fields
        else n_head,
        head_size_k=number("attention.key_length") or head_size,
        head_size_v=number("attention.value_length") or head_size,
        sliding_window=number("attention.sliding_window") or None,
        n_vocab=lengths.get("tokenizer.ggml.tokens", 0) or number("vocab_size"),
        tokenizer=_text(fields, "tokenizer.ggml.model"),
        tokenizer_digest=headers[0].tokenizer_digest,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        chat_templates=_templates(fields),
        n_shards=len(shards),
        tensors=tensors,
        metadata=MappingProxyType(fields),
    )


def require_generative(info: ModelInfo) -> None:
    """Raise ModelFileError unless the file can continue text: no encoder, no bare vocabulary, no adapter."""
    kind = _text(info.metadata, "general.type")
    reason = None
    if kind in ("adapter", "mmproj", "imatrix"):
        reason = f"it is an {kind} file that only completes another model"
    elif info.architecture in _ENCODERS or info.metadata.get(f"{info.architecture}.attention.causal") is False:
        reason = f"{info.architecture} is an encoder: it makes embeddings of a text, but cannot continue it"
    elif info.architecture in _OTHER_KINDS:
        reason = f"{info.architecture} is {_OTHER_KINDS[info.architecture]}"
    elif not info.tensors:
        reason = "it holds a vocabulary only, no weights"
    elif not info.n_vocab:
        reason = "it has no vocabulary"
    if reason:
        raise ModelFileError(f"{info.path}: this model does not generate text: {reason}; choose a text-generation GGUF")


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All files of the model that ``path`` belongs to, in order. Raises ModelFileError naming missing ones."""
    match = SHARD.match(path.name)
    if match is None:
        if not path.is_file():
            raise ModelFileError(f"{path}: {'a directory, expected a GGUF file' if path.is_dir() else 'no such file'}")
        return (path,)
    count = int(match["count"])
    suffix = path.name[-5:]
    paths = tuple(path.with_name(f"{match['base']}-{i:05d}-of-{count:05d}{suffix}") for i in range(1, count + 1))
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        raise ModelFileError(
            f"{path.parent}: {len(missing)} of the {count} files of this model are missing: {', '.join(missing)}; "
            f"fetch them into the same folder, with these names"
        )
    return paths


def _templates(fields: Mapping[str, Value]) -> Mapping[str, str]:
    found = {}
    for key, value in fields.items():
        if key == "tokenizer.chat_template" and isinstance(value, str):
            found["default"] = value
        elif key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            found[key.removeprefix("tokenizer.chat_template.")] = value
    return MappingProxyType(found)


def _commonest_type(tensors: tuple[TensorInfo, ...]) -> str:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.size_bytes
    return max(sizes, key=lambda name: sizes[name], default="")


def _text(fields: Mapping[str, Value], key: str) -> str:
    value = fields.get(key, "")
    return value if isinstance(value, str) else ""
