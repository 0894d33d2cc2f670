"""Token paths: what two of them share."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_fusion.kernels.paths import common_prefix


@pytest.mark.parametrize(
    ("path", "other", "n_other", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 4, 3),
        ([1, 2, 3], [1, 2, 3, 4], 2, 2),
        ([1, 2, 3], [1, 5, 3], 3, 1),
        ([7], [1], 1, 0),
        ([1, -1], [1], 1, -1),
        ([1, 10], [1], 1, -1),
    ],
)
def test_common_prefix(path: list[int], other: list[int], n_other: int, expected: int) -> None:
    """As far as both agree; ids outside the vocabulary of ten are told apart."""
    assert common_prefix(np.array(path, np.int32), np.array(other, np.int32), n_other, 10) == expected
