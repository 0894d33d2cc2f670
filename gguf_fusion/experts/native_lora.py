"""LoRA adapters: low-rank changes that are added while a model computes; the model's own weights stay as they are."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import llama_cpp.llama_cpp as lib

from gguf_fusion.errors import LoadError
from gguf_fusion.experts import native, native_log


def apply(model: native.Model, context: native.Context, path: Path) -> None:
    """Let a context compute with an adapter (a GGUF made for this model), at its full strength.

    The adapter is freed with its model. Raises LoadError with the native reason.
    """
    if not path.is_file():
        raise LoadError(f"{path}: no such LoRA adapter; expected a GGUF file (llama.cpp's convert_lora_to_gguf.py)")
    with native_log.collected() as lines:
        adapter = lib.llama_adapter_lora_init(model.handle, os.fsencode(path))
    if not adapter:
        raise LoadError(
            f"{path}: this LoRA adapter cannot be used with the model; expected one that was trained on it. "
            f"Native library: {native_log.reason(lines)}"
        )
    adapters = (lib.llama_adapter_lora_p_ctypes * 1)(adapter)
    if lib.llama_set_adapters_lora(context.handle, adapters, 1, (ctypes.c_float * 1)(1.0)):
        raise LoadError(f"{path}: the native library refused the LoRA adapter")
