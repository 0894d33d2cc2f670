"""Quantizing a model file with the native library; part of the one door to llama_cpp."""

from __future__ import annotations

from pathlib import Path

import llama_cpp.llama_cpp as lib

from gguf_fusion.errors import LoadError
from gguf_fusion.experts import native, native_log

FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q2_K": 10, "Q2_K_S": 21,
    "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "IQ4_NL": 25, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37,
}  # fmt: skip
"""Levels that need no importance matrix, and the native library's numbers for them (``LLAMA_FTYPE_…``)."""


def quantize(source: Path, target: Path, level: str, *, n_threads: int = 0, requantize: bool = False) -> None:
    """Write ``source`` at another level. Raises LoadError with the native reason; then no target is left behind."""
    native.start()
    params = lib.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = n_threads, FILE_TYPES[level], requantize
    with native_log.collected() as lines:
        code = int(lib.llama_model_quantize(str(source).encode(), str(target).encode(), params))
    if code:
        target.unlink(missing_ok=True)
        raise LoadError(f"{source.name} cannot be written as {level}: {native_log.reason(lines)}")
