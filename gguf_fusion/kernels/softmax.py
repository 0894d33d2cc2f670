"""One logits row to unnormalised probabilities in piece order: the only pass over a whole vocabulary per decode.

exp(x) is computed as 2^n · p(f) with n = round(x·log2 e), f in [-½, ½] and p the degree-6 Taylor polynomial of 2^f
(relative error below 2e-7, the rounding of float32). Sixteen entries at a time are spelled out as vector code: left to
itself the compiler keeps gather, polynomial and sum apart, and fuses no multiply with its addition, which takes twice
as long. What remains is bound by the gather: every entry of the row lies in another cache line.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gguf_fusion.arrays import F32, F64, I32, check_array
from gguf_fusion.kernels._jit import fused_multiply_add, intrinsic, ir, kernel, stored_array, types

BLOCK = 64
"""Entries per partial sum; ranges are summed from these plus their ragged ends."""

_WIDTH = 16
_TAYLOR = (
    0.0001540353039338161, 0.0013333558146428443, 0.009618129107628477, 0.05550410866482158, 0.2402265069591007,
    0.6931471805599453, 1.0,
)  # fmt: skip
"""ln(2)^k / k!, k = 6 … 0."""


@intrinsic
def _exp_block(_: Any, source: Any, order: Any, start: Any, top: Any, out: Any) -> Any:
    """out[start:start + BLOCK] = exp(source[order[start:start + BLOCK]] - top); returns their sum as float64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, ids, result = (stored_array(context, builder, signature.args[i], arguments[i]) for i in (0, 1, 4))
        at, highest = arguments[2], arguments[3]
        total = None
        for first in range(0, BLOCK, _WIDTH):
            values = ir.Constant(_FLOATS, ir.Undefined)
            for lane in range(_WIDTH):
                index = builder.add(at, ir.Constant(at.type, first + lane))
                token = builder.sext(builder.load(builder.gep(ids, [index])), at.type)
                value = builder.fsub(builder.load(builder.gep(base, [token])), highest)
                values = builder.insert_element(values, value, ir.Constant(ir.IntType(32), lane))
            powers = _exp(builder, values)
            place = builder.gep(result, [builder.add(at, ir.Constant(at.type, first))])
            builder.store(powers, builder.bitcast(place, _FLOATS.as_pointer()), align=4)
            wide = builder.fpext(powers, ir.VectorType(ir.DoubleType(), _WIDTH))
            total = wide if total is None else builder.fadd(total, wide)
        return _sum(builder, total)

    return types.float64(source, order, start, top, out), generate


_FLOATS = ir.VectorType(ir.FloatType(), _WIDTH)


def _exp(builder: Any, values: Any) -> Any:
    """Code for exp of sixteen float32 that are not positive."""

    def each(value: float) -> Any:
        return ir.Constant(_FLOATS, [float(np.float32(value))] * _WIDTH)

    ints = ir.VectorType(ir.IntType(32), _WIDTH)
    fused = fused_multiply_add(builder, _FLOATS)
    scaled, lowest = builder.fmul(values, each(1.4426950408889634)), each(-126.0)
    scaled = builder.select(builder.fcmp_ordered(">", scaled, lowest), scaled, lowest)
    # Truncation toward zero rounds a number that is not positive, less a half, to the nearest integer.
    whole = builder.fptosi(builder.fsub(scaled, each(0.5)), ints)
    part = builder.fsub(scaled, builder.sitofp(whole, _FLOATS))
    power = each(_TAYLOR[0])
    for factor in _TAYLOR[1:]:
        power = builder.call(fused, [power, part, each(factor)])
    biased = builder.add(whole, ir.Constant(ints, [127] * _WIDTH))
    return builder.fmul(power, builder.bitcast(builder.shl(biased, ir.Constant(ints, [23] * _WIDTH)), _FLOATS))


def _sum(builder: Any, values: Any) -> Any:
    """Code for the sum of a vector: its halves are added until one number is left."""
    width = _WIDTH
    while width > 1:
        width //= 2
        places = [
            ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(first, first + width))) for first in (0, width)
        ]
        values = builder.fadd(*(builder.shuffle_vector(values, values, place) for place in places))
    return builder.extract_element(values, ir.Constant(ir.IntType(32), 0))


@kernel
def _row_masses_kernel(
    logits: F32, top: np.float32, order: I32, end_ids: I32, row: F32, sums: F64
) -> tuple[float, float]:
    n = len(order)
    whole = n - n % BLOCK
    total = 0.0
    for first in range(0, whole, BLOCK):
        block = _exp_block(logits, order, first, top, row)
        sums[first // BLOCK] = block
        total += block
    if whole < n:
        block = 0.0
        for i in range(whole, n):
            row[i] = np.exp(np.float64(logits[order[i]] - top))
            block += row[i]
        sums[whole // BLOCK] = block
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
