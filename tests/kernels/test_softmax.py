"""The row kernel against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.kernels.masses import range_sum
from gguf_fusion.kernels.softmax import BLOCK, row_masses


def buffers(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.empty(n, np.float32), np.empty(-(-n // BLOCK))


@pytest.mark.parametrize("n", [1, 15, 64, 65, 1000, 1025, 5000])
def test_equals_numpy(n: int) -> None:
    """Row, block sums and end mass equal exp(logits - max) in float64, to float32 rounding."""
    rng = np.random.default_rng(n)
    logits = (rng.normal(size=n + 2) * 8).astype(np.float32)
    order = rng.permutation(n).astype(np.int32)
    end_ids = np.array([n, n + 1], np.int32)
    row, sums = buffers(n)
    text, end = row_masses(logits, order, end_ids, row, sums)
    expected = np.exp(logits.astype(np.float64) - float(logits.max()))
    np.testing.assert_allclose(row, expected[order], rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(sums, np.add.reduceat(row.astype(np.float64), np.arange(0, n, BLOCK)), rtol=1e-12)
    assert text == pytest.approx(expected[:n].sum(), rel=5e-6)
    assert end == pytest.approx(expected[n:].sum(), rel=1e-6)
    lo, hi = n // 3, n - n // 4
    assert range_sum(row, sums, lo, hi) == pytest.approx(row[lo:hi].astype(np.float64).sum(), rel=1e-9, abs=1e-30)


def test_extreme_logits() -> None:
    """-inf and very small logits become nothing that matters; none of them turns into NaN."""
    logits = np.array([0.0, -200.0, -np.inf, -87.0, 0.0], np.float32)
    row, sums = buffers(4)
    text, end = row_masses(logits, np.arange(4, dtype=np.int32), np.array([4], np.int32), row, sums)
    assert np.isfinite(row).all()
    assert text == pytest.approx(1.0, abs=1e-6)
    assert end == 1.0


@pytest.mark.parametrize("bad", [[np.nan, 0, 0], [np.inf, 0, 0], [-np.inf] * 3])
def test_broken_rows_are_refused(bad: list[float]) -> None:
    """NaN, +inf or a row without any mass is an error that counts the bad entries."""
    row, sums = buffers(3)
    with pytest.raises(ValueError, match="expected finite logits, got"):
        row_masses(np.array(bad, np.float32), np.arange(3, dtype=np.int32), np.zeros(0, np.int32), row, sums)
