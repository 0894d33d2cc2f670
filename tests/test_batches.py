"""What batches cost, and from which size on their rows are others."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from gguf_fusion.ahead import AheadExpert, Draft
from gguf_fusion.arrays import F32, I32
from gguf_fusion.batches import PURE, SINGLE, BatchFacts, batch_facts
from gguf_fusion.experts.base import Progress
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.testing import byte_vocabulary


class Rounding:
    """An expert whose rows from batches of more than ``exact`` tokens are a little off, as large kernels have it."""

    def __init__(self, exact: int, *, goes_back: bool = True) -> None:
        self.table = TableExpert(byte_vocabulary(), lambda path: np.arange(1.0, 258.0) + path[-1])
        self.exact, self.goes_back = exact, goes_back
        self.n_decoded, self.decode_s = 0, 0.0
        self.batches: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.table, name)

    def evaluate(self, path: I32, n_rows: int = 1, *, branch: bool = False, progress: Progress | None = None) -> F32:
        before = self.table.n_decoded
        rows = self.table.evaluate(path, n_rows, branch=branch, progress=progress).copy()
        self.batches.append(self.table.n_decoded - before)
        if self.exact < self.batches[-1] <= 8:
            rows[:, 0] += 0.5
        return rows


def test_the_identical_class_is_found() -> None:
    """The largest size up to which every batch gives the rows of single tokens."""
    facts = batch_facts(Rounding(exact=5))
    assert facts.exact == 5
    assert len(facts.costs) == 9
    assert 0.0 < facts.shift < 0.01


def test_measuring_leaves_no_trace_in_the_counters() -> None:
    """Decodes of a calibration are not those of a text."""
    expert = Rounding(exact=2)
    batch_facts(expert)
    assert (expert.n_decoded, expert.decode_s) == (0, 0.0)


def test_facts_are_remembered_for_the_same_files() -> None:
    """The second load measures nothing."""
    first = batch_facts(Rounding(exact=3), "files")
    again = Rounding(exact=7)
    assert batch_facts(again, "files") == first
    assert again.batches == []


def test_nothing_is_measured_where_it_must_not_or_cannot() -> None:
    """Without permission, or with a memory that cannot go back, single tokens are all there is."""
    assert batch_facts(Rounding(exact=5), calibrate=False) == SINGLE
    assert batch_facts(Rounding(exact=5, goes_back=False)) == SINGLE
    assert batch_facts(TableExpert(byte_vocabulary(), lambda _: np.ones(257))) == PURE


def test_useless_facts_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Where no batch is exact, a warning says that nothing will be read ahead."""
    with caplog.at_level(logging.WARNING):
        batch_facts(Rounding(exact=1))
    assert "nothing can be read ahead exactly" in caplog.text


def reader(level: str, exact: int = 3) -> tuple[AheadExpert, Rounding]:
    expert, draft = Rounding(exact=exact), Draft()
    draft.guessing = True
    draft.begin(b"0123456789abcdefgh", fresh=True)
    ahead = AheadExpert(expert, draft, BatchFacts(exact=exact, costs=(0.0, *[1.0] * 8)))
    ahead.begin(18, b"", level, known=False, drafts=False)
    draft.push(b"0123456789ab")
    return ahead, expert


@pytest.mark.parametrize(("level", "largest"), [("off", 2), ("exact", 3), ("law", 8)])
def test_batches_stay_inside_their_class(level: str, largest: int) -> None:
    """At level exact no batch of the text is larger than the identical class, at level law than what was measured."""
    ahead, expert = reader(level)
    text = b"0123456789abcdefgh0123456789ab"
    path = np.frombuffer(text, np.uint8).astype(np.int32)
    ahead.evaluate(path[:18])
    expert.batches.clear()
    ahead.evaluate(path)
    assert max(expert.batches) == largest


def test_rows_ahead_are_handed_out_once_asked_for() -> None:
    """A row that was read ahead is the row that would have been computed, and costs no call."""
    ahead, expert = reader("exact")
    path = np.frombuffer(b"0123456789abcdefgh0123456789abcd", np.uint8).astype(np.int32)
    ahead.evaluate(path[:18])
    ahead.evaluate(path[:-2])
    n_calls = len(expert.batches)
    row = ahead.evaluate(path[:-1])[0]
    assert len(expert.batches) == n_calls
    assert ahead.n_used == 1
    np.testing.assert_array_equal(row, expert.table.evaluate(path[:-1])[0])


def test_what_never_fits_is_not_tried_any_more() -> None:
    """Guesses that are wrong all the time end by themselves."""
    ahead, _ = reader("exact")
    path = np.frombuffer(b"0123456789abcdefgh0123456789ab", np.uint8).astype(np.int32)
    ahead.facts = BatchFacts(exact=3, costs=(0.0, 1.0, 1.5, 2.0))
    tried = []
    for i in range(60):
        before = ahead.n_ahead
        ahead.evaluate(np.append(path, np.int32(97 + i % 2)))
        ahead.evaluate(path)
        tried.append(ahead.n_ahead - before)
    assert sum(tried[:10]) > 0
    assert sum(tried[30:]) < sum(tried[:30])
