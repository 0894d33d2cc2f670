"""Files of a quantization level, made from a reference with the native library and kept by the reference's hash."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from gguf_fusion.config import nearest
from gguf_fusion.errors import LoadError, NoSpaceError, UsageError
from gguf_fusion.experts.native_quantize import FILE_TYPES, quantize
from gguf_fusion.gguf_info import ModelInfo, TensorInfo, read
from gguf_fusion.hub import Silent
from gguf_fusion.hub.digests import model_digest
from gguf_fusion.hub.store import MARGIN_BYTES, cache_dir, exclusive, key_of, publish, require_space
from gguf_fusion.measure import child

FULL = ("F32", "F16", "BF16")
"""Levels that are no quantization."""

_SUPER_BLOCK = 256
"""Values per block of the K types; other rows get a type of a bit more or, from 6 bits on, of 8.5."""


def check_levels(levels: Sequence[str]) -> list[str]:
    """Levels in capitals; raises UsageError naming the nearest for one that does not exist."""
    found = [level.strip().upper() for level in levels if level.strip()]
    for level in found:
        if level not in FILE_TYPES:
            raise UsageError(f"unknown level {level!r}{nearest(level, FILE_TYPES)}; known: {', '.join(FILE_TYPES)}")
    if not found:
        raise UsageError(f"no level given; known: {', '.join(FILE_TYPES)}")
    return list(dict.fromkeys(found))


def needs_leave(reference: ModelInfo, levels: Sequence[str], *, requantize: bool) -> None:
    """Raise UsageError where a level would be made from a file that is quantized itself, and nobody asked for that."""
    if reference.quant not in FULL and not requantize and any(level != reference.quant for level in levels):
        raise UsageError(
            f"{reference.path.name} is quantized already ({reference.quant}): levels made from it are worse than from "
            f"F16; give an unquantized file (--reference), or accept that (--requantize)"
        )


def made(
    reference: Path, level: str, *, requantize: bool, n_threads: int, tell: Callable[[str], None]
) -> tuple[Path, bool]:
    """(file of a level made from ``reference``, whether it was quantized twice).

    Raises UsageError where that would be needed and was not asked for, NoSpaceError, LoadError for what the native
    library cannot write.
    """
    info = read(reference)
    if info.quant == level:
        return reference, False
    needs_leave(info, [level], requantize=requantize)
    target = cache_dir() / "quants" / model_digest(reference)[:16] / f"{reference.stem}-{level}.gguf"
    if not target.is_file():
        need = sum(_bits(level, tensor) * tensor.n_values for tensor in info.tensors) // 8
        require_space(target.parent, need)
        tell(f"{level}: quantizing {reference.name}")
        try:
            child.call(__name__, "write_level", str(reference), str(target), level, n_threads, info.quant not in FULL)
        except LoadError:
            free = shutil.disk_usage(cache_dir()).free
            if free < MARGIN_BYTES:  # it filled up meanwhile
                raise NoSpaceError(str(target.parent), need, free) from None
            raise
    return target, info.quant not in FULL


def write_level(reference: str, target: str, level: str, n_threads: int, twice: bool) -> None:
    """Write ``target``, complete or not at all; another process that makes the same file is waited for."""
    path = Path(target)
    with exclusive(key_of(target), path.name, Silent()) as work:
        if path.is_file():
            return
        unfinished = work / path.name
        quantize(Path(reference), unfinished, level, n_threads=n_threads, requantize=twice)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        publish(unfinished, path)


def _bits(level: str, tensor: TensorInfo) -> int:
    """At most so many bits per weight: blocks have scales, and some tensors get a better type than the rest."""
    found = re.search(r"\d+", level)
    digits = int(found[0]) if found else 32
    if level in FULL:
        return digits
    if tensor.layer is None or (tensor.shape[0] % _SUPER_BLOCK and digits >= 6):
        return 9
    return min(9, digits + (2 if tensor.shape[0] % _SUPER_BLOCK == 0 else 3))
