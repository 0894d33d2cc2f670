"""Lanes: experts that share a thread, several lanes side by side.

One thread per expert would oversubscribe the cores, one expert after the other leaves them waiting for memory and for
each other at every layer. So experts are packed into a few lanes whose threads add up to no more than the cores. Which
is faster is measured with a few decodes when an ensemble is loaded.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gguf_fusion.devices import usable_cores
from gguf_fusion.errors import ClosedError, UsageError
from gguf_fusion.experts.base import Expert
from gguf_fusion.experts.prompt_cache import PromptCache
from gguf_fusion.hub.digests import read_json, write_json
from gguf_fusion.hub.store import cache_dir

MODES = ("auto", "serial", "lanes")

_log = logging.getLogger(__name__)

_WARM_TOKENS, _TIMED_TOKENS = 1, 2

_CLEARLY_FASTER = 0.9
"""Lanes must take less than this share of the serial time. The measurement lets all experts decode at once; while a
text is written fewer are due at a time, which favours one lane (measured on two cores, each expert due at 30 % of the
steps: 28 ms per token in lanes, 25 in turn, though 68 against 73 when all are due)."""

_DRIFT = 1.5
"""A remembered plan that takes so many times its time, or so little of it, is measured anew."""

Job = Callable[[], None]


class ThreadedExpert(Expert, Protocol):
    """An expert whose number of threads can be changed between calls, and which keeps texts while it reads others."""

    prompt_cache: PromptCache | None
    """Where it keeps them; None = only the last one stays."""

    def set_threads(self, n: int) -> None:
        """Use ``n`` threads from the next call on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """Which experts share a lane, and with how many threads each lane computes.

    ``seconds`` is the measured time for one token of every expert, where it was measured.
    """

    lanes: tuple[tuple[str, ...], ...]
    threads: tuple[int, ...]
    seconds: float | None = None

    @property
    def mode(self) -> str:
        """``serial`` for one lane, else ``lanes``."""
        return "lanes" if len(self.lanes) > 1 else "serial"

    def __str__(self) -> str:
        parts = [
            f"{' + '.join(lane)} ({n} thread{'s' * (n > 1)})" for lane, n in zip(self.lanes, self.threads, strict=True)
        ]
        timed = "" if self.seconds is None else f", {1e3 * self.seconds:.0f} ms per token of each"
        return " | ".join(parts) + timed


def pack(seconds: Mapping[str, float], n_lanes: int) -> tuple[tuple[str, ...], ...]:
    """Experts packed into at most ``n_lanes`` lanes: the slowest first, each into the lane with the least work.

    This is the longest-processing-time rule; its makespan is at most 4/3 - 1/(3 n_lanes) of the best (Graham 1969).
    """
    lanes: list[list[str]] = [[] for _ in range(max(1, min(n_lanes, len(seconds))))]
    loads = [0.0] * len(lanes)
    order = list(seconds)
    for name in sorted(order, key=lambda name: (-seconds[name], order.index(name))):
        lightest = loads.index(min(loads))
        lanes[lightest].append(name)
        loads[lightest] += seconds[name]
    return tuple(tuple(sorted(lane, key=order.index)) for lane in lanes)


def share_threads(loads: Sequence[float], n_cores: int) -> tuple[int, ...]:
    """Threads per lane, at least 1 each, sum at most ``max(n_cores, lanes)``: each next one to the slowest lane."""
    threads = [1] * len(loads)
    for _ in range(n_cores - len(loads)):
        slowest = max(range(len(loads)), key=lambda i: loads[i] / threads[i])
        threads[slowest] += 1
    return tuple(threads)


def serial_plan(names: Sequence[str], n_cores: int) -> LanePlan:
    """All experts in one lane with all cores."""
    return LanePlan(lanes=(tuple(names),), threads=(max(1, n_cores),))


def lane_plan(seconds: Mapping[str, float], n_cores: int) -> LanePlan:
    """Lanes for experts that take these times per token with one thread."""
    lanes = pack(seconds, n_cores)
    return LanePlan(lanes=lanes, threads=share_threads([sum(seconds[n] for n in lane) for lane in lanes], n_cores))


def choose(
    experts: Sequence[ThreadedExpert],
    mode: str = "auto",
    n_cores: int | None = None,
    *,
    identity: str | None = None,
    calibrate: bool = True,
) -> LanePlan:
    """The plan for ``mode``: ``auto`` measures both, the other two are forced; sets the experts' threads.

    Where rows depend on the number of threads (``thread_sensitive``), ``auto`` takes lanes without a stopwatch when
    there are cores for two: a choice by time could differ from run to run, and so would the text.

    identity  : names files, settings and library; what was measured for it before is used again, until files change or
                a token of each takes a clearly different time
    calibrate : False measures nothing: ``auto`` is ``serial`` then
    """
    if mode not in MODES:
        raise UsageError(f"lanes: expected {', '.join(MODES)}, got {mode!r}")
    cores = usable_cores() if n_cores is None else n_cores
    names = [expert.name for expert in experts]
    plan = serial = serial_plan(names, cores)
    if mode != "serial" and len(experts) > 1 and cores > 1:
        sensitive = any(getattr(expert, "thread_sensitive", False) for expert in experts)
        if sensitive:
            plan = lane_plan({expert.name: float(expert.vocabulary.n_vocab) for expert in experts}, cores)
        elif (
            mode == "auto"
            and (known := _remembered(identity, names, cores)) is not None
            and (not calibrate or _as_before(known, experts))
        ):
            plan = known
        elif mode == "lanes" or calibrate:
            for expert in experts:
                expert.set_threads(1)
            plan = lane_plan({expert.name: seconds_per_token(expert) for expert in experts}, cores)
            if mode == "auto":
                plan = _faster(_measured(plan, experts), _measured(serial, experts))
                _remember(identity, plan, cores)
    apply_threads(plan, experts)
    _log.info("lanes: %s", plan)
    return plan


def _faster(lanes: LanePlan, serial: LanePlan) -> LanePlan:
    """The lanes, if they are clearly faster."""
    assert lanes.seconds is not None and serial.seconds is not None
    return lanes if lanes.seconds < _CLEARLY_FASTER * serial.seconds else serial


def _as_before(plan: LanePlan, experts: Sequence[ThreadedExpert]) -> bool:
    """Whether the plan still takes about the time that it took when it was chosen."""
    before, now = plan.seconds, _measured(plan, experts).seconds
    assert before is not None and now is not None
    if before / _DRIFT <= now <= before * _DRIFT:
        return True
    _log.info("lanes: %.0f ms per token of each, %.0f when they were chosen: measured anew", 1e3 * now, 1e3 * before)
    return False


def _memory() -> Path:
    return cache_dir() / "lanes.json"


def _key(identity: str, cores: int) -> str:
    facts = f"{identity} {cores} {platform.machine()} {platform.node()}"
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


def _remembered(identity: str | None, names: Sequence[str], cores: int) -> LanePlan | None:
    """The plan that was measured before for the same files on this machine."""
    if identity is None:
        return None
    found: Any = (read_json(_memory()) or {}).get(_key(identity, cores))
    try:
        lanes, threads = tuple(map(tuple, found["lanes"])), tuple(int(n) for n in found["threads"])
        plan = LanePlan(lanes=lanes, threads=threads, seconds=float(found["seconds"]))
    except (TypeError, KeyError, ValueError):
        return None
    same = sorted(name for lane in plan.lanes for name in lane) == sorted(names)
    return plan if same and len(threads) == len(lanes) and all(n >= 1 for n in threads) else None


def _remember(identity: str | None, plan: LanePlan, cores: int) -> None:
    if identity is None:
        return
    facts = {"lanes": plan.lanes, "threads": plan.threads, "seconds": plan.seconds}
    with suppress(OSError):  # a cache that cannot be written costs a second at the next start
        write_json(_memory(), {**(read_json(_memory()) or {}), _key(identity, cores): facts})


def apply_threads(plan: LanePlan, experts: Sequence[ThreadedExpert]) -> None:
    """Give every expert its lane's number of threads."""
    by_name = {expert.name: expert for expert in experts}
    for lane, n in zip(plan.lanes, plan.threads, strict=True):
        for name in lane:
            by_name[name].set_threads(n)


def _measured(plan: LanePlan, experts: Sequence[ThreadedExpert]) -> LanePlan:
    """The plan with the time that one token of every expert takes under it."""
    apply_threads(plan, experts)
    by_name = {expert.name: expert for expert in experts}
    lanes = [[by_name[name] for name in lane] for lane in plan.lanes]
    counters = {expert.name: (expert.n_decoded, expert.decode_s) for expert in experts}
    with Lanes(plan) as running:

        def work(first: int, n: int) -> None:
            jobs = {expert.name: (lambda expert=expert: _decode(expert, first, n)) for lane in lanes for expert in lane}
            running.run(jobs)

        work(0, _WARM_TOKENS)
        began = time.perf_counter()
        for i in range(_TIMED_TOKENS):
            work(_WARM_TOKENS + i, 1)
        seconds = (time.perf_counter() - began) / _TIMED_TOKENS
    for expert in experts:
        expert.n_decoded, expert.decode_s = counters[expert.name]
    return LanePlan(lanes=plan.lanes, threads=plan.threads, seconds=seconds)


def seconds_per_token(expert: ThreadedExpert) -> float:
    """Seconds that one token takes with the threads it has now: the shortest, since other programs only add to it."""
    counters = expert.n_decoded, expert.decode_s
    _decode(expert, 0, _WARM_TOKENS)
    seconds = []
    for i in range(_TIMED_TOKENS):
        began = time.perf_counter()
        _decode(expert, _WARM_TOKENS + i, 1)
        seconds.append(time.perf_counter() - began)
    expert.n_decoded, expert.decode_s = counters
    return min(seconds)


def _decode(expert: ThreadedExpert, first: int, n: int) -> None:
    """Decode tokens ``first`` … ``first + n - 1`` of a fixed path, one by one, as generation does."""
    ids = expert.vocabulary.text_ids
    # Not the first ids, so that no text shares this prefix by chance.
    path = np.resize(ids[len(ids) // 3 :], first + n).astype(np.int32)
    for i in range(first, first + n):
        expert.evaluate(path[: i + 1])


class Lanes:
    """One waiting thread per lane; an expert is never touched by two threads at once. A single lane needs none.

    When one lane alone has work it borrows the threads of the others, unless its rows depend on their number.
    """

    def __init__(self, plan: LanePlan, experts: Sequence[ThreadedExpert] = ()) -> None:
        """``experts``: those whose threads may be borrowed and lent. Raises ValueError if one is in two lanes."""
        self.plan = plan
        self._flexible = {e.name: e for e in experts if not getattr(e, "thread_sensitive", False)}
        self._n_threads = {name: n for lane, n in zip(plan.lanes, plan.threads, strict=True) for name in lane}
        self._lane_of = {name: index for index, lane in enumerate(plan.lanes) for name in lane}
        if len(self._lane_of) != sum(map(len, plan.lanes)):
            raise ValueError(f"an expert belongs to one lane only, got {plan.lanes}")
        self._now: dict[str, int] = {}
        """Threads in use by experts that have borrowed some."""
        self._busy = threading.Lock()
        self._closed = False
        self._queues: list[queue.SimpleQueue[_Batch | None]] = []
        self._threads: list[threading.Thread] = []
        if len(plan.lanes) > 1:
            for lane in plan.lanes:
                jobs: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
                thread = threading.Thread(target=_serve, args=(jobs,), name=f"lane {'+'.join(lane)}", daemon=True)
                thread.start()
                self._queues.append(jobs)
                self._threads.append(thread)

    def run(self, jobs: Mapping[str, Job]) -> None:
        """Run the jobs of the experts named, those of one lane in turn, lanes side by side; wait for all.

        If jobs fail, the error of the first expert in plan order is raised, with that expert's name as a note.
        """
        unknown = set(jobs) - set(self._lane_of)
        if unknown:
            raise ValueError(f"no lane has {', '.join(sorted(unknown))}; known: {', '.join(self._lane_of)}")
        with self._busy:
            if self._closed:
                raise ClosedError("the lanes were closed")
            due = [[(name, jobs[name]) for name in lane if name in jobs] for lane in self.plan.lanes]
            batches = [_Batch(names) for names in due if names]
            self._lend([names for names in due if names])
            if len(batches) > 1:
                waiting = [jobs for jobs, names in zip(self._queues, due, strict=True) if names]
                for lane_jobs, batch in zip(waiting, batches, strict=True):
                    lane_jobs.put(batch)
            elif batches:
                # Alone, and with all threads: in the caller's thread, so that only one pool of native threads exists.
                # With a pool per lane OpenMP sees more threads than cores and lets them sleep at every barrier.
                batches[0].work()
            try:
                for batch in batches:
                    batch.done.wait()
            except BaseException:
                # Interrupted: the caller must not touch an expert that its lane is still using.
                for batch in batches:
                    batch.done.wait()
                raise
        for batch in batches:
            if batch.error is not None:
                raise batch.error

    def _lend(self, due: list[list[tuple[str, Job]]]) -> None:
        """All threads for a lane that is alone, else each lane its own."""
        for names in due:
            for name, _ in names:
                expert = self._flexible.get(name)
                n = sum(self.plan.threads) if len(due) == 1 else self._n_threads[name]
                if expert is not None and self._now.get(name, self._n_threads[name]) != n:
                    expert.set_threads(n)
                    self._now[name] = n

    def close(self) -> None:
        """End the threads after the work in progress; closing twice is harmless."""
        with self._busy:
            if self._closed:
                return
            self._closed = True
            for jobs in self._queues:
                jobs.put(None)
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Batch:
    """Jobs of one lane for one call of ``run``."""

    def __init__(self, jobs: Sequence[tuple[str, Job]]) -> None:
        self._jobs = jobs
        self.done = threading.Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            for name, job in self._jobs:
                try:
                    job()
                except BaseException as error:
                    error.add_note(f"raised by the work of expert {name!r}")
                    raise
        except BaseException as error:  # handed to the thread that waits in run()
            self.error = error
        finally:
            self.done.set()


def _serve(jobs: queue.SimpleQueue[_Batch | None]) -> None:
    while (batch := jobs.get()) is not None:
        batch.work()
