"""The one door to numba; every jit option is decided here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic as numba_intrinsic

__all__ = ["fused_multiply_add", "intrinsic", "ir", "kernel", "stored_array", "types"]

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


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a generator of vector code callable from kernels (numba's ``intrinsic``)."""
    return numba_intrinsic(function)


def stored_array(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The pointer to the first item of an array argument, for the code of an ``intrinsic``."""
    return context.make_array(kind)(context, builder, value).data


def fused_multiply_add(builder: Any, kind: Any) -> Any:
    """The function a · b + c of three vectors, for the code of an ``intrinsic``: one instruction where there is one."""
    name = f"llvm.fmuladd.v{kind.count}f32"
    return get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
