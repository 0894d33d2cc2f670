"""Scoring documents: take the trace from the cache, or load the experts and record it."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gguf_fusion.bridge.store import cached_byte_tables
from gguf_fusion.cover.tree import DEFAULT_EPSILON
from gguf_fusion.errors import GgufFusionError, UsageError
from gguf_fusion.evaluate import trace, trace_cache
from gguf_fusion.evaluate.lockstep import ByteProgress, Recorder
from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.teacher import REJOIN_BYTES
from gguf_fusion.evaluate.windows import CONTEXT, SIZE, check_sizes
from gguf_fusion.hub.digests import model_digest
from gguf_fusion.hub.store import sha256_of
from gguf_fusion.lanes import Lanes, ThreadedExpert, choose
from gguf_fusion.load import load_expert
from gguf_fusion.members import Member
from gguf_fusion.options import Options

MAX_ROWS = 32
"""Rows per batch of a known text; the outputs of Gemma's vocabulary take 34 MB then."""

_SPARE_TOKENS = 64

LoadExperts = Callable[[], Sequence[ThreadedExpert]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How documents are read. Raises UsageError for values out of range.

    epsilons : of the trees that read alone; joint_epsilon : of those in company, None = the first of ``epsilons``
    window, context : bytes per window, and how many of them repeat the end of the one before without being scored
    rejoin   : see ``teacher.TeacherForced``
    """

    epsilons: tuple[float, ...] = (DEFAULT_EPSILON,)
    joint_epsilon: float | None = None
    window: int = SIZE
    context: int = CONTEXT
    rejoin: int | None = REJOIN_BYTES

    def __post_init__(self) -> None:
        check_sizes(self.window, self.context)
        for epsilon in (*self.epsilons, self.joint):
            if not 0.0 <= epsilon < 1.0:
                raise UsageError(f"epsilon: expected a number from 0 up to (not including) 1, got {epsilon}")

    @property
    def joint(self) -> float:
        """Epsilon of the trees that read in company."""
        return self.epsilons[0] if self.joint_epsilon is None else self.joint_epsilon


class Scorer:
    """Gives the traces of documents. Experts are loaded when the first trace is missing; close it afterwards."""

    def __init__(
        self,
        load: LoadExperts,
        settings: Settings,
        *,
        identity: Mapping[str, Any] | None,
        lanes: str = "auto",
        n_threads: int | None = None,
    ) -> None:
        """``identity``: JSON facts that make the experts' rows what they are; None keeps no traces."""
        self.settings = settings
        self._load = load
        self._identity = identity
        self._mode = lanes
        self._n_threads = n_threads
        self._experts: Sequence[ThreadedExpert] = ()
        self._lanes: Lanes | None = None
        self._recorder: Recorder | None = None

    @classmethod
    def of_members(
        cls,
        members: Sequence[Member],
        paths: Sequence[Path],
        options: Options,
        settings: Settings,
        *,
        keep: bool = True,
    ) -> Self:
        """A scorer of members whose files are on this machine; ``keep`` stores traces and uses stored ones."""
        n_ctx = options.n_ctx or max(256, settings.window + _SPARE_TOKENS)
        chosen = Options(n_ctx=n_ctx, n_threads=options.n_threads, n_gpu_layers=options.n_gpu_layers)

        def load() -> list[ThreadedExpert]:
            experts: list[ThreadedExpert] = []
            try:
                for member, path in zip(members, paths, strict=True):
                    experts.append(load_expert(member.spec, path, chosen, max_rows=min(MAX_ROWS, n_ctx)))
            except BaseException:
                for expert in experts:
                    expert.close()
                raise
            return experts

        identity = {"experts": [_facts(m, p, options) for m, p in zip(members, paths, strict=True)]} if keep else None
        return cls(load, settings, identity=identity, lanes=options.lanes, n_threads=options.n_threads)

    def key(self, text: bytes) -> str | None:
        """The key of a text's trace; None where none are kept."""
        if self._identity is None:
            return None
        s = self.settings
        description = {
            **self._identity,
            "epsilons": list(s.epsilons),
            "joint_epsilon": s.joint,
            "stand_in_weights": "equal",
            "window": [s.window, s.context],
            "rejoin": s.rejoin,
            "rows": MAX_ROWS,
            "text": hashlib.sha256(text).hexdigest(),
        }
        return trace_cache.key_of(description)

    def is_cached(self, text: bytes) -> bool:
        """Whether the trace exists (it may turn out to be damaged)."""
        key = self.key(text)
        return key is not None and (trace_cache.root() / key / "meta.json").is_file()

    @contextmanager
    def trace(self, document: Document, progress: ByteProgress = lambda _: None) -> Iterator[trace.Trace]:
        """The trace of a document, valid inside the block; ``progress`` hears of the bytes that had to be read."""
        key = self.key(document.text)
        if key is None:
            with self._temporary() as path:
                yield _opened(self._ready().record(document.text, path, progress), path, document.text)
            return
        stored = trace_cache.find(key)
        found = None if stored is None else trace.open_trace(stored.path, stored.about, document.text)
        if found is None:
            if stored is not None:  # complete, but not what this code reads
                shutil.rmtree(stored.path, ignore_errors=True)
            recorder = self._ready()
            need = trace.need_bytes(len(document.text), len(recorder.experts), len(self.settings.epsilons))
            about: dict[str, Any] = {"document": document.name, "n_bytes": len(document.text)}
            with trace_cache.adding(key, need, about) as path:
                about |= recorder.record(document.text, path, progress)
            found = _opened(about, trace_cache.root() / key, document.text)
        yield found

    def close(self) -> None:
        """Free the experts, if any were loaded."""
        if self._lanes is not None:
            self._lanes.close()
        for expert in self._experts:
            expert.close()
        self._experts, self._lanes, self._recorder = (), None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self) -> Recorder:
        if self._recorder is None:
            self._experts = self._load()
            self._lanes = Lanes(choose(self._experts, self._mode, self._n_threads), self._experts)
            s = self.settings
            self._recorder = Recorder(
                self._experts,
                [cached_byte_tables(expert.vocabulary) for expert in self._experts],
                self._lanes,
                epsilons=s.epsilons,
                joint_epsilon=s.joint,
                window=s.window,
                context=s.context,
                rejoin=s.rejoin,
            )
        return self._recorder

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        home = trace_cache.root()
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=trace_cache.PARTIAL) as name:
            yield Path(name)


def _opened(about: Mapping[str, Any], path: Path, text: bytes) -> trace.Trace:
    found = trace.open_trace(path, about, text)
    if found is None:
        raise GgufFusionError(f"the trace in {path} vanished or changed while it was used; run the command again")
    return found


def _facts(member: Member, path: Path, options: Options) -> dict[str, Any]:
    """What decides about an expert's rows."""
    spec = member.spec
    adapter = {} if spec.lora is None else {"lora": sha256_of(spec.lora)}
    return {
        **adapter,
        "name": spec.name,
        "sha256": model_digest(path),
        "n_gpu_layers": (spec.n_gpu_layers or 0) if options.n_gpu_layers is None else options.n_gpu_layers,
        "types": [spec.type_k, spec.type_v],
        "end": [list(spec.add_end), list(spec.remove_end)],
    }
