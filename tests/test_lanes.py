"""Lanes: which experts share a thread, and what happens when their work fails."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_fusion import lanes
from gguf_fusion.errors import ClosedError, UsageError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.lanes import LanePlan, Lanes, choose, lane_plan, pack, serial_plan, share_threads
from gguf_fusion.testing import nested_vocabulary


class Timed(TableExpert):
    """A table expert that takes its time, less with more threads; ``alone`` is the speed-up of a second thread."""

    def __init__(self, name: str, seconds: float, speedup: float = 1.0, *, sensitive: bool = False) -> None:
        super().__init__(nested_vocabulary(), lambda path: np.ones(16), name=name)
        self.seconds, self.speedup, self.thread_sensitive = seconds, speedup, sensitive
        self.callers: set[str] = set()

    def evaluate(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.callers.add(threading.current_thread().name)
        time.sleep(self.seconds / (self.speedup if self.threads > 1 else 1.0))
        return super().evaluate(*args, **kwargs)


def test_longest_first() -> None:
    """The slow expert has a lane of its own, the quick ones share the other."""
    plan = lane_plan({"s": 10.0, "g": 22.0, "q": 38.0}, 2)
    assert plan.lanes == (("q",), ("s", "g"))
    assert plan.threads == (1, 1)
    assert plan.mode == "lanes"
    assert "s + g (1 thread)" in str(plan)


@given(
    seconds=st.lists(st.floats(0.001, 10.0), min_size=1, max_size=6),
    n_cores=st.integers(1, 16),
)
def test_threads_never_exceed_the_cores(seconds: list[float], n_cores: int) -> None:
    """Every expert is in exactly one lane, and busy threads add up to at most the cores."""
    named = {f"e{i}": s for i, s in enumerate(seconds)}
    plan = lane_plan(named, n_cores)
    assert sorted(name for lane in plan.lanes for name in lane) == sorted(named)
    assert sum(plan.threads) <= max(n_cores, 1)
    assert min(plan.threads) >= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_packing_is_within_its_bound(loads: list[int], n_lanes: int) -> None:
    """The heaviest lane carries at most 4/3 of the best possible, which is at least the mean and the largest expert."""
    named = {str(i): float(n) for i, n in enumerate(loads)}
    heaviest = max(sum(named[n] for n in lane) for lane in pack(named, n_lanes))
    order = sorted(loads, reverse=True)
    pair = order[n_lanes - 1] + order[n_lanes] if len(order) > n_lanes else 0
    best = max(sum(loads) / n_lanes, order[0], pair)
    assert heaviest <= sum(loads)
    assert heaviest <= best * (2 - 1 / n_lanes) + 1e-9


def test_more_cores_go_to_the_slowest_lane() -> None:
    """Spare cores are given one by one to the lane that takes longest."""
    assert share_threads([40.0, 10.0], 6) == (5, 1)
    assert share_threads([10.0, 10.0], 4) == (2, 2)
    assert share_threads([1.0, 1.0, 1.0], 2) == (1, 1, 1)


def test_jobs_of_two_lanes_run_side_by_side() -> None:
    """Each lane waits for the other at a barrier: they can only pass together, each in its own thread."""
    barrier = threading.Barrier(2, timeout=5)
    with Lanes(LanePlan(lanes=(("a",), ("b",)), threads=(1, 1))) as running:
        for _ in range(3):
            running.run({"a": lambda: barrier.wait() and None, "b": lambda: barrier.wait() and None})


def test_jobs_of_one_lane_run_in_plan_order() -> None:
    """Experts of one lane take turns."""
    order: list[str] = []
    with Lanes(serial_plan(["a", "b", "c"], 2)) as running:
        running.run({name: (lambda name=name: order.append(name)) for name in "cba"})
    assert order == ["a", "b", "c"]


def test_errors_name_the_expert() -> None:
    """The first failing expert's error is raised in the caller, after all lanes have finished; lanes stay usable."""
    finished: list[str] = []

    def fail() -> None:
        raise RuntimeError("broken row")

    def slow() -> None:
        time.sleep(0.05)
        finished.append("b")

    with Lanes(LanePlan(lanes=(("a",), ("b",)), threads=(1, 1))) as running:
        with pytest.raises(RuntimeError, match="broken row") as caught:
            running.run({"a": fail, "b": slow})
        assert finished == ["b"]
        assert "expert 'a'" in caught.value.__notes__[0]
        running.run({"b": slow})
    assert finished == ["b", "b"]


def test_close_ends_the_threads() -> None:
    """After close no thread is left, closing twice is harmless, running raises."""
    running = Lanes(LanePlan(lanes=(("closing a",), ("closing b",)), threads=(1, 1)))
    assert any("closing a" in t.name for t in threading.enumerate())
    running.close()
    running.close()
    assert not any("closing" in t.name for t in threading.enumerate())
    with pytest.raises(ClosedError):
        running.run({})


def test_wrong_names() -> None:
    """Unknown experts, experts in two lanes and unknown modes are refused."""
    with Lanes(serial_plan(["a"], 1)) as running, pytest.raises(ValueError, match="no lane has z"):
        running.run({"z": lambda: None})
    with pytest.raises(ValueError, match="one lane only"):
        Lanes(LanePlan(lanes=(("a",), ("a",)), threads=(1, 1)))
    with pytest.raises(UsageError, match="auto, serial, lanes"):
        choose([Timed("a", 0.0)], "fast")


def test_a_lone_lane_borrows_threads() -> None:
    """Alone it gets all threads, together with others its own; experts sensitive to threads keep theirs."""
    a, b, fixed = Timed("a", 0.0), Timed("b", 0.0), Timed("f", 0.0, sensitive=True)
    plan = LanePlan(lanes=(("a", "f"), ("b",)), threads=(1, 2))
    experts = [a, b, fixed]
    lanes.apply_threads(plan, experts)
    assert [e.threads for e in experts] == [1, 2, 1]
    seen: list[int] = []
    with Lanes(plan, experts) as running:
        running.run({"a": lambda: seen.append(a.threads), "f": lambda: seen.append(fixed.threads)})
        running.run({"a": lambda: None, "b": lambda: None})
        assert [a.threads, b.threads] == [1, 2]
        running.run({"b": lambda: seen.append(b.threads)})
    assert seen == [3, 1, 3]


@pytest.mark.parametrize(("in_lanes", "in_turn", "mode", "threads"), [(1.0, 2.0, "lanes", 1), (1.0, 1.0, "serial", 2)])
def test_measurement_prefers_what_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, in_lanes: float, in_turn: float, mode: str, threads: int
) -> None:
    """Lanes are taken when they measure clearly faster; otherwise the experts take turns with all cores."""
    seconds = {"lanes": in_lanes, "serial": in_turn}
    monkeypatch.setattr(lanes, "_measured", lambda plan, experts: replace(plan, seconds=seconds[plan.mode]))
    experts = [Timed("a", 0.0), Timed("b", 0.0)]
    plan = choose(experts, "auto", 2)
    assert plan.mode == mode
    assert plan.seconds == seconds[mode]
    assert experts[0].threads == threads


def test_measuring_leaves_no_trace() -> None:
    """The measurement takes time of every expert and resets its counters."""
    experts = [Timed("a", 0.001), Timed("b", 0.001)]
    plan = choose(experts, "auto", 2)
    assert plan.seconds is not None
    assert plan.seconds > 0.0
    assert [expert.n_decoded for expert in experts] == [0, 0]


def test_forced_modes_and_few_cores() -> None:
    """A forced mode is taken; one core or one expert leaves nothing to choose."""
    experts = [Timed("a", 0.0), Timed("b", 0.0)]
    assert choose(experts, "lanes", 2).mode == "lanes"
    assert choose(experts, "serial", 2).mode == "serial"
    assert choose(experts, "auto", 1) == serial_plan(["a", "b"], 1)
    assert choose(experts[:1], "auto", 8).threads == (8,)


def test_no_stopwatch_where_threads_change_rows() -> None:
    """A choice by time could differ between runs; with sensitive experts it is made without decoding."""
    experts = [Timed("a", 0.0, sensitive=True), Timed("b", 0.0)]
    plan = choose(experts, "auto", 2)
    assert plan.mode == "lanes"
    assert not experts[0].callers


def test_what_was_measured_is_remembered(tmp_path, monkeypatch):
    """The same files are only checked; others, no identity, a damaged memory or another speed are measured in full."""
    monkeypatch.setenv("GGUF_FUSION_CACHE", str(tmp_path))
    measured, speed = [], {"serial": 1.0, "lanes": 0.5}

    def measure(plan, experts):
        measured.append(plan.mode)
        return replace(plan, seconds=speed[plan.mode])

    def chosen(identity: str | None) -> tuple[str, list[str]]:
        measured.clear()
        return lanes.choose([Timed("a", 0.0), Timed("b", 0.0)], "auto", 2, identity=identity).mode, list(measured)

    both = ["lanes", "serial"]
    monkeypatch.setattr(lanes, "_measured", measure)
    assert chosen("files") == ("lanes", both)
    assert chosen("files") == ("lanes", ["lanes"])
    assert chosen("other files") == ("lanes", both)
    assert chosen(None) == ("lanes", both)
    (tmp_path / "lanes.json").write_text("{damaged")
    assert chosen("files") == ("lanes", both)
    speed["lanes"] *= 1.4
    assert chosen("files") == ("lanes", ["lanes"])
    speed["lanes"] *= 2
    assert chosen("files") == ("serial", ["lanes", *both])
    speed["serial"] /= 2
    assert chosen("files") == ("serial", ["serial", *both])
    experts = [Timed("a", 0.0), Timed("b", 0.0)]
    assert lanes.choose(experts, "auto", 2, identity="files", calibrate=False).mode == "serial"


def test_without_calibration_experts_take_turns():
    """--no-calibrate measures nothing and lets experts take turns."""
    plan = lanes.choose([Timed("a", 0.0), Timed("b", 0.0)], "auto", 2, calibrate=False)
    assert plan.mode == "serial"
    assert plan.seconds is None
