"""A trace: the evaluated law of every expert at every byte of one document, memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_fusion.arrays import F64, Bool
from gguf_fusion.cover.ghosts import FLOOR
from gguf_fusion.errors import GgufFusionError
from gguf_fusion.kernels.unpack import unpack
from gguf_fusion.records import N_SYMBOLS

LAWS, COLUMNS = "laws.npy", "columns.npy"

_BLOCK = 256
"""Bytes worked on at once: their laws stay in a processor's cache."""


def columns_dtype(n_epsilons: int) -> np.dtype[Any]:
    """One expert at one byte.

    own_token  : whether one of its own tokens begins here;  own_bits: that token's bits, else 0
    logprob    : ln p of the byte that came, alone through the bridge, per epsilon
    share, decodes, reanchors : ghost share, rows asked for before this byte, re-anchorings, alone, per epsilon
    joint_…    : the same in the company of the other experts; joint_logprob is that of the evaluated law, before its
                 ghosts' share was filled
    """
    per_epsilon = (n_epsilons,)
    return np.dtype(
        [
            ("own_token", "?"),
            ("own_bits", "<f4"),
            ("logprob", "<f4", per_epsilon),
            ("share", "<f4", per_epsilon),
            ("decodes", "<u2", per_epsilon),
            ("reanchors", "u1", per_epsilon),
            ("joint_logprob", "<f4"),
            ("joint_share", "<f4"),
            ("joint_decodes", "<u2"),
            ("joint_reanchors", "u1"),
        ]
    )


@dataclass(frozen=True)
class Trace:
    """What ``lockstep.record`` found out about one document.

    names    : experts, in the order of the second axis of the arrays
    epsilons : those of the trees that read alone; joint_epsilon that of the trees in company
    scored   : bool[n_bytes], False for context
    laws     : float16[n_bytes, n_experts, 257], ln of the joint evaluated laws
    columns  : structured[n_bytes, n_experts]
    """

    text: bytes
    names: tuple[str, ...]
    epsilons: tuple[float, ...]
    joint_epsilon: float
    scored: Bool
    laws: NDArray[np.float16]
    columns: NDArray[Any]
    n_windows: int
    seconds: float

    def blocks(self, weights: F64) -> Iterator[tuple[int, F64]]:
        """Yield (first byte, ln p float64[n_experts, m, 257]) over the document: rows sum to 1, ghosts' share filled.

        The rounding of float16 is mended where it counts: the byte that came has the float32 probability of its own
        column. ``weights``: float64[n_experts], sum 1, of those that stand in; a lone expert's law is whole.
        """
        for first in self.block_starts():
            yield first, self.block(first, weights)

    def block_starts(self) -> range:
        """First bytes of the blocks."""
        return range(0, len(self.text), _BLOCK)

    def block(self, first: int, weights: F64) -> F64:
        """The block of ``blocks`` that begins at byte ``first``."""
        at = slice(first, first + _BLOCK)
        columns = self.columns[at]
        exact = np.exp(columns["joint_logprob"].astype(np.float64))
        shares = columns["joint_share"].astype(np.float64) if len(self.names) > 1 else np.zeros(exact.shape)
        came = np.frombuffer(self.text, np.uint8)[at].astype(np.int64)
        laws = unpack(self.laws[at], exact, shares, came, weights, FLOOR)
        with np.errstate(divide="ignore"):
            return np.log(laws, out=laws)


def need_bytes(n_bytes: int, n_experts: int, n_epsilons: int) -> int:
    """Disk space of a trace."""
    return n_bytes * n_experts * (2 * N_SYMBOLS + columns_dtype(n_epsilons).itemsize) + 4096


def open_trace(path: Path, about: Mapping[str, Any], text: bytes) -> Trace | None:
    """The trace in a directory, or None if it is not one of this text and format."""
    try:
        laws = (
            np.load(path / LAWS, mmap_mode="r") if text else np.zeros((0, len(about["names"]), N_SYMBOLS), np.float16)
        )
        columns = np.load(path / COLUMNS, mmap_mode="r") if text else _no_columns(about)
        scored = np.zeros(len(text), np.bool_)
        for _, score, stop, _ in about["windows"]:
            scored[score:stop] = True
        trace = Trace(
            text=text, names=tuple(about["names"]), epsilons=tuple(about["epsilons"]),
            joint_epsilon=float(about["joint_epsilon"]), scored=scored, laws=laws, columns=columns,
            n_windows=len(about["windows"]), seconds=float(about["seconds"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None
    shape = (len(text), len(trace.names))
    fits = laws.shape == (*shape, N_SYMBOLS) and columns.shape == shape and laws.dtype == np.float16
    return trace if fits and columns.dtype == columns_dtype(len(trace.epsilons)) else None


def _no_columns(about: Mapping[str, Any]) -> NDArray[Any]:
    return np.zeros((0, len(about["names"])), columns_dtype(len(about["epsilons"])))


def writable(path: Path, n_bytes: int, n_experts: int, n_epsilons: int) -> tuple[NDArray[np.float16], NDArray[Any]]:
    """Memory-mapped (laws, columns) of a new trace in ``path``."""
    if not n_bytes:
        raise GgufFusionError("an empty document has no trace")
    mapped = np.lib.format.open_memmap
    laws = mapped(path / LAWS, "w+", np.float16, (n_bytes, n_experts, N_SYMBOLS))
    columns = mapped(path / COLUMNS, "w+", columns_dtype(n_epsilons), (n_bytes, n_experts))
    return laws, columns
