"""One thread owns the ensemble: it loads it, runs one job after the other, and answers short questions in between.

Everything else only hands over work. A job is an iterator over events; between two of its events (one symbol each) the
owner looks whether somebody still wants the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import ClosedError
from gguf_fusion.server.errors import RefusedError

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_SMOOTHING = 0.3
"""Weight of the last job in the mean duration that ``Retry-After`` is taken from."""


class Stopped(Exception):  # noqa: N818 (a message to a job, not an error)
    """Raised inside a job that nobody wants any more."""


class Job:
    """A text to write for somebody, and the way to reach them."""

    def __init__(self, events: Callable[[Ensemble, Job], Iterator[Any]], send: Callable[[Any], None]) -> None:
        """``send`` gets every event, then None, or an exception instead; it is called from the owner's thread."""
        self.events = events
        self.send = send
        self.cancelled = False
        """Set from any thread: the job ends within one step."""
        self.deadline = float("inf")
        """``time.monotonic()`` at which the server must be gone."""

    def check(self) -> None:
        """Raise where the job is over before its time."""
        if self.cancelled:
            raise Stopped
        if time.monotonic() > self.deadline:
            raise ClosedError("the server is shutting down")


class Owner:
    """Runs jobs on an ensemble of its own, in a thread of its own."""

    def __init__(self, load: Callable[[], Ensemble], *, max_waiting: int = 32) -> None:
        """``load`` is called in the owner's thread by ``start``; at most ``max_waiting`` jobs wait behind the one."""
        self.max_waiting = max_waiting
        self.error: Exception | None = None
        """Why loading failed."""
        self.loaded = threading.Event()
        """Set once loading is over, with success or not."""
        self._load = load
        self._ensemble: Ensemble | None = None
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._deadline: float | None = None
        self._mean_s = 1.0
        self._thread = threading.Thread(target=self._work, name="ensemble owner", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    @property
    def ensemble(self) -> Ensemble:
        """The ensemble, for what does not touch its experts. Raises RefusedError (503) while there is none."""
        if self._ensemble is None:
            raise RefusedError(503, "the models are being loaded", code="loading", headers={"Retry-After": "2"})
        return self._ensemble

    @property
    def n_waiting(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """1 while a job runs."""
        return int(self._running is not None)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises RefusedError (503 with Retry-After) where the queue is full or the end is near."""
        with self._changed:
            self._require_open()
            if len(self._waiting) >= self.max_waiting:
                seconds = min(60, max(1, round(self._mean_s * (len(self._waiting) + 1))))
                raise RefusedError(
                    503,
                    f"the queue is full ({len(self._waiting)} waiting); try again in about {seconds} s",
                    code="queue_full",
                    headers={"Retry-After": str(seconds)},
                )
            self._waiting.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Nobody wants the job's events any more: it ends within a step, or never begins."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)

    def call(self, function: Callable[[Ensemble], _Answer]) -> Future[_Answer]:
        """Ask the ensemble something short; it is answered between two steps of the running job."""
        ensemble = self.ensemble
        future: Future[_Answer] = Future()
        with self._changed:
            self._require_open()
            self._calls.append((lambda: function(ensemble), future))
            self._changed.notify_all()
        return future

    def stop(self, grace_s: float) -> None:
        """Take no more work: waiting jobs are refused, the running one has ``grace_s`` seconds left."""
        with self._changed:
            self._deadline = min(time.monotonic() + grace_s, self._deadline or float("inf"))
            refused, self._waiting = list(self._waiting), deque()
            if self._running is not None:
                self._running.deadline = self._deadline
            self._changed.notify_all()
        for job in refused:
            job.send(ClosedError("the server is shutting down"))

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, which closes the ensemble; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _require_open(self) -> None:
        _ = self.ensemble
        if self._deadline is not None or not self._thread.is_alive():
            raise ClosedError("the server is shutting down")

    # ---- the owner's thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            ensemble = self._load()
        except Exception as error:  # noqa: BLE001 (told by whoever waits for the loading)
            self.error = error
            self.loaded.set()
            return
        with ensemble:
            self._ensemble = ensemble
            self.loaded.set()
            while self._next():
                job = self._running
                if job is not None:
                    began = time.monotonic()
                    self._run(ensemble, job)
                    self._running = None
                    self._mean_s += _SMOOTHING * (time.monotonic() - began - self._mean_s)

    def _next(self) -> bool:
        """Wait for work; False once it is time to go."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._waiting or self._deadline is not None)
            if self._waiting:
                self._running = self._waiting.popleft()
        self._answer_calls()
        return self._running is not None or self._deadline is None

    def _run(self, ensemble: Ensemble, job: Job) -> None:
        events = job.events(ensemble, job)
        try:
            for event in events:
                if event is not None:
                    job.send(event)
                self._answer_calls()
                job.check()
            job.send(None)
        except Stopped:
            _log.debug("a job was given up")
        except Exception as error:  # noqa: BLE001 (whoever waits for the job is told)
            job.send(error)
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()

    def _answer_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 (whoever waits for the answer is told)
                future.set_exception(error)
