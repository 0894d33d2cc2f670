"""What a batch costs one expert, and up to which size its rows are those of one token after the other, bit for bit.

Both are facts of a model, a processor and a build of the native library: small kernels treat each token of a batch
alike up to some size, larger ones sum in another order. So both are measured once and remembered beside the lanes.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from gguf_fusion.arrays import F32
from gguf_fusion.experts.base import Expert
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.hub.digests import read_json, write_json
from gguf_fusion.hub.store import cache_dir

_log = logging.getLogger(__name__)

LARGEST = 8
"""Tokens of the largest batch that is measured."""

_CONTEXTS = (24, 560)
"""Resident tokens while measuring; from 512 cells on, attention may be computed in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """Facts of one expert.

    exact : largest n such that batches of 1 … n tokens give the rows of single tokens, bit for bit
    costs : seconds of a batch of n tokens in those of one token; costs[0] is 0, costs[1] is 1
    shift : largest total variation between a law from a batch of ``LARGEST`` and one from single tokens
    """

    exact: int = 1
    costs: tuple[float, ...] = (0.0, 1.0)
    shift: float = 0.0

    def cost(self, n: int) -> float:
        """Cost of a batch of ``n`` tokens; beyond what was measured in proportion."""
        known = len(self.costs) - 1
        return self.costs[n] if n <= known else self.costs[known] * n / known


SINGLE = BatchFacts()
"""Nothing is known: only single tokens are exact, and batches save nothing."""

PURE = BatchFacts(exact=LARGEST, costs=(0.0, *[1.0] * LARGEST))
"""Rows are a function of the path alone, and a batch costs what one token does."""


def batch_facts(
    expert: Expert, identity: str | None = None, *, calibrate: bool = True, level: str = "exact"
) -> BatchFacts:
    """Measured, or remembered for the same ``identity`` (files, settings, library) on this machine.

    Where the expert's memory cannot go back, or nothing may be measured, single tokens are all there is. The log says
    what was found, as a warning where it is of no use at this ``level``.
    """
    if isinstance(expert, TableExpert):
        return PURE
    if not getattr(expert, "goes_back", True):
        return SINGLE
    facts = _remembered(identity, expert.name)
    if facts is None and not calibrate:
        return SINGLE
    if facts is None:
        counters = expert.n_decoded, expert.decode_s
        facts = _measured(expert)
        expert.n_decoded, expert.decode_s = counters
        expert.forget()
        _remember(identity, expert.name, facts)
    worth = level == "law" or facts.exact > 1
    _log.log(
        logging.INFO if worth else logging.WARNING,
        "expert %r: batches of up to %d tokens give rows bit for bit; one of %d costs %.1f tokens and shifts a law by "
        "up to %.3f%s",
        expert.name, facts.exact, len(facts.costs) - 1, facts.costs[-1], facts.shift,
        "" if worth else "; so nothing can be read ahead exactly (flash attention may change that)",
    )  # fmt: skip
    return facts


def _measured(expert: Expert) -> BatchFacts:
    largest = min(LARGEST, expert.max_rows)
    contexts = [n for n in _CONTEXTS if n + largest <= expert.n_ctx]
    ids = expert.vocabulary.text_ids
    if not contexts or not len(ids):
        return SINGLE
    exact, shift, relative = largest, 0.0, np.zeros(largest + 1)
    for n_context in contexts:
        path = np.random.default_rng(1).choice(ids, n_context + largest).astype(np.int32)
        expert.forget()
        expert.evaluate(path[:n_context])
        expert.evaluate(path[: n_context + 1])
        seconds = np.zeros(largest + 1)
        rows: list[F32] = []
        for n in range(largest + 1):
            # Going back to a place decodes its last token again, alone: so every batch below starts as this one does.
            began = time.perf_counter()
            rows.append(expert.evaluate(path[: n_context + n])[0].copy())
            seconds[1] += (time.perf_counter() - began) / (largest + 1)
        for n in range(2, largest + 1):
            expert.evaluate(path[:n_context])
            began = time.perf_counter()
            batch = expert.evaluate(path[: n_context + n], n)
            seconds[n] = time.perf_counter() - began
            if n <= exact and not all(np.array_equal(batch[i], rows[i + 1]) for i in range(n)):
                exact = n - 1
            if n == largest:
                shift = max(shift, *(_distance(batch[i], rows[i + 1]) for i in range(n)))
        relative = np.maximum(relative, seconds / seconds[1])
    return BatchFacts(exact=exact, costs=(0.0, *map(float, relative[1:])), shift=shift)


def _distance(a: F32, b: F32) -> float:
    """Total variation between the laws of two rows of logits."""
    p, q = (np.exp((row - row.max()).astype(np.float64)) for row in (a, b))
    return float(0.5 * np.abs(p / p.sum() - q / q.sum()).sum())


def _key(identity: str, name: str) -> str:
    facts = f"batches {identity} {name} {platform.machine()} {platform.node()}"
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


def _remembered(identity: str | None, name: str) -> BatchFacts | None:
    if identity is None:
        return None
    found: Any = (read_json(cache_dir() / "batches.json") or {}).get(_key(identity, name))
    try:
        costs = tuple(float(cost) for cost in found["costs"])
        facts = BatchFacts(exact=int(found["exact"]), costs=costs, shift=float(found["shift"]))
    except (TypeError, KeyError, ValueError):
        return None
    return facts if facts.exact >= 1 and len(costs) > 1 else None


def _remember(identity: str | None, name: str, facts: BatchFacts) -> None:
    if identity is None:
        return
    path = cache_dir() / "batches.json"
    found = {"exact": facts.exact, "costs": facts.costs, "shift": facts.shift}
    with suppress(OSError):  # a cache that cannot be written costs some seconds at the next start
        write_json(path, {**(read_json(path) or {}), _key(identity, name): found})
