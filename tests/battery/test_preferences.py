"""The preference stage from answers to a refined head, with table experts in place of models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_fusion.battery.items import Item
from gguf_fusion.battery.preferences import Kept, _change, learn, read_answer, sample, splits_of
from gguf_fusion.battery.run import Result
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.router.fuser import Routed
from gguf_fusion.router.head import Head
from gguf_fusion.testing import byte_vocabulary

GOOD, BAD = b"good", b"junk"


class Stated(TableExpert):
    """A table expert with a hidden state, as a router has."""

    hidden: np.ndarray | None = None
    n_hidden = 0

    def evaluate(self, *arguments, **keywords):
        self.hidden, self.n_hidden = np.ones((1, 2), np.float32), self.n_hidden + 1
        return super().evaluate(*arguments, **keywords)


def likes(word: bytes, strength: float):
    """A law that gives the bytes of a word more than others, END included."""
    law = np.ones(257)
    law[list(word)] += strength
    law[256] += 5.0
    return lambda path: law


@pytest.fixture
def ensemble():
    """Two experts that know nothing, and a router that likes the good word."""
    laws = {"a": likes(b"", 0.0), "b": likes(b"", 0.0), "r": likes(GOOD, 60.0)}
    experts = [Stated(byte_vocabulary(), law, name=name) for name, law in laws.items()]
    with Ensemble.from_experts(experts, templates=["none"] * 3, space="byte") as loaded:
        yield loaded


def head_of() -> Head:
    return Head(("a", "b"), "r", "", np.zeros((2, 2)), np.zeros(2), np.zeros(2), np.ones(2), 0.2, hard=False)


def item(k: int) -> Item:
    prompt = np.random.default_rng(k).bytes(24).hex()
    return Item(f"{k}", "math", "en", prompt, "", {"kind": "regex", "pattern": "good"}, 8)


def answered(items: list[Item], path: Path, *, signal: bool = True) -> Kept:
    """Every item answered rightly and wrongly; without a signal both answers are bytes nobody prefers."""
    kept = Kept(path, {"router": "r"})
    for one in items:
        for who, text, passed in (("a", GOOD if signal else b"xyzu", True), ("b", BAD if signal else b"pqrs", False)):
            kept.add(Result(one.id, one.category, who, None, 0, passed, text.decode(), 1))
    return kept


@pytest.mark.parametrize("signal", [True, False])
def test_lambda_grows_where_the_router_alone_knows_the_answer(ensemble, tmp_path: Path, signal: bool) -> None:
    """Planted preference: more of the router's own mass is wanted, and only then."""
    items = [item(k) for k in range(8)]
    refined = learn(
        ensemble, head_of(), items, answered(items, tmp_path / "a.jsonl", signal=signal), 0, lambda text: None
    )
    assert refined.pairs == {"fit": 4, "select": 2, "test": 2}
    assert refined.ranked is not None and refined.loss is not None
    if signal:
        assert refined.head.lam > 0.5
        assert refined.loss[1] < refined.loss[0]
    else:
        assert refined.head.lam == pytest.approx(0.2, abs=0.05)
        assert refined.ranked.gain == 0.0


def test_answers_are_read_byte_by_byte(ensemble) -> None:
    """One row per byte of the answer, laws normalised, the state in front."""
    seen = read_answer(ensemble, head_of(), item(0), "good")
    assert seen.features.shape == (4, 2)
    assert (seen.laws.shape, seen.router.shape, bytes(seen.came.astype(np.uint8))) == ((4, 2, 257), (4, 257), b"good")
    np.testing.assert_allclose(np.exp(seen.router.astype(np.float64)).sum(axis=1), 1.0, atol=1e-5)


def test_an_interruption_keeps_what_was_sampled(ensemble, tmp_path: Path) -> None:
    """Answers stand in the file as they come; the next call asks for the rest only, after a cut-off line too."""
    items, path = [item(k) for k in range(2)], tmp_path / "answers.jsonl"
    told: list[str] = []

    def interrupt(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(ensemble, items, 0, Kept(path, {"router": "r"}), interrupt)
    with path.open("a") as file:
        file.write('{"item": "0", "cat')
    again = Kept(path, {"router": "r"})
    assert len(again.results) == 2
    rest: list[str] = []
    sample(ensemble, items, 0, again, rest.append)
    assert len(rest) == 2 * 4 - 2
    assert len(Kept(path, {"router": "r"}).results) == 8
    with pytest.raises(UsageError, match="another router"):
        Kept(path, {"router": "other"})


def test_too_few_answers_are_refused(ensemble, tmp_path: Path) -> None:
    """Without pairs the message says what to do."""
    with pytest.raises(UsageError, match="--samples"):
        learn(ensemble, head_of(), [item(0)], Kept(tmp_path / "a.jsonl", {}), 0, lambda text: None)


def test_changes_come_with_intervals() -> None:
    """The difference of shares lies inside its interval; equal shares have none."""
    change = _change(np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 1.0, 0.0, 1.0]))
    assert change.low <= change.gain == 0.25 <= change.high
    same = _change(np.ones(3), np.ones(3))
    assert (same.low, same.gain, same.high) == (0.0, 0.0, 0.0)
    assert set(splits_of([item(k) for k in range(8)], 0).values()) == {"fit", "select", "test"}
    assert str(Routed(head_of())).startswith("fusionroute(soft")
