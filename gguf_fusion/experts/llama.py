"""An expert that is a GGUF model run by llama.cpp."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gguf_fusion.arrays import F32, I32
from gguf_fusion.errors import ClosedError, ContextOverflowError, ExpertFailedError, LoadError, ModelFileError
from gguf_fusion.experts import native, native_devices, native_lora, native_state, weights
from gguf_fusion.experts.base import Progress
from gguf_fusion.experts.native_vocabulary import EndEdit, read_vocabulary
from gguf_fusion.experts.prompt_cache import PromptCache, n_shared
from gguf_fusion.experts.settings import Settings, check_against_model, depends_on_threads, flash, load_message
from gguf_fusion.experts.tokenizer import Tokenizer
from gguf_fusion.gguf_info import read, require_generative
from gguf_fusion.kernels.paths import common_prefix
from gguf_fusion.vocabulary import Vocabulary

_log = logging.getLogger(__name__)
_warned_cpu_only = False

_NO_SPACE = 1
"""``llama_decode``: no free cells."""


class LlamaExpert:
    """Evaluates token paths with a GGUF model, keeping the last path resident. See ``experts.base.Expert``."""

    def __init__(
        self,
        name: str,
        model: native.Model,
        context: native.Context,
        vocabulary: Vocabulary,
        settings: Settings,
        *,
        thread_sensitive: bool,
    ) -> None:
        """Use ``load``."""
        self.name = name
        self.settings = settings
        self.n_ctx = settings.n_ctx
        self.max_rows = settings.max_rows
        self.n_decoded = 0
        self.decode_s = 0.0
        self.hidden: F32 | None = None
        """float32[n_rows, n_embd], hidden states of the rows last computed along a text (setting ``hidden``)."""
        self.n_hidden = 0
        """How often ``hidden`` was set: tells whether it is news."""
        self.vocabulary = vocabulary
        self.thread_sensitive = thread_sensitive
        """Whether rows change, within rounding, with the number of threads: then keep it the same for a text."""
        self._tokenizer = Tokenizer(
            name, self.vocabulary, lambda text, special: model.tokenize(text, parse_special=special)
        )
        self._model, self._context = model, context
        self._n_swa = 0 if settings.swa_full else model.n_swa
        self.goes_back = settings.swa_full and not model.has_state
        """Whether the text can be cut anywhere without reading it again."""
        self._told = False
        self.prompt_cache: PromptCache | None = None
        self._resident = np.zeros(settings.n_ctx, np.int32)
        self._n_resident = 0
        self._last_path = np.zeros(0, np.int32)
        self._last_rows: F32 | None = None
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        # A forgotten expert gives its memory back too; contexts go before their model.
        self._release = weakref.finalize(self, _free, context, model, self._process)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        name: str | None = None,
        add_end: EndEdit = (),
        remove_end: EndEdit = (),
        **settings: Any,
    ) -> LlamaExpert:
        """Load a GGUF file (any shard of a split one) with the given ``Settings`` (None = default).

        Raises ModelFileError for files that are damaged or cannot generate, UsageError for settings out of range,
        LoadError when memory or the native library says no (the message ends with its reason).
        """
        chosen = Settings(**{key: value for key, value in settings.items() if value is not None})
        info = read(path)
        require_generative(info)
        name = name or info.path.stem
        check_against_model(name, info, chosen)
        if chosen.n_gpu_layers:
            _warn_if_cpu_only(name)
        model = context = None
        try:
            try:
                model = weights.borrow(
                    info.path, n_gpu_layers=chosen.n_gpu_layers, use_extra_bufts=chosen.use_extra_bufts,
                    rpc=chosen.rpc, tensor_split=chosen.tensor_split,
                )  # fmt: skip
                # A branch needs a second sequence; memories that cannot be cut, and small windows, have no use for it.
                n_seq = 2 if chosen.swa_full and not model.has_state else 1
                if not model.generates:
                    raise ModelFileError(
                        f"{info.path}: this model does not generate text from left to right; "
                        f"choose a text-generation GGUF"
                    )
                context = native.Context(
                    model, n_ctx=chosen.n_ctx, n_batch=chosen.batch, n_ubatch=chosen.n_ubatch,
                    n_rows=chosen.max_rows, n_threads=chosen.threads, type_k=chosen.type_k, type_v=chosen.type_v,
                    flash_attn=flash(info, chosen), swa_full=chosen.swa_full, n_seq=n_seq, hidden=chosen.hidden,
                )  # fmt: skip
                if chosen.lora:
                    native_lora.apply(model, context, Path(chosen.lora))
            except LoadError as error:
                raise LoadError(load_message(name, info, chosen, str(error))) from None
            vocabulary = read_vocabulary(model, add_end=add_end, remove_end=remove_end)
            return cls(name, model, context, vocabulary, chosen, thread_sensitive=depends_on_threads(info, chosen))
        except BaseException:
            _free(context, model, os.getpid())
            raise

    # ---- text -------------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes) -> I32:
        """int32[n]: canonical ids of plain text; see ``tokenizer.Tokenizer.text``."""
        with self._using():
            return self._tokenizer.text(text)

    def tokenize_template(self, text: bytes) -> I32:
        """int32[n]: ids of template scaffolding; see ``tokenizer.Tokenizer.template``."""
        with self._using():
            return self._tokenizer.template(text)

    def chat_template(self) -> str | None:
        """The whole text of the model's default chat template, or None if it has none."""
        with self._using():
            return self._model.chat_template()

    # ---- evaluation -------------------------------------------------------------------------------------------

    def evaluate(self, path: I32, n_rows: int = 1, *, branch: bool = False, progress: Progress | None = None) -> F32:
        """Raw logits float32[n_rows, n_vocab] after each of the last ``n_rows`` tokens of ``path``, without a copy.

        Valid until the next ``evaluate`` or ``close``. Equal calls give equal rows bit for bit only when the same
        tokens are decoded in the same batches: which ones depends on what is resident.
        """
        with self._using():
            path = self._checked(path, n_rows)
            known = self._last_rows
            same = known is not None and len(known) >= n_rows and len(path) == len(self._last_path)
            if known is not None and same and (path == self._last_path).all():
                return known[-n_rows:]
            self._last_rows = None
            rows = self._beside(path, n_rows) if branch else None
            if rows is None:
                rows = self._along(path, n_rows, progress)
            self._last_path, self._last_rows = path.copy(), rows
            return rows

    def bring_back(self, path: I32) -> int:
        """Make the text that shares most with ``path`` resident; see the protocol."""
        with self._using():
            context, resident = self._context, self._resident[: self._n_resident]
            if self.prompt_cache is not None and context.last_position(0) == self._n_resident - 1:
                kept = self.prompt_cache.exchange(
                    self.name, resident, path, lambda: native_state.size(context), lambda: native_state.copied(context),
                    whole=not self.goes_back,
                )  # fmt: skip
                if kept is not None:
                    self._last_rows, self._n_resident = None, 0
                    if native_state.restore(context, kept.state):
                        self._resident[: len(kept.path)] = kept.path
                        self._n_resident = len(kept.path)
            return n_shared(self._resident[: self._n_resident], path)

    def forget(self) -> None:
        """Drop the resident path; the next text is then decoded in the same batches whatever came before."""
        self.bring_back(np.zeros(0, np.int32))
        with self._using():
            self._last_rows = None
            self._n_resident = 0
            self._context.clear()

    def set_threads(self, n: int) -> None:
        """Decode with ``n`` threads from the next call on."""
        if not 1 <= n <= native.MAX_THREADS:
            raise ValueError(f"n: expected 1…{native.MAX_THREADS} threads, got {n}")
        with self._using():
            self._context.set_threads(n)

    def _checked(self, path: I32, n_rows: int) -> I32:
        path = np.ascontiguousarray(path, np.int32)
        if path.ndim != 1 or not len(path):
            raise ValueError(f"path: expected int32[n] with at least one token, got shape {path.shape}")
        if not 1 <= n_rows <= min(self.max_rows, len(path)):
            raise ValueError(
                f"n_rows: expected 1…{min(self.max_rows, len(path))} (max_rows and the path's length), got {n_rows}"
            )
        if len(path) > self.n_ctx:
            raise ContextOverflowError(self.name, len(path), self.n_ctx)
        return path

    def _shared(self, path: I32) -> int:
        """Length of the longest common prefix of ``path`` and the resident path."""
        n = int(common_prefix(path, self._resident, self._n_resident, self.vocabulary.n_vocab))
        if n < 0:
            raise ValueError(f"path: token ids must lie in 0…{self.vocabulary.n_vocab - 1}")
        return n

    def _along(self, path: I32, n_rows: int, progress: Progress | None) -> F32:
        """Make ``path`` the resident one and return its last rows."""
        start = self._cut(min(self._shared(path), len(path) - n_rows))
        total = len(path) - start
        at = start
        while True:
            rest = len(path) - at
            # The last chunk must hold all tokens whose rows are wanted.
            n = rest if rest <= self._context.n_batch else min(self._context.n_batch, rest - n_rows)
            wanted = n_rows if n == rest else 0
            self._decode(path[at : at + n], at, 0, wanted)
            self._resident[at : at + n] = path[at : at + n]
            at += n
            self._n_resident = at
            if progress is not None:
                progress(at - start, total)
            if n == rest:
                if self.settings.hidden:
                    self.hidden = self._context.states(n, n_rows)
                    self.n_hidden += 1
                return self._context.rows(n, n_rows)

    def _cut(self, start: int) -> int:
        """Shorten the resident path to ``start`` tokens, or to none where the memory cannot; returns its new length."""
        context = self._context
        held = self._n_resident
        if context.last_position(0) != held - 1:
            held = 0  # an interrupted call left something behind
        elif start < held:
            # Set first: if the call is interrupted, the check above notices.
            self._n_resident = start
            if not (self._window_complete(start) and (start == 0 or context.remove(0, start))):
                self._tell_refusal()
                held = 0
            elif start == 0:
                held = 0
            else:
                held = start
        if held == 0:
            context.clear()
        self._n_resident = held
        return held

    def _tell_refusal(self) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "expert %r: its memory cannot go back to an earlier point of the text, so the text is evaluated again "
                "each time; this is slow (sliding windows: swa_full=True avoids it)",
                self.name,
            )

    def _window_complete(self, start: int) -> bool:
        """Whether every token that position ``start`` may attend to is still in the cache of the window layers."""
        return not self._n_swa or self._context.first_position(0) <= max(0, start - self._n_swa)

    def _beside(self, path: I32, n_rows: int) -> F32 | None:
        """Rows of ``path`` from a second sequence, the resident one untouched; None where that is not possible."""
        context = self._context
        start = min(self._shared(path), len(path) - n_rows)
        n = len(path) - start
        if context.n_seq < 2 or not start or n > context.n_batch or self._n_resident + n > context.n_cells:
            return None
        if context.last_position(0) != self._n_resident - 1 or not self._window_complete(start):
            return None
        try:
            context.share(start)
            self._decode(path[start:], start, 1, n_rows)
            return context.rows(n, n_rows)
        finally:
            context.remove(1, 0)

    def _decode(self, tokens: I32, position: int, sequence: int, n_rows: int) -> None:
        began = time.perf_counter()
        code = self._context.decode(tokens, position, sequence, n_rows)
        self.decode_s += time.perf_counter() - began
        if code:
            reason = self._context.explain(code)
            if sequence == 0:
                self._context.clear()
                self._n_resident = 0
            raise ExpertFailedError(self.name, reason)
        self.n_decoded += len(tokens)

    # ---- life -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the context, then the model; waits for a running call. Closing twice is harmless."""
        if os.getpid() != self._process:
            self._closed = True  # the memory belongs to the parent process
            return
        with self._lock:
            self._closed = True
            self._last_rows = None
            self._release()

    def __enter__(self) -> LlamaExpert:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Hold the lock during a call; raises if the expert cannot be used (any more, or in this process)."""
        if os.getpid() != self._process:
            raise ExpertFailedError(
                self.name,
                f"it was loaded by process {self._process} and cannot be used in its fork {os.getpid()}; "
                f"load it after forking, or start processes with the 'spawn' method",
            )
        with self._lock:
            if self._closed:
                raise ClosedError(f"expert {self.name!r} was closed; load it again to use it")
            yield


def _free(context: native.Context | None, model: native.Model | None, process: int) -> None:
    if os.getpid() != process:
        return
    if context is not None:
        context.close()
    if model is not None:
        weights.give_back(model)


def _warn_if_cpu_only(name: str) -> None:
    global _warned_cpu_only
    if not _warned_cpu_only and not native_devices.supports_gpu_offload():
        _warned_cpu_only = True
        _log.warning(
            "expert %r asks for layers on a GPU, but the installed llama-cpp-python was built for the CPU only: "
            'everything runs on the CPU. For NVIDIA cards: CMAKE_ARGS="-DGGML_CUDA=on" pip install '
            "--force-reinstall --no-cache-dir llama-cpp-python (Metal, Vulkan, ROCm: see the README)",
            name,
        )
