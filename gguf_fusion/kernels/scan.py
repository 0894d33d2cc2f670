"""Running sums that forget: the evidence of experts over many steps of a text."""

from __future__ import annotations

import numpy as np

from gguf_fusion.arrays import F64, check_array
from gguf_fusion.kernels._jit import kernel


@kernel
def _decayed(gained: F64, start: F64, gamma: float, out: F64) -> None:
    n_steps, n = gained.shape
    for i in range(n):
        total = start[i]
        for t in range(n_steps):
            out[t, i] = total
            total = gamma * total + gained[t, i]
        start[i] = total


def decayed_sums(gained: F64, start: F64, gamma: float, out: F64) -> None:
    """Write the sum before each step: c_0 = start, c_{t+1} = gamma c_t + gained_t; ``start`` becomes the last sum.

    gained, out : float64[n_steps, n];  start : float64[n]
    """
    check_array("gained", gained, np.float64, (None, None))
    check_array("start", start, np.float64, (gained.shape[1],))
    check_array("out", out, np.float64, gained.shape)
    _decayed(gained, start, gamma, out)
