"""Kept laws back to whole ones: numbers of 16 bits to probabilities, rounding mended, the ghosts' share filled."""

from __future__ import annotations

import numpy as np

from gguf_fusion.arrays import F64, I64, check_array
from gguf_fusion.kernels._jit import kernel

with np.errstate(over="ignore", invalid="ignore"):
    _POWERS = np.exp(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64))
"""exp of every number of 16 bits."""


@kernel
def _unpack(
    bits: np.ndarray, powers: F64, exact: F64, shares: F64, came: I64, weights: F64, floor: float, laws: F64
) -> None:
    n_steps, n, n_symbols = bits.shape
    sums = np.empty(n)
    parts = np.empty((n, n_symbols))
    stand_in = np.empty(n_symbols)
    for t in range(n_steps):
        at = came[t]
        for i in range(n):
            rest = 0.0
            for s in range(n_symbols):
                parts[i, s] = powers[bits[t, i, s]]
            parts[i, at] = 0.0
            for s in range(n_symbols):
                rest += parts[i, s]
            wanted = max(1.0 - shares[t, i] - exact[t, i], 0.0)
            scale = wanted / rest if rest > 0.0 else 0.0
            for s in range(n_symbols):
                parts[i, s] *= scale
            parts[i, at] = exact[t, i]
            sums[i] = exact[t, i] + (wanted if rest > 0.0 else 0.0)
        for i in range(n):
            law = laws[i, t]
            mass = equal = 0.0
            for j in range(n):
                if j != i:
                    mass += weights[j] * sums[j]
                    equal += sums[j]
            known = mass > floor
            total = mass if known else equal
            if total > 0.0:
                factor = ((1.0 - floor) / total) * shares[t, i]
                stand_in[:] = 0.0
                for j in range(n):
                    if j != i:
                        w = factor * (weights[j] if known else 1.0)
                        for s in range(n_symbols):
                            stand_in[s] += w * parts[j, s]
                least = floor / n_symbols * shares[t, i]
                for s in range(n_symbols):
                    law[s] = parts[i, s] + (stand_in[s] + least)
            else:
                for s in range(n_symbols):
                    law[s] = parts[i, s] + shares[t, i] / n_symbols


def unpack(laws: np.ndarray, exact: F64, shares: F64, came: I64, weights: F64, floor: float) -> F64:
    """float64[n_experts, n_steps, n_symbols], rows sum to 1: what was kept of the evaluated laws, made whole.

    laws : float16[n_steps, n_experts, n_symbols], ln p;  exact, shares : float64[n_steps, n_experts], the probability
    of the symbol that came and the ghosts' share;  came : int64[n_steps];  weights : float64[n_experts], sum 1

    ``exact`` replaces its rounded value and the rest is rescaled so that a law sums to 1 - share. On that share the
    others stand in by weight, as in ``cover.ghosts.fill``, with ``floor`` spread evenly. Where those with weight know
    nothing all others speak alike, and where nobody does every symbol.
    """
    n_steps, n, n_symbols = laws.shape
    check_array("exact", exact, np.float64, (n_steps, n))
    check_array("shares", shares, np.float64, (n_steps, n))
    check_array("came", came, np.int64, (n_steps,))
    check_array("weights", weights, np.float64, (n,))
    out = np.empty((n, n_steps, n_symbols))
    bits = np.ascontiguousarray(laws, np.float16).view(np.uint16)
    _unpack(bits, _POWERS, exact, shares, came, weights, floor, out)
    return out
