"""Traced documents as arrays that a search can share between processes, and the score of a formula on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_fusion.arrays import F64
from gguf_fusion.cover.ghosts import fill
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.split import together
from gguf_fusion.evaluate.trace import Trace
from gguf_fusion.formula.features import Steps
from gguf_fusion.formula.nodes import Memory, Node
from gguf_fusion.records import N_SYMBOLS

SPLITS = ("fit", "select", "test")

_BLOCK = 512
_LN2 = float(np.log(2.0))


@dataclass(frozen=True, slots=True)
class Doc:
    """One document inside a corpus: rows ``start`` … ``stop - 1``; ``decodes``: rows each expert needed for it."""

    name: str
    domain: str
    split: str
    start: int
    stop: int
    n_scored: int
    decodes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Laws of all documents, one after the other.

    names : experts;  docs : where each document lies
    laws  : float32[n_bytes, n_experts, n_symbols], natural logs, ghosts' share filled with equal weights
    text  : uint8 or int64[n_bytes], the symbols that came;  scored : bool[n_bytes]
    """

    names: tuple[str, ...]
    docs: tuple[Doc, ...]
    laws: NDArray[np.float32]
    text: NDArray[Any]
    scored: NDArray[np.bool_]

    def of(self, split: str) -> list[Doc]:
        """The documents of a split."""
        return [doc for doc in self.docs if doc.split == split]

    def logprobs(self, node: Node, doc: Doc) -> F64:
        """float64[n_bytes]: ln of what a formula gave to each byte of a document, read from its start."""
        memory = Memory(node, self.names, np.ones(len(self.names)), self.laws.shape[2])
        out = np.empty(doc.stop - doc.start)
        before = self.laws.shape[2] - 1
        for first in range(doc.start, doc.stop, _BLOCK):
            stop = min(first + _BLOCK, doc.stop)
            came = self.text[first:stop].astype(np.int64)
            steps = Steps(self.laws[first:stop].astype(np.float64), np.concatenate([[before], came[:-1]]), came)
            law = node.law(steps, memory)
            out[first - doc.start : stop - doc.start] = law[np.arange(len(came)), came]
            before = int(came[-1])
        return out

    def bits(self, node: Node, docs: Iterable[Doc]) -> F64:
        """float64[n_docs]: bits of the scored bytes of each document."""
        return np.array([-self.logprobs(node, doc)[self._scored(doc)].sum() / _LN2 for doc in docs])

    def given(self, docs: Sequence[Doc]) -> F64:
        """float64[n_scored, n_experts]: ln of what each expert gave to the scored bytes that came."""
        rows = np.concatenate([np.flatnonzero(self._scored(doc)) + doc.start for doc in docs])
        return self.laws[rows, :, self.text[rows]].astype(np.float64)

    def rows(self, docs: Sequence[Doc]) -> NDArray[np.int64]:
        """int64[n_scored]: positions of the scored bytes of these documents."""
        return np.concatenate([np.flatnonzero(self._scored(doc)) + doc.start for doc in docs])

    def _scored(self, doc: Doc) -> NDArray[np.bool_]:
        return self.scored[doc.start : doc.stop]

    def save(self, path: Path) -> None:
        """Write the arrays into a directory, for other processes to map."""
        np.save(path / "laws.npy", self.laws)
        np.save(path / "text.npy", self.text)
        np.save(path / "scored.npy", self.scored)

    @classmethod
    def mapped(cls, path: Path, names: tuple[str, ...], docs: tuple[Doc, ...]) -> Corpus:
        """The corpus whose arrays were saved in a directory; they are mapped, not read."""
        return cls(
            names, docs, np.load(path / "laws.npy", mmap_mode="r"), np.load(path / "text.npy"),
            np.load(path / "scored.npy"),
        )  # fmt: skip


def filled(trace: Trace) -> NDArray[np.float32]:
    """float32[n_bytes, n_experts, 257]: a trace's laws in full, the other experts standing in with equal weights."""
    n = len(trace.names)
    out = np.empty((len(trace.text), n, N_SYMBOLS), np.float32)
    weights, stand_ins = np.full(n, 1.0 / n), np.zeros((n, N_SYMBOLS))
    flat = np.full(N_SYMBOLS, 1.0 / N_SYMBOLS)
    for first, block, shares in trace.blocks():
        for t, probs in enumerate(block):
            fill(probs, shares[t], weights, stand_ins, lambda i: flat)
            with np.errstate(divide="ignore"):
                out[first + t] = np.log(probs)
    return out


def gather(traces: Iterable[tuple[str, str, Trace]], splits: Mapping[str, str], n_bytes: int, folder: Path) -> Corpus:
    """A corpus of (name, domain, trace), written into ``folder`` and mapped.

    Documents without a scored byte are left out. ``splits`` says to which split each document name belongs;
    ``n_bytes`` bounds the bytes of all traces together.
    """
    laws: Any = None
    text, scored, docs = np.zeros(n_bytes, np.uint8), np.zeros(n_bytes, np.bool_), []
    names: tuple[str, ...] = ()
    start = 0
    for name, domain, trace in traces:
        n_scored, stop = int(trace.scored.sum()), start + len(trace.text)
        if not n_scored:
            continue
        if laws is None:
            names = trace.names
            shape = (n_bytes, len(names), N_SYMBOLS)
            laws = np.lib.format.open_memmap(folder / "laws.npy", "w+", np.float32, shape)
        laws[start:stop] = filled(trace)
        text[start:stop] = np.frombuffer(trace.text, np.uint8)
        scored[start:stop] = trace.scored
        decodes = tuple(float(d) for d in trace.columns["joint_decodes"][trace.scored].sum(axis=0, dtype=np.int64))
        docs.append(Doc(name, domain, splits[name], start, stop, n_scored, decodes))
        start = stop
    if laws is None:
        raise UsageError("nothing to learn from: no document has more than its 32 bytes of context")
    laws.flush()
    np.save(folder / "text.npy", text)
    np.save(folder / "scored.npy", scored)
    return Corpus.mapped(folder, names, tuple(docs))


def split_documents(documents: Sequence[tuple[str, str, bytes]], seed: int) -> dict[str, str]:
    """Split (name, domain, text) by document: of every domain half to fit, a quarter each to select and test.

    Near-duplicates (``evaluate.split.together``) share a split. The choice depends on the texts, their domains and the
    seed only.
    """
    digests = [hashlib.sha256(str(seed).encode() + text).digest() for _, _, text in documents]
    groups = [sorted(group, key=lambda i: (digests[i], documents[i][1])) for group in _together(documents)]
    by_domain: dict[str, list[list[int]]] = {}
    for group in sorted(groups, key=lambda group: digests[group[0]]):
        by_domain.setdefault(documents[group[0]][1], []).append(group)
    chosen: dict[str, str] = {}
    for same in by_domain.values():
        for rank, group in enumerate(same):
            split = "fit" if rank % 4 in (0, 2) else SPLITS[1 + rank % 4 // 2]
            chosen.update({documents[i][0]: split for i in group})
    return chosen


def _together(documents: Sequence[tuple[str, str, bytes]]) -> list[list[int]]:
    return together([Document(name, text, domain) for name, domain, text in documents])
