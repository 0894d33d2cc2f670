"""Token paths."""

from __future__ import annotations

from gguf_fusion.arrays import I32
from gguf_fusion.kernels._jit import kernel


@kernel
def common_prefix(path: I32, other: I32, n_other: int, n_vocab: int) -> int:
    """Length of the longest common prefix of ``path`` and other[:n_other]; -1 if an id of ``path`` does not exist."""
    for token in path:
        if token < 0 or token >= n_vocab:
            return -1
    n = min(len(path), n_other)
    for i in range(n):
        if path[i] != other[i]:
            return i
    return n
