"""Running evidence: what is known of experts over many steps of a text, each step depending on the one before."""

from __future__ import annotations

import numpy as np

from gguf_fusion.arrays import F64, Bool, check_array
from gguf_fusion.kernels._jit import kernel


@kernel
def _weights_of(log_base: F64, credit: F64, eta: float, out: F64) -> None:
    top = -np.inf
    for i in range(len(credit)):
        out[i] = log_base[i] + eta * credit[i]
        top = max(top, out[i])
    total = 0.0
    for i in range(len(credit)):
        out[i] = np.exp(out[i] - top)
        total += out[i]
    for i in range(len(credit)):
        out[i] /= total


@kernel
def _evidence(
    gained: F64, resets: Bool, credit: F64, log_base: F64, eta: float, gamma: float, alpha: float, out: F64
) -> None:
    n_steps, n = gained.shape
    shared = np.empty(n)
    for t in range(n_steps):
        _weights_of(log_base, credit, eta, out[t])
        for i in range(n):
            credit[i] = gamma * credit[i] + gained[t, i]
        if resets[t]:
            credit[:] = 0.0
        elif alpha > 0.0 and eta > 0.0:
            _weights_of(log_base, credit, eta, shared)
            for i in range(n):
                share = (1.0 - alpha) * shared[i] + alpha * np.exp(log_base[i])
                credit[i] = (np.log(share) - log_base[i]) / eta
        top = credit.max()
        for i in range(n):
            credit[i] -= top


def evidence_weights(
    gained: F64, resets: Bool, credit: F64, log_base: F64, *, eta: float, gamma: float, alpha: float, out: F64
) -> None:
    """Write the weights before each step: w ∝ w⁰ exp(η c); ``credit`` c becomes that after the last step.

    After a step c ← γ c + gained, then 0 where ``resets``, else with α > 0 the credit of (1 − α) w + α w⁰
    (Herbster & Warmuth 1998); only differences of c matter.

    gained, out : float64[n_steps, n];  resets : bool[n_steps];  credit, log_base : float64[n]
    """
    n_steps, n = gained.shape
    check_array("gained", gained, np.float64, (None, None))
    check_array("resets", resets, np.bool_, (n_steps,))
    check_array("credit", credit, np.float64, (n,))
    check_array("log_base", log_base, np.float64, (n,))
    check_array("out", out, np.float64, (n_steps, n))
    _evidence(gained, resets, credit, log_base, eta, gamma, alpha, out)


@kernel
def _decayed(values: F64, keep: float, sums: F64, out: F64) -> None:
    n_steps, n = values.shape
    for t in range(n_steps):
        for i in range(n):
            out[t, i] = sums[i]
            sums[i] = keep * sums[i] + values[t, i]


def decayed_sums(values: F64, keep: float, sums: F64) -> F64:
    """float64[n_steps, n]: the running sums before each step; ``sums`` s becomes that after the last.

    After a step s ← keep s + values.  values : float64[n_steps, n];  sums : float64[n]
    """
    n_steps, n = values.shape
    check_array("values", values, np.float64, (None, None))
    check_array("sums", sums, np.float64, (n,))
    out = np.empty((n_steps, n))
    _decayed(values, keep, sums, out)
    return out
