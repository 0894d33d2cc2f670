"""The state of a text, copied out of a context and back into it."""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as lib
import numpy as np

from gguf_fusion.experts.native import Context
from gguf_fusion.experts.prompt_cache import State


def size(context: Context) -> int:
    """Bytes of the state of sequence 0."""
    return int(lib.llama_state_seq_get_size(context.handle, 0))


def copied(context: Context) -> State:
    """uint8[n]: the state of sequence 0."""
    state = np.empty(size(context), np.uint8)
    n = int(lib.llama_state_seq_get_data(context.handle, _pointer(state), len(state), 0))
    return state[:n]


def restore(context: Context, state: State) -> bool:
    """Make ``state`` that of sequence 0, all others being forgotten; False where the native library refuses."""
    context.clear()
    if len(state) and lib.llama_state_seq_set_data(context.handle, _pointer(state), len(state), 0):
        return True
    context.clear()
    return False


def _pointer(state: State) -> ctypes._Pointer[ctypes.c_uint8]:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
