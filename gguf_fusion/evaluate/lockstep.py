"""Recording a trace: all experts read one document side by side, byte by byte.

Each expert has one teacher-forced reader with several cover trees on it: one per epsilon that reads alone, and one that
reads in company, its ghosts' share spoken for by the other experts as in the engine. The mixture that stands in has
equal weights, so that one trace serves every strategy; weights only touch it through the growth of ghosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.bridge.tables import ByteTables
from gguf_fusion.cover.base import Prompt
from gguf_fusion.cover.ghosts import fill
from gguf_fusion.cover.tree import CoverTree
from gguf_fusion.evaluate import trace
from gguf_fusion.evaluate.teacher import REJOIN_BYTES, TeacherForced
from gguf_fusion.evaluate.windows import Window, windows
from gguf_fusion.experts.base import Expert
from gguf_fusion.lanes import Lanes
from gguf_fusion.records import N_SYMBOLS

ByteProgress = Callable[[int], None]
"""Called with the number of bytes read since the last call."""

_REPORT = 64
_OPEN_TOKENS = 3
"""Tokens before a scored range that are pushed byte by byte, so that no border is given away."""

_LN2 = float(np.log(2.0))


class Reader:
    """One expert with its trees: ``trees[:-1]`` read alone, ``trees[-1]`` in company."""

    def __init__(
        self, expert: Expert, tables: ByteTables, epsilons: Sequence[float], joint_epsilon: float, rejoin: int | None
    ) -> None:
        self.name = expert.name
        self.teacher = TeacherForced(expert, rejoin=rejoin)
        self.trees = [CoverTree(self.teacher, tables, epsilon=epsilon) for epsilon in (*epsilons, joint_epsilon)]

    @property
    def due(self) -> bool:
        """Whether ``prepare`` will decode."""
        return any(tree.due for tree in self.trees)

    def prepare(self) -> None:
        for tree in self.trees:
            tree.prepare()

    def begin(self, text: bytes, window: Window) -> None:
        """Read a window up to its first recorded byte: the start of the text, or of the scored range."""
        teacher = self.teacher
        teacher.begin(text[window.start : window.end])
        before = window.score - window.start if window.start else 0
        n = int(np.searchsorted(teacher.ends, before, side="right"))
        n = max(teacher.n_before, n - _OPEN_TOKENS) if before else teacher.n_before
        pushed = int(teacher.ends[n - 1]) if n else 0
        prompt = Prompt(
            ids=teacher.ids[:n],
            observed=np.zeros(n, np.bool_),
            tail=text[window.start + pushed : window.start + before],
        )
        if len(teacher.ids):
            teacher.evaluate(teacher.ids[: max(1, n)])  # the first batch begins here, whatever the trees ask for first
        for tree in self.trees:
            tree.start(prompt)

    def record_own(self, window: Window, columns: Any) -> None:
        """Write the bits of the tokens that begin in the scored range; ``columns`` is this expert's, whole document."""
        starts = np.concatenate([[0], self.teacher.ends[:-1]]) + window.start
        first, stop = np.searchsorted(starts, (window.score, window.stop))
        bits = self.teacher.own_logprobs(int(first), int(stop)) / -_LN2
        columns["own_token"][starts[first:stop]] = True
        columns["own_bits"][starts[first:stop]] = bits


class Recorder:
    """Records traces with experts that are loaded. Not thread-safe; ``lanes`` knows the experts by name."""

    def __init__(
        self,
        experts: Sequence[Expert],
        tables: Sequence[ByteTables],
        lanes: Lanes,
        *,
        epsilons: Sequence[float],
        joint_epsilon: float,
        window: int,
        context: int,
        rejoin: int | None = REJOIN_BYTES,
    ) -> None:
        self.experts = list(experts)
        self.epsilons = tuple(epsilons)
        self.joint_epsilon = joint_epsilon
        self._tables = list(tables)
        self._lanes = lanes
        self._sizes = window, context
        self._rejoin = rejoin

    def record(self, text: bytes, into: Path, progress: ByteProgress = lambda _: None) -> dict[str, Any]:
        """Write the trace of ``text`` into a directory; return what ``trace.open_trace`` needs to know about it."""
        began = time.perf_counter()
        # Trees learn while they read: every document begins with fresh ones, so that their order is of no account.
        readers = [
            Reader(expert, tables, self.epsilons, self.joint_epsilon, self._rejoin)
            for expert, tables in zip(self.experts, self._tables, strict=True)
        ]
        cut = windows(text, self.experts, *self._sizes)
        if text:
            laws, columns = trace.writable(into, len(text), len(readers), len(self.epsilons))
            for window in cut:
                self._lanes.run({r.name: partial(r.begin, text, window) for r in readers})
                self._read(readers, text, window, laws, columns, progress)
                self._lanes.run({r.name: partial(r.record_own, window, columns[:, i]) for i, r in enumerate(readers)})
            laws.flush()  # type: ignore[attr-defined]
            columns.flush()  # type: ignore[attr-defined]
        return {
            "names": [expert.name for expert in self.experts],
            "epsilons": list(self.epsilons),
            "joint_epsilon": self.joint_epsilon,
            "windows": [[w.start, w.score, w.stop, w.end] for w in cut],
            "seconds": time.perf_counter() - began,
        }

    def _read(
        self, readers: list[Reader], text: bytes, window: Window, laws: Any, columns: Any, progress: ByteProgress
    ) -> None:
        n = len(readers)
        probs, stand_ins, shares = np.zeros((n, N_SYMBOLS)), np.zeros((n, N_SYMBOLS)), np.zeros(n)
        equal = np.full(n, 1.0 / n)
        seen = [[(tree.stats.n_decodes, tree.stats.n_reanchors) for tree in reader.trees] for reader in readers]
        first = window.score if window.start else 0
        for at in range(first, window.stop):
            byte = text[at]
            due = {reader.name: reader.prepare for reader in readers if reader.due}
            if due:
                self._lanes.run(due)
            for i, reader in enumerate(readers):
                column = columns[at, i]
                probs[i], shares[i] = reader.trees[-1].law()
                for k, tree in enumerate(reader.trees):
                    counts = tree.stats.n_decodes, tree.stats.n_reanchors
                    decodes, reanchors = counts[0] - seen[i][k][0], counts[1] - seen[i][k][1]
                    seen[i][k] = counts
                    if k == len(self.epsilons):
                        column["joint_decodes"], column["joint_reanchors"] = decodes, reanchors
                    else:
                        column["decodes"][k], column["reanchors"][k] = decodes, reanchors
                        column["logprob"][k], column["share"][k] = _push_alone(tree, byte)
            with np.errstate(divide="ignore"):
                logs = np.log(probs)
            # A lone expert has nobody to stand in for its ghosts but itself: its trace holds the whole law.
            fill(probs, shares, equal, stand_ins, lambda i: readers[i].trees[-1].stand_in())
            if n == 1:
                logs = np.log(probs)
            columns[at]["joint_share"] = shares
            columns[at]["joint_logprob"] = logs[:, byte]
            laws[at] = logs
            for i, reader in enumerate(readers):
                reader.trees[-1].push(byte, float(stand_ins[i, byte]))
            if (at + 1) % _REPORT == 0 or at + 1 == window.stop:
                progress(at + 1 - max(first, at - at % _REPORT))


def _push_alone(tree: CoverTree, byte: int) -> tuple[float, float]:
    """Advance a tree that reads alone; (ln p of the byte, ghost share)."""
    probs, share = tree.law()
    stand_in: F64 = tree.stand_in()
    here = float(stand_in[byte])
    with np.errstate(divide="ignore"):
        logprob = float(np.log(probs[byte] + share * here))
    tree.push(byte, here)
    return logprob, share
