"""Texts that experts have read, kept aside while they read others, within a number of bytes.

A server answers several conversations in turn. Each one continues its own text, but an expert holds one text at a time;
so the state of a text that is about to be lost is copied away, and copied back when a prompt begins like it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gguf_fusion.arrays import I32

State = NDArray[np.uint8]

LEAST_TOKENS = 64
"""Fewer are read again: copying a state costs about as much as some decodes."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A text in an expert's tokens, int32[n], and the expert's state after reading it."""

    path: I32
    state: State


class PromptCache:
    """States of several experts, the least recently used dropped first. Threads may share one.

    limit_bytes : of all states together; a state that is larger alone is not kept
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: list[tuple[str, Kept]] = []
        """(owner, text), the most recently used last."""
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes of all states that are kept."""
        return sum(kept.state.nbytes for _, kept in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def exchange(
        self,
        owner: str,
        resident: I32,
        path: I32,
        size: Callable[[], int],
        take: Callable[[], State],
        *,
        whole: bool = False,
    ) -> Kept | None:
        """Keep ``resident`` if reading ``path`` would lose much of it; give the kept text that shares more with it.

        size  : bytes of the state of ``resident``, asked before ``take`` copies it
        whole : the state cannot be cut, so only texts that ``path`` goes on from as a whole are of use
        """
        shared = n_shared(resident, path)
        with self._lock:
            if len(resident) - shared >= LEAST_TOKENS and (n_bytes := size()) <= self.limit_bytes:
                self._put(owner, resident, n_bytes, take)
            best, most = None, shared + LEAST_TOKENS
            for i, (name, kept) in enumerate(self._kept):
                n = n_shared(kept.path, path) if name == owner else 0
                if n >= most and not (whole and n < len(kept.path)):
                    best, most = i, n
            if best is None:
                return None
            self._kept.append(self._kept.pop(best))
            return self._kept[-1][1]

    def _put(self, owner: str, path: I32, n_bytes: int, take: Callable[[], State]) -> None:
        """Keep a text, unless it is the beginning of one that is kept; beginnings of it are dropped."""
        for i, (name, kept) in enumerate(self._kept):
            if name == owner and len(kept.path) >= len(path) and n_shared(kept.path, path) == len(path):
                self._kept.append(self._kept.pop(i))
                return
        self._kept = [
            (name, kept) for name, kept in self._kept if name != owner or n_shared(kept.path, path) < len(kept.path)
        ]
        while self._kept and self.n_bytes + n_bytes > self.limit_bytes:
            del self._kept[0]
        self._kept.append((owner, Kept(path.copy(), take())))


def n_shared(one: I32, other: I32) -> int:
    """Length of the longest common prefix."""
    n = min(len(one), len(other))
    different = np.flatnonzero(one[:n] != other[:n])
    return int(different[0]) if len(different) else n
