"""Traces: JSON lines with every expert's vote on every piece of a text.

The first line is a header, every other line a piece::

    {"type": "header", "format": 1, "experts": ["a", "b"], "strategy": "…", "seed": 1, "versions": {…}}
    {"type": "piece", "text": " the", "bytes": "20746865", "logprob": -1.2, "decodes": 2, "ghost_share": 0.01,
     "finish_reason": null,
     "experts": {"a": {"logprob": -1.3, "weight": 0.5, "responsibility": 0.4}, "b": {…}}}

``bytes`` is hexadecimal, log-probabilities are in nats and null where an expert held the piece for impossible
(-infinity has no place in JSON). A text ended by END has a last piece without bytes.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np

from gguf_fusion.errors import GgufFusionError, UsageError
from gguf_fusion.records import Piece

FORMAT = 1
"""Raised whenever a reader of older traces would misread newer ones."""

_PACKAGES = ("gguf-fusion", "llama-cpp-python", "numpy", "numba")


def versions() -> dict[str, str]:
    """Versions of what shapes a text; packages are asked for without importing them."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            found[package] = "unknown"
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """What a reader must know of the run; ``experts`` in the order of every per-expert array."""

    experts: tuple[str, ...]
    strategy: str
    seed: int
    piece_expert: str | None = None
    """Whose tokens the pieces are; None for characters or steps."""
    versions: dict[str, str] = field(default_factory=versions)


class TraceWriter:
    """Writes one line per piece and flushes it, so that a trace is whole up to wherever a run ended."""

    def __init__(self, stream: TextIO, header: TraceHeader) -> None:
        """Write the header. The stream is closed by ``close``."""
        self._stream = stream
        self._experts = header.experts
        self._line(
            {
                "type": "header",
                "format": FORMAT,
                "experts": list(header.experts),
                "strategy": header.strategy,
                "seed": header.seed,
                "piece_expert": header.piece_expert,
                "versions": header.versions,
            }
        )

    @classmethod
    def open(cls, path: Path, header: TraceHeader) -> Self:
        """Start a trace file, replacing an older one. Raises UsageError where none can be written."""
        try:
            stream = path.open("w", encoding="utf-8", newline="\n")
        except OSError as error:
            raise UsageError(f"trace {path}: expected a file that can be written, got: {error.strerror}") from error
        return cls(stream, header)

    def write(self, pieces: Iterable[Piece], more: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add pieces, each a line of its own; ``more``: further keys of each.

        Raises GgufFusionError where the file cannot take them (a full disk): a trace with holes is none.
        """
        for i, piece in enumerate(pieces):
            self._line({"type": "piece", **piece_record(piece, self._experts), **(more[i] if more else {})})

    def close(self) -> None:
        """Close the stream; closing twice is harmless. Raises GgufFusionError as ``write`` does."""
        with self._lost_is_an_error():
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, record: dict[str, Any]) -> None:
        with self._lost_is_an_error():
            self._stream.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            self._stream.flush()

    @contextmanager
    def _lost_is_an_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            name = getattr(self._stream, "name", "")
            raise GgufFusionError(f"trace {name}: it cannot be kept there: {error.strerror}") from error


def piece_record(piece: Piece, experts: Sequence[str]) -> dict[str, Any]:
    """A piece as JSON; ``experts`` in the order of its arrays."""
    votes = zip(
        experts, piece.expert_logprobs.tolist(), piece.weights.tolist(), piece.responsibility.tolist(), strict=True
    )
    return {
        "text": piece.text,
        "bytes": piece.data.hex(),
        "logprob": _finite(piece.logprob),
        "decodes": piece.n_decodes,
        "ghost_share": piece.ghost_share,
        "finish_reason": piece.finish_reason,
        "experts": {
            name: {"logprob": _finite(logprob), "weight": weight, "responsibility": responsibility}
            for name, logprob, weight, responsibility in votes
        },
    }


def read_trace(path: Path) -> tuple[TraceHeader, list[Piece]]:
    """Header and pieces of a trace; a last line that was cut off is left out.

    Raises UsageError, naming the line, for anything that is no trace of this format.
    """
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    try:
        records = [json.loads(line) for line in whole.split(b"\n")]
    except ValueError as error:
        raise UsageError(f"trace {path}: expected one JSON object per line, got: {error}") from error
    first = records[0]
    if not isinstance(first, dict) or (first.get("type"), first.get("format")) != ("header", FORMAT):
        raise UsageError(f"trace {path}: expected a header of format {FORMAT} in line 1; write the trace again")
    header = TraceHeader(
        experts=tuple(first["experts"]),
        strategy=first["strategy"],
        seed=first["seed"],
        piece_expert=first["piece_expert"],
        versions=first["versions"],
    )
    return header, [_piece(record, header.experts) for record in records[1:]]


def _piece(record: dict[str, Any], experts: Sequence[str]) -> Piece:
    votes = [record["experts"][name] for name in experts]
    return Piece(
        data=bytes.fromhex(record["bytes"]),
        text=record["text"],
        logprob=_nats(record["logprob"]),
        expert_logprobs=np.array([_nats(vote["logprob"]) for vote in votes]),
        weights=np.array([vote["weight"] for vote in votes]),
        responsibility=np.array([vote["responsibility"] for vote in votes]),
        n_decodes=record["decodes"],
        ghost_share=record["ghost_share"],
        finish_reason=record["finish_reason"],
    )


def _finite(logprob: float) -> float | None:
    return None if logprob == -math.inf else logprob


def _nats(value: float | None) -> float:
    return -math.inf if value is None else value
