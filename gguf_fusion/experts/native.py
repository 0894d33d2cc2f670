"""The only door to llama_cpp: every call is checked first, because a native assertion would end the process.

Facts behind the checks (llama.cpp as vendored by llama-cpp-python 0.3.36): ``llama_decode`` aborts on more tokens than
``n_batch`` and more outputs than ``n_outputs_max``; ``llama_token_to_piece`` throws through C on an id outside of the
vocabulary; a NULL result is explained in the log only.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as lib
import numpy as np

from gguf_fusion.arrays import F32, I32, I64, U8
from gguf_fusion.errors import ClosedError, LoadError
from gguf_fusion.experts import native_log

MIN_VERSION, BELOW_VERSION = (0, 3, 35), (0, 4)
"""The structs of llama_cpp change between releases; these are the ones whose layout has been checked."""
MAX_THREADS = 512
"""GGML_MAX_N_THREADS: more would overrun a native array."""
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20}
"""Types of the K and V cache by the name users write."""
CACHE_BITS = {
    "f32": 32.0, "f16": 16.0, "bf16": 16.0, "q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q5_1": 6.0, "q8_0": 8.5,
    "iq4_nl": 4.5,
}  # fmt: skip
QUANT_BLOCK = 32
"""Values per block of every quantized cache type."""

ATTR_UNKNOWN, ATTR_UNUSED, ATTR_NORMAL, ATTR_CONTROL, ATTR_USER_DEFINED, ATTR_BYTE = 1, 2, 4, 8, 16, 32

_started = threading.Lock()
_is_started = False
_log_callback: Any = None


def start() -> None:
    """Check the binding's version, take over its log and initialise the backend, once per process."""
    global _is_started, _log_callback
    with _started:
        if _is_started:
            return
        version = tuple(int(part) for part in re.findall(r"\d+", llama_cpp.__version__)[:3])
        if not MIN_VERSION <= version < BELOW_VERSION:
            raise LoadError(
                f"llama-cpp-python {llama_cpp.__version__} is installed, but this release was checked with "
                f">={'.'.join(map(str, MIN_VERSION))},<{'.'.join(map(str, BELOW_VERSION))}; "
                f"install one: pip install 'llama-cpp-python>=0.3.35,<0.4'"
            )
        # A reference is kept: native code calls it as long as the process lives.
        _log_callback = lib.llama_log_callback(lambda level, text, _: native_log.receive(level, text))
        lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
        lib.llama_backend_init()
        _is_started = True


def system_info() -> str:
    """CPU features and backends the native library was built with."""
    start()
    return (lib.llama_print_system_info() or b"").decode("utf-8", "replace")


def _quick(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A call that keeps the interpreter lock: for functions of a microsecond the hand-over would cost more."""
    prototype = ctypes.PYFUNCTYPE(result, *arguments)
    return prototype((name, lib._lib))


_token_to_piece = _quick(
    "llama_token_to_piece", ctypes.c_int32,
    ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool,
)  # fmt: skip
_logits_at = _quick("llama_get_logits_ith", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
_get_attr = _quick("llama_vocab_get_attr", ctypes.c_int, ctypes.c_void_p, ctypes.c_int32)
_is_eog = _quick("llama_vocab_is_eog", ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32)


class Model:
    """A loaded model file. Free its contexts before it; ``close`` is idempotent."""

    def __init__(
        self,
        path: Path,
        *,
        n_gpu_layers: int = 0,
        use_extra_bufts: bool = False,
        vocab_only: bool = False,
        devices: Any = None,
        tensor_split: tuple[float, ...] = (),
    ) -> None:
        """``devices``: pointers that end with NULL, None = all;  ``tensor_split``: shares of the layers on each.

        Raises LoadError with the native reason.
        """
        start()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = use_extra_bufts
        params.vocab_only = vocab_only
        if devices is not None:
            params.devices = ctypes.cast(devices, ctypes.c_void_p)
        shares = (ctypes.c_float * max(len(tensor_split), int(lib.llama_max_devices())))(*tensor_split)
        if tensor_split:
            params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
        self._kept = devices, shares  # native code holds their addresses
        self._handle: Any = None
        with native_log.collected() as lines:
            handle = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not handle:
            raise LoadError(native_log.reason(lines))
        self._handle = handle
        self.vocab = lib.llama_model_get_vocab(handle)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))

    @property
    def handle(self) -> Any:
        """The native pointer; raises ClosedError when it is gone."""
        if self._handle is None:
            raise ClosedError("the model was closed")
        return self._handle

    def close(self) -> None:
        """Free the model."""
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.llama_model_free(handle)

    @property
    def generates(self) -> bool:
        """Whether it has layers and writes from left to right (no encoder, no diffusion model)."""
        model = self.handle
        return (
            int(lib.llama_model_n_layer(model)) > 0
            and not lib.llama_model_has_encoder(model)
            and bool(lib.llama_model_has_decoder(model))
            and not lib.llama_model_is_diffusion(model)
            and int(lib.llama_vocab_type(self.vocab)) not in (lib.LLAMA_VOCAB_TYPE_NONE, lib.LLAMA_VOCAB_TYPE_WPM)
        )

    @property
    def has_state(self) -> bool:
        """Whether (part of) its memory is a running state, which cannot be cut at a position."""
        return bool(lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle))

    @property
    def n_swa(self) -> int:
        """Width of the sliding attention window in tokens, 0 for none."""
        return int(lib.llama_model_n_swa(self.handle))

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context the model was trained with."""
        return int(lib.llama_model_n_ctx_train(self.handle))

    def chat_template(self) -> str | None:
        """The whole text of the default chat template, or None."""
        text = lib.llama_model_chat_template(self.handle, None)
        return None if text is None else bytes(text).decode("utf-8", "replace")

    # ---- vocabulary -------------------------------------------------------------------------------------------

    def pieces(self) -> tuple[U8, I64]:
        """(uint8[total], int64[n_vocab + 1]): the bytes of all ids (special ones: their text), and each one's start."""
        assert self.handle
        buffer = np.empty(max(1 << 20, 16 * self.n_vocab), np.uint8)
        base, size, at = buffer.ctypes.data, len(buffer), 0
        starts = [0]
        call, vocab = _token_to_piece, self.vocab
        for token in range(self.n_vocab):
            n = call(vocab, token, base + at, size - at, 0, True)
            if n < 0:
                buffer = np.concatenate([buffer, np.empty(size - n, np.uint8)])
                base, size = buffer.ctypes.data, len(buffer)
                n = call(vocab, token, base + at, size - at, 0, True)
            at += n
            starts.append(at)
        return buffer[:at].copy(), np.array(starts, np.int64)

    def attributes(self) -> I32:
        """int32[n_vocab]: the ATTR bits of every id."""
        assert self.handle
        call, vocab = _get_attr, self.vocab
        return np.fromiter((call(vocab, token) for token in range(self.n_vocab)), np.int32, self.n_vocab)

    def end_ids(self) -> list[int]:
        """The ids the native library takes for end-of-generation tokens (it goes by their text)."""
        assert self.handle
        call, vocab = _is_eog, self.vocab
        return [token for token in range(self.n_vocab) if call(vocab, token)]

    def suppressed_ids(self) -> list[int]:
        """Ids the model file wants banned."""
        assert self.handle
        count = ctypes.c_int32()
        found = lib.llama_vocab_get_suppress_tokens(self.vocab, ctypes.byref(count))
        return [int(found[i]) for i in range(count.value)] if found else []

    def bos_id(self) -> int | None:
        """The id to put first, if the model says that one belongs there; a merely reported id does not count."""
        assert self.handle
        bos = int(lib.llama_vocab_bos(self.vocab))
        return bos if lib.llama_vocab_get_add_bos(self.vocab) and 0 <= bos < self.n_vocab else None

    def tokenize(self, text: bytes, *, parse_special: bool) -> I32:
        """int32[n]: ids of valid UTF-8 text, no BOS added. Thread-safe; a space may be added (see ``tokenizer``)."""
        assert self.handle
        ids = np.empty(len(text) + 8, np.int32)
        for _ in range(2):
            n = int(
                lib.llama_tokenize(
                    self.vocab, text, len(text), ids.ctypes.data_as(lib.llama_token_p), len(ids), False, parse_special
                )
            )
            if n >= 0:
                return ids[:n].copy()
            ids = np.empty(-n, np.int32)
        raise ValueError(f"text of {len(text)} bytes cannot be tokenized natively")


class Context:
    """A model's cache and compute buffers for two sequences that share one pool of cells."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_rows: int,
        n_threads: int,
        type_k: str,
        type_v: str,
        flash_attn: bool | None,
        swa_full: bool,
        n_seq: int,
        hidden: bool = False,
    ) -> None:
        """Raises LoadError with the native reason. Ranges are the caller's duty; ``hidden``: see ``settings``."""
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_ubatch
        params.n_outputs_max = max(n_batch if hidden else n_rows, n_seq)
        params.n_seq_max, params.kv_unified = n_seq, True
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k, params.type_v = CACHE_TYPES[type_k], CACHE_TYPES[type_v]
        params.flash_attn_type = -1 if flash_attn is None else int(flash_attn)
        params.pooling_type = lib.LLAMA_POOLING_TYPE_NONE
        params.embeddings, params.swa_full, params.no_perf = hidden, swa_full, True
        self._handle: Any = None
        self._model = model
        with native_log.collected() as lines:
            handle = lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise LoadError(native_log.reason(lines))
        self._handle = handle
        self._memory = lib.llama_get_memory(handle)
        self.n_cells = int(lib.llama_n_ctx(handle))
        self.n_batch = int(lib.llama_n_batch(handle))
        self.n_rows = n_rows
        self.n_seq = n_seq
        self._batch = lib.llama_batch_init(self.n_batch, 0, 1)
        self._token = np.ctypeslib.as_array(self._batch.token, (self.n_batch,))
        self._pos = np.ctypeslib.as_array(self._batch.pos, (self.n_batch,))
        self._positions = np.arange(self.n_cells, dtype=np.int32)
        self._output = np.ctypeslib.as_array(self._batch.logits, (self.n_batch,))
        np.ctypeslib.as_array(self._batch.n_seq_id, (self.n_batch,))[:] = 1
        self._last: deque[str] = deque()
        self._view: tuple[tuple[int, int], F32] = (0, 0), np.zeros((0, 0), np.float32)

    @property
    def handle(self) -> Any:
        """The native pointer; raises ClosedError when it is gone."""
        if self._handle is None:
            raise ClosedError("the context was closed")
        return self._handle

    def close(self) -> None:
        """Free the context; rows taken from it must not be read any more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.llama_batch_free(self._batch)
            lib.llama_free(handle)

    def decode(self, tokens: I32, position: int, sequence: int, n_rows: int) -> int:
        """Decode ``tokens`` at ``position``…; the last ``n_rows`` give logits. Returns the native code.

        0 is success, 1 no free cells; for others see ``explain``.
        """
        n = len(tokens)
        if not 1 <= n <= self.n_batch or not 0 <= n_rows <= min(n, self.n_rows):
            raise ValueError(f"decode: {n} tokens and {n_rows} rows, expected 1…{self.n_batch} and 0…{self.n_rows}")
        if not 0 <= sequence < self.n_seq or position < 0 or position + n > self.n_cells:
            raise ValueError(f"decode: sequence {sequence}, positions {position}…{position + n - 1} out of range")
        if int(tokens.view(np.uint32).max()) >= self._model.n_vocab:  # negative ids are large ones, too
            raise ValueError(f"decode: token ids must lie in 0…{self._model.n_vocab - 1}")
        handle, batch = self.handle, self._batch
        batch.n_tokens = n
        self._token[:n] = tokens
        self._pos[:n] = self._positions[position : position + n]
        self._output[:n] = 0
        self._output[n - n_rows : n] = 1
        for i in range(n):
            batch.seq_id[i][0] = sequence
        with native_log.collected() as self._last:
            code = int(lib.llama_decode(handle, batch))
            if code == 0:
                lib.llama_synchronize(handle)
        return code

    def explain(self, code: int) -> str:
        """What a code of ``decode`` means, with the native library's own words."""
        meaning = {
            1: "the context is full: no free cells",
            2: "the computation was aborted",
            -1: "the batch was refused",
        }.get(code, "a native failure (often: out of memory)")
        return f"{meaning} (code {code}); native: {native_log.reason(self._last)}"

    def rows(self, n_tokens: int, n_rows: int) -> F32:
        """float32[n_rows, n_vocab]: a view of the logits of the last ``n_rows`` of ``n_tokens`` just decoded."""
        width = self._model.n_vocab
        first = _logits_at(self.handle, n_tokens - n_rows)
        last = first if n_rows == 1 else _logits_at(self.handle, n_tokens - 1)
        if not first or not last:
            raise ValueError(f"rows: {n_rows} rows of {n_tokens} tokens were asked for, but not computed")
        apart = last - first
        if apart != 4 * width * (n_rows - 1):
            raise ValueError(f"rows: expected {n_rows} contiguous rows, but the last lies {apart} bytes from the first")
        if self._view[0] != (first, n_rows):  # nearly always the same place
            values = (ctypes.c_float * (n_rows * width)).from_address(first)
            self._view = (first, n_rows), np.ctypeslib.as_array(values).reshape(n_rows, width)
        return self._view[1]

    def states(self, n_tokens: int, n_rows: int) -> F32:
        """float32[n_rows, n_embd]: the hidden states of the last ``n_rows`` of ``n_tokens`` just decoded, copied."""
        width = int(lib.llama_model_n_embd(self._model.handle))
        pointers = [lib.llama_get_embeddings_ith(self.handle, i) for i in range(n_tokens - n_rows, n_tokens)]
        return np.stack([np.ctypeslib.as_array(pointer, (width,)) for pointer in pointers]).astype(np.float32)

    def set_threads(self, n: int) -> None:
        """Use ``n`` threads from the next decode on."""
        lib.llama_set_n_threads(self.handle, n, n)

    def remove(self, sequence: int, start: int) -> bool:
        """Remove positions from ``start`` on; False where the memory cannot be cut there (nothing has changed then)."""
        return bool(lib.llama_memory_seq_rm(self._live_memory, sequence, start, -1))

    def clear(self) -> None:
        """Forget all sequences."""
        lib.llama_memory_clear(self._live_memory, False)

    def share(self, end: int) -> None:
        """Let sequence 1 share the cells of positions 0 … end - 1 of sequence 0; nothing is copied."""
        lib.llama_memory_seq_cp(self._live_memory, 0, 1, 0, end)

    def first_position(self, sequence: int) -> int:
        """Smallest position still held, -1 if none."""
        return int(lib.llama_memory_seq_pos_min(self._live_memory, sequence))

    def last_position(self, sequence: int) -> int:
        """Largest position held, -1 if none."""
        return int(lib.llama_memory_seq_pos_max(self._live_memory, sequence))

    @property
    def _live_memory(self) -> Any:
        if self._handle is None:
            raise ClosedError("the context was closed")
        return self._memory
