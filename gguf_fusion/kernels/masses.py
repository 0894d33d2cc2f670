"""Masses under a prefix: how much probability the pieces of a range put on each possible next byte."""

from __future__ import annotations

from gguf_fusion.arrays import F32, F64, I32, I64, U8
from gguf_fusion.kernels._jit import kernel
from gguf_fusion.kernels.softmax import BLOCK


@kernel
def range_sum(row: F32, sums: F64, lo: int, hi: int) -> float:
    """Sum of row[lo:hi] from block sums and ragged ends."""
    total = 0.0
    first = -(-lo // BLOCK)
    last = hi // BLOCK
    if first >= last:
        for i in range(lo, hi):
            total += row[i]
        return total
    for i in range(lo, first * BLOCK):
        total += row[i]
    for i in range(first, last):
        total += sums[i]
    for i in range(last * BLOCK, hi):
        total += row[i]
    return total


@kernel
def first_masses(row: F32, sums: F64, first_start: I32, scale: float, out: F64) -> None:
    """Write scale * (mass of pieces that begin with byte b) to out[b]; out : float64[>= 256]."""
    for b in range(256):
        start, stop = first_start[b], first_start[b + 1]
        out[b] = scale * range_sum(row, sums, start, stop) if start < stop else 0.0


@kernel
def child_masses(
    row: F32,
    sums: F64,
    lo: int,
    hi: int,
    depth: int,
    piece_bytes: U8,
    piece_start: I64,
    pair_start: I32,
    scale: float,
    out: F64,
) -> None:
    """Add scale * (mass of pieces in [lo, hi) whose byte at ``depth`` >= 1 is b) to out[b].

    All pieces of the range share their first ``depth`` bytes and are longer than ``depth``.
    out : float64[>= 256], modified
    """
    if depth == 1:
        base = np_int(piece_bytes[piece_start[lo]]) * 256
        for b in range(256):
            start = max(pair_start[base + b], lo)
            stop = min(pair_start[base + b + 1], hi)
            if start < stop:
                out[b] += scale * range_sum(row, sums, start, stop)
        return
    i = lo
    while i < hi:
        b = piece_bytes[piece_start[i] + depth]
        mass = 0.0
        while i < hi and piece_bytes[piece_start[i] + depth] == b:
            mass += row[i]
            i += 1
        out[b] += scale * mass


@kernel
def np_int(value: int) -> int:
    """Widen a byte so that arithmetic on it does not wrap."""
    return int(value)


@kernel
def narrow(lo: int, hi: int, depth: int, byte: int, piece_bytes: U8, piece_start: I64) -> tuple[int, int]:
    """Sub-range of [lo, hi) whose byte at ``depth`` equals ``byte``; all pieces are longer than ``depth``."""
    left, right = lo, hi
    while left < right:
        middle = (left + right) // 2
        if piece_bytes[piece_start[middle] + depth] < byte:
            left = middle + 1
        else:
            right = middle
    start = left
    right = hi
    while left < right:
        middle = (left + right) // 2
        if piece_bytes[piece_start[middle] + depth] <= byte:
            left = middle + 1
        else:
            right = middle
    return start, left


@kernel
def exact_end(row: F32, lo: int, hi: int, depth: int, piece_start: I64) -> tuple[int, float]:
    """(index after the pieces of exactly ``depth`` bytes, their mass): they come first in a range."""
    mass = 0.0
    i = lo
    while i < hi and piece_start[i + 1] - piece_start[i] == depth:
        mass += row[i]
        i += 1
    return i, mass
