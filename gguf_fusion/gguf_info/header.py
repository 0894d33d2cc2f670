"""Skims the header of one GGUF file."""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from gguf_fusion.errors import ModelFileError
from gguf_fusion.gguf_info.diagnosis import diagnose, truncated

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

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
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEEP_ARRAY = 4096
"""Longer arrays are stepped over; per-layer settings are far shorter."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``layer`` is the block it belongs to, None for embeddings and outputs.

    file, offset : where its ``size_bytes`` lie
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    size_bytes: int
    layer: int | None
    file: Path
    offset: int

    @property
    def n_values(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header: long arrays are kept as their lengths only."""

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


def read_header(path: Path) -> Header:
    """Read one file's header and check every tensor's extent. Raises ModelFileError with a diagnosis."""
    diagnose(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(path, data)
        except (struct.error, OverflowError) as error:
            raise truncated(path, len(data), "the header is cut off") from error


def _parse(path: Path, data: mmap.mmap) -> Header:
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
    tensors: list[TensorInfo] = []
    for _ in range(n_tensors):
        name = cursor.text()
        n_dims = cursor.scalar("<I")
        shape = tuple(cursor.count() for _ in range(int(n_dims)))
        tensor_type, offset = int(cursor.scalar("<I")), cursor.count()
        if tensor_type not in _TENSOR_TYPES:
            raise ModelFileError(f"{path}: tensor {name} has the unknown type {tensor_type}; update gguf-fusion")
        type_name, block, block_bytes = _TENSOR_TYPES[tensor_type]
        layer = re.match(r"blk\.(\d+)\.", name)
        size = math.prod(shape) // block * block_bytes
        tensors.append(TensorInfo(name, shape, type_name, size, int(layer[1]) if layer else None, path, offset))
    alignment = fields.get("general.alignment", 32)
    step = alignment if isinstance(alignment, int) and alignment > 0 else 32
    start = -(-cursor.at // step) * step
    tensors = [replace(tensor, offset=start + tensor.offset) for tensor in tensors]
    end = max((tensor.offset + tensor.size_bytes for tensor in tensors), default=0)
    if end > len(data):
        raise truncated(path, len(data), f"its tensors need {end} bytes")
    return Header(fields, lengths, tuple(tensors), digest.hexdigest())


def _value(path: Path, cursor: _Cursor, value_type: Scalar) -> Scalar:
    if value_type == _STRING:
        return cursor.text()
    if not isinstance(value_type, int) or value_type not in _SCALARS:
        raise ModelFileError(f"{path}: the header holds a value of unknown type {value_type}; fetch the file again")
    return cursor.scalar(_SCALARS[value_type])


def _array(path: Path, cursor: _Cursor, depth: int = 0) -> tuple[int, tuple[Scalar, ...] | None]:
    """Length and, where short, the items of an array; the cursor stands behind it afterwards."""
    item_type = cursor.scalar("<I")
    length = cursor.count()
    if item_type == _ARRAY:
        if depth > 4:  # no writer nests arrays like this
            raise ModelFileError(f"{path}: the header is nonsense (arrays within arrays); fetch the file again")
        for _ in range(length):
            _array(path, cursor, depth + 1)
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
