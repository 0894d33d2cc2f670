"""Array aliases and guards: dtype, rank, contiguity and shape are checked in that order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]


def check_array(name: str, array: NDArray[Any], dtype: DTypeLike, shape: tuple[int | None, ...]) -> None:
    """Raise TypeError or ValueError unless ``array`` has this dtype, rank, shape and is C-contiguous.

    ``None`` in ``shape`` means any length. The message says what was expected, what was got and how to mend it.
    """
    if isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == len(shape) and array.flags.c_contiguous:
        for n, m in zip(shape, array.shape, strict=True):
            if n is not None and n != m:
                break
        else:
            return
    wanted = np.dtype(dtype)
    want = f"{wanted} ({', '.join('any' if n is None else str(n) for n in shape)})"
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected {want}, got {type(array).__name__}; use np.asarray(...)")
    got = f"{array.dtype} {array.shape}"
    if array.dtype != wanted:
        raise TypeError(f"{name}: expected {want}, got {got}; use .astype(np.{wanted.name})")
    if array.flags.c_contiguous:
        raise ValueError(f"{name}: expected {want}, got {got}; check the number of experts and symbols")
    raise ValueError(f"{name}: expected C-contiguous {want}, got a strided view; use np.ascontiguousarray(...)")
