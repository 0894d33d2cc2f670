"""The one decorator that compiles kernels; every jit option is decided here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., object])


def kernel(function: _Function) -> _Function:
    """Compile a function of plain arrays and numbers.

    Never ``fastmath`` (-inf is a masked symbol) and never ``parallel`` (kernels run in several threads at once, which
    numba's portable threading layer does not survive). Where no cache directory can be used, compiled code is not kept.
    """
    try:
        return cast("_Function", numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # numba: "no locator available", the package and the cache directory are read-only
        return cast("_Function", numba.njit(nogil=True, error_model="numpy")(function))
