"""What a GGUF file says about itself, read in a fraction of a second.

The reader steps over the long arrays of the header (a vocabulary has hundreds of thousands of entries) instead of
decoding them, and never touches the weights. It checks that the header is whole and that every tensor lies inside
the file, so a truncated download is found before native code sees it. Layout: the GGUF specification of ggml.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gguf_fusion.errors import ModelFileError

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

SHARD = re.compile(r"(?P<base>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf\Z", re.IGNORECASE)
"""The names of a split model; every shard is a GGUF file of its own."""

# Bytes per block and values per block of each tensor type (ggml's block layouts).
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
_FILE_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS",
    20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
    39: "NVFP4", 40: "Q1_0",
}  # fmt: skip
_ENCODERS = frozenset(
    "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding "
    "llama-embed t5encoder clip wavtokenizer-dec".split()
)
_OTHER_KINDS = {
    "t5": "an encoder-decoder model",
    "dream": "a diffusion model, which does not write from left to right",
    "llada": "a diffusion model, which does not write from left to right",
    "llada-moe": "a diffusion model, which does not write from left to right",
    "rnd1": "a diffusion model, which does not write from left to right",
}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEEP_ARRAY = 4096
"""Longer arrays are stepped over; per-layer settings are far shorter."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``layer`` is the block it belongs to, None for embeddings and outputs."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    size_bytes: int
    layer: int | None

    @property
    def n_values(self) -> int:
        """Number of weights."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product


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
    headers = [_read_header(shard) for shard in shards]
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
        return value if isinstance(value, int) else max((v for v in value if isinstance(v, int)), default=0) if isinstance(value, tuple) else 0

    def per_layer(key: str) -> tuple[int, ...]:
        value = fields.get(f"{architecture}.{key}", 0)
        return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else (number(key),) * n_layers

    n_layers = number("block_count")
    n_head = per_layer("attention.head_count")
    head_size = number("embedding_length") // max(n_head) if n_head and max(n_head) else 0
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
        n_head_kv=per_layer("attention.head_count_kv") if f"{architecture}.attention.head_count_kv" in fields else n_head,
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
    elif not info.tensors:
        reason = "it holds a vocabulary only, no weights"
    elif info.architecture in _ENCODERS or info.metadata.get(f"{info.architecture}.attention.causal") is False:
        reason = f"{info.architecture} is an encoder: it makes embeddings of a text, but cannot continue it"
    elif info.architecture in _OTHER_KINDS:
        reason = f"{info.architecture} is {_OTHER_KINDS[info.architecture]}"
    elif not info.n_vocab:
        reason = "it has no vocabulary"
    if reason:
        raise ModelFileError(f"{info.path}: this model does not generate text: {reason}; choose a text-generation GGUF")


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All files of the model that ``path`` belongs to, in order. Raises ModelFileError naming those that are missing."""
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


@dataclass(frozen=True, slots=True)
class _Header:
    fields: dict[str, Value]
    array_lengths: dict[str, int]
    tensors: tuple[TensorInfo, ...]
    tokenizer_digest: str


class _Cursor:
    """Position in a mapped header. Every read past the end is a truncated file."""

    __slots__ = ("at", "data")

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def scalar(self, layout: str) -> Scalar:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value  # type: ignore[no-any-return]

    def count(self) -> int:
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def text(self) -> str:
        n_bytes = self.count()
        self.require(n_bytes)
        raw = self.data[self.at : self.at + n_bytes]
        self.at += n_bytes
        return raw.decode("utf-8", errors="replace")

    def require(self, n_bytes: int) -> None:
        if n_bytes > len(self.data) - self.at:
            raise struct.error

    def skip(self, n_bytes: int) -> None:
        self.require(n_bytes)
        self.at += n_bytes

    def skip_strings(self, n_strings: int) -> None:
        unpack, data, at = _U64.unpack_from, self.data, self.at
        for _ in range(n_strings):
            at += unpack(data, at)[0] + 8
        self.at = at
        self.require(0 if at <= len(data) else 1)


_U64 = struct.Struct("<Q")


def _read_header(path: Path) -> _Header:
    diagnose(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(path, data)
        except (struct.error, OverflowError) as error:
            raise _truncated(path, len(data), "the header is cut off") from error


def _parse(path: Path, data: mmap.mmap) -> _Header:
    cursor = _Cursor(data, 8)
    n_tensors, n_fields = cursor.count(), cursor.count()
    if n_tensors > len(data) or n_fields > len(data):
        raise ModelFileError(f"{path}: the header is nonsense ({n_tensors} tensors, {n_fields} fields); fetch it again")
    fields: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    digest = hashlib.sha256()
    for _ in range(n_fields):
        begin = cursor.at
        key = cursor.text()
        value_type = cursor.scalar("<I")
        if value_type == _ARRAY:
            lengths[key], items = _array(path, cursor)
            if items is not None:
                fields[key] = items
        else:
            fields[key] = _value(path, cursor, value_type)
        if key.startswith("tokenizer."):
            digest.update(data[begin : cursor.at])
    tensors, extents = [], []
    for _ in range(n_tensors):
        name = cursor.text()
        n_dims = cursor.scalar("<I")
        shape = tuple(cursor.count() for _ in range(int(n_dims)))
        tensor_type, offset = int(cursor.scalar("<I")), cursor.count()
        if tensor_type not in _TENSOR_TYPES:
            raise ModelFileError(f"{path}: tensor {name} has the unknown type {tensor_type}; update gguf-fusion")
        type_name, block, block_bytes = _TENSOR_TYPES[tensor_type]
        layer = re.match(r"blk\.(\d+)\.", name)
        tensor = TensorInfo(name, shape, type_name, 0, int(layer[1]) if layer else None)
        size = tensor.n_values // block * block_bytes
        tensors.append(TensorInfo(name, shape, type_name, size, tensor.layer))
        extents.append(offset + size)
    alignment = fields.get("general.alignment", 32)
    step = alignment if isinstance(alignment, int) and alignment > 0 else 32
    start = -(-cursor.at // step) * step
    end = start + max(extents, default=0)
    if tensors and end > len(data):
        raise _truncated(path, len(data), f"its tensors need {end} bytes")
    return _Header(fields, lengths, tuple(tensors), digest.hexdigest())


def _value(path: Path, cursor: _Cursor, value_type: Scalar) -> Scalar:
    if value_type == _STRING:
        return cursor.text()
    if not isinstance(value_type, int) or value_type not in _SCALARS:
        raise ModelFileError(f"{path}: the header holds a value of unknown type {value_type}; fetch the file again")
    return cursor.scalar(_SCALARS[value_type])


def _array(path: Path, cursor: _Cursor) -> tuple[int, tuple[Scalar, ...] | None]:
    """Length and, where short, the items of an array; the cursor stands behind it afterwards."""
    item_type = cursor.scalar("<I")
    length = cursor.count()
    if item_type == _ARRAY:
        for _ in range(length):
            _array(path, cursor)
        return length, None
    if length <= _KEEP_ARRAY:
        return length, tuple(_value(path, cursor, item_type) for _ in range(length))
    if item_type == _STRING:
        cursor.skip_strings(length)
    else:
        if not isinstance(item_type, int) or item_type not in _SCALARS:
            raise ModelFileError(f"{path}: the header holds an array of unknown type {item_type}; fetch the file again")
        cursor.skip(length * struct.calcsize(_SCALARS[item_type]))
    return length, None


def diagnose(path: Path) -> None:
    """Raise ModelFileError if the first bytes show that this is no usable GGUF, saying what it is instead."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    if head.startswith(b"GGUF") and len(head) >= 24:
        little, big = struct.unpack_from("<I", head, 4)[0], struct.unpack_from(">I", head, 4)[0]
        if little in (2, 3):
            return
        if big in (1, 2, 3):
            raise ModelFileError(f"{path}: a big-endian GGUF, made for other machines; fetch the little-endian file")
        advice = "it is older than any tool still reads; fetch a newer conversion" if little < 2 else "update gguf-fusion"
        raise ModelFileError(f"{path}: GGUF version {little}, expected 2 or 3; {advice}")
    text = head.lstrip().lower()
    if not head.strip(b"\0"):
        found = "an empty file" if not head else "nothing but zero bytes, an interrupted download"
    elif text.startswith((b"<!doctype", b"<html", b"<?xml")):
        found = "an HTML page, not the file behind it; use the link of the download button (/resolve/, not /blob/)"
    elif head.startswith(b"version https://git-lfs"):
        found = "a Git LFS pointer, not the file it stands for; run 'git lfs pull' or fetch the file itself"
    elif text.startswith((b"{\"error", b"{\"message", b"not found", b"invalid", b"access to")):
        found = f"a server's error message: {head[:80].decode(errors='replace').strip()}"
    elif head[:4] in (b"lmgg", b"ggml", b"fmgg", b"tjgg", b"algg"):
        found = "a GGML file from before GGUF; fetch a GGUF of the model"
    elif head[:4] == b"PK\x03\x04":
        found = "a ZIP or PyTorch file; fetch a GGUF of the model"
    elif head[8:10] == b'{"':
        found = "a safetensors file; fetch a GGUF of the model"
    elif head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        found = "a compressed file; unpack it first"
    else:
        found = f"something else (it starts with {head[:8]!r})"
    raise ModelFileError(f"{path}: expected a GGUF file, got {found}{_piece_hint(path)}")


def _truncated(path: Path, size: int, why: str) -> ModelFileError:
    hint = _piece_hint(path) or "; the download broke off, delete the file and fetch it again"
    return ModelFileError(f"{path}: truncated: {why}, the file has {size}{hint}")


def _piece_hint(path: Path) -> str:
    piece = re.search(r"(\.part[-_]?\d+(of\d+)?|[-.]split[-_][a-z0-9]+|\.gguf\.?[0-9]{2,3}|\.gguf[-.][a-z]{2})\Z", path.name, re.IGNORECASE)
    if piece is None:
        return ""
    whole = path.name[: piece.start()]
    return (
        f"; '{piece[0]}' is one piece of a file that was cut by size: join all of them in order "
        f"(cat {whole}.part* > {whole}) and use the result"
    )


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
