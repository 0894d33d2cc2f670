"""One logits row to unnormalised probabilities in piece order: the only pass over a whole vocabulary per decode.

exp(x) is computed as 2^n · p(f) with n = round(x·log2 e), f in [-½, ½] and p the degree-6 Taylor polynomial of 2^f
(relative error below 2e-7, the rounding of float32). It is spelled out because ``np.exp`` inside a compiled loop is a
scalar call without SVML, while this form becomes vector instructions.
"""

from __future__ import annotations

import numpy as np

from gguf_fusion.arrays import F32, F64, I32, check_array
from gguf_fusion.kernels._jit import kernel

BLOCK = 64
"""Entries per partial sum; ranges are summed from these plus their ragged ends."""

_CHUNK = 1024


@kernel
def _exp_chunk(source: F32, top: np.float32, powers: I32, out: F32) -> None:
    """out[:] = exp(source - top) for one chunk; ``powers`` is int32 scratch of the same length."""
    log2e = np.float32(1.4426950408889634)
    c1 = np.float32(0.6931471805599453)
    c2 = np.float32(0.2402265069591007)
    c3 = np.float32(0.05550410866482158)
    c4 = np.float32(0.009618129107628477)
    c5 = np.float32(0.0013333558146428443)
    c6 = np.float32(0.0001540353039338161)
    one = np.float32(1.0)
    low = np.float32(-126.0)
    half = np.float32(0.5)
    for i in range(len(source)):
        t = max((source[i] - top) * log2e, low)
        n = np.int32(t - half)  # truncation toward zero rounds non-positive t to the nearest integer
        f = t - np.float32(n)
        powers[i] = (n + np.int32(127)) << np.int32(23)
        out[i] = one + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6)))))
    scale = powers.view(np.float32)
    for i in range(len(source)):
        out[i] *= scale[i]


@kernel
def _gather_chunk(source: F32, order: I32, out: F32) -> None:
    for i in range(len(order)):
        out[i] = source[order[i]]


@kernel
def _block_sum(values: F32) -> float:
    """Sum of one block in float64; eight running sums side by side become one vector register."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    e, f, g, h = 0.0, 0.0, 0.0, 0.0
    whole = len(values) - len(values) % 8
    for i in range(0, whole, 8):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
        e += values[i + 4]
        f += values[i + 5]
        g += values[i + 6]
        h += values[i + 7]
    for i in range(whole, len(values)):
        a += values[i]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@kernel
def _row_masses_kernel(
    logits: F32, top: np.float32, order: I32, end_ids: I32, row: F32, sums: F64
) -> tuple[float, float]:
    n = len(order)
    gathered = np.empty(_CHUNK, np.float32)
    powers = np.empty(_CHUNK, np.int32)
    total = 0.0
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        size = stop - start
        _gather_chunk(logits, order[start:stop], gathered[:size])
        _exp_chunk(gathered[:size], top, powers[:size], row[start:stop])
        for first in range(start, stop, BLOCK):
            block = _block_sum(row[first : min(first + BLOCK, stop)])
            sums[first // BLOCK] = block
            total += block
    end = 0.0
    for i in range(len(end_ids)):
        end += np.exp(np.float64(logits[end_ids[i]] - top))
    return total, end


def row_masses(logits: F32, order: I32, end_ids: I32, row: F32, sums: F64) -> tuple[float, float]:
    """Fill ``row`` with exp(logits - max) in piece order; return (text mass, end mass), both on that scale.

    logits : float32[n_vocab], raw
    order  : int32[n_text], ids of text pieces in byte order
    end_ids: int32[n_end]
    row    : float32[n_text], overwritten; sums: float64[ceil(n_text / BLOCK)], overwritten with its block sums

    Raises ValueError when the row holds NaN or +inf, or nothing but -inf.
    """
    check_array("logits", logits, np.float32, (None,))
    check_array("order", order, np.int32, (None,))
    check_array("row", row, np.float32, (len(order),))
    check_array("sums", sums, np.float64, (-(-len(order) // BLOCK),))
    top = logits.max()
    if not np.isfinite(top):
        bad = int(np.count_nonzero(~np.isfinite(logits)))
        raise ValueError(f"expected finite logits, got {bad} of {len(logits)} that are NaN or infinite")
    text, end = _row_masses_kernel(logits, top, order, end_ids, row, sums)
    return float(text), float(end)
