"""Pages of mapped files that fill memory without being needed any more, given back to the system.

llama.cpp maps a model file and brings all of its pages into memory while it loads. An input embedding that is not the
output matrix as well is then looked up one row per token; its other pages only take room. The same holds for the code
of a compiler that has done its work. Giving such pages back changes no result; what is used again comes back from the
system's file cache within microseconds. Only Linux tells where files are mapped: elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf_fusion.gguf_info import ModelInfo

_EMBEDDING, _OUTPUT, _PER_LAYER = "token_embd.weight", "output.weight", "per_layer_token_embd.weight"
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Addresses ``low`` … ``high`` - 1 show the file from ``offset`` on."""

    low: int
    high: int
    offset: int
    file: str


def give_back_lookups(info: ModelInfo) -> int:
    """Give the pages of a loaded model's look-up matrices back; returns their bytes. Locked pages stay."""
    names = {tensor.name for tensor in info.tensors}
    wanted = {_PER_LAYER, _EMBEDDING} if _OUTPUT in names else {_PER_LAYER}
    given = 0
    for tensor in info.tensors:
        if tensor.name in wanted:
            file = str(tensor.file.resolve())
            for one in _mappings("r--s"):
                if one.file == file:
                    first = one.low - one.offset + tensor.offset
                    given += _give_back(max(one.low, first), min(one.high, first + tensor.size_bytes))
    return given


def give_back_code(library: str) -> int:
    """Give the code of a loaded shared library back, all of those whose file names begin so; returns its bytes."""
    return sum(_give_back(one.low, one.high) for one in _mappings("r-xp") if Path(one.file).name.startswith(library))


def _mappings(rights: str) -> Iterator[_Mapping]:
    if not hasattr(mmap, "MADV_DONTNEED") or not _MAPS.exists():
        return
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1] == rights:
            low, high = (int(end, 16) for end in fields[0].split("-"))
            yield _Mapping(low, high, int(fields[2], 16), fields[5])


def _give_back(first: int, last: int) -> int:
    """Give the whole pages within these addresses back. They must show a file that this process has not changed."""
    page = mmap.PAGESIZE
    first, last = -(-first // page) * page, last // page * page
    if first >= last:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return 0 if madvise(first, last - first, mmap.MADV_DONTNEED) else last - first
