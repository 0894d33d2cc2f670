"""A Ray cluster evaluates what processes would: checked with a stand-in for the package."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from gguf_fusion.discover.candidates import Yardstick, evaluate, workers
from gguf_fusion.discover.corpus import Corpus, Doc
from gguf_fusion.errors import MissingExtraError, UsageError


def corpus():
    rng = np.random.default_rng(0)
    laws = np.log(rng.dirichlet(np.ones(5), (40, 2))).astype(np.float32)
    docs = tuple(Doc(f"d{i}", "d", "fit", 10 * i, 10 * i + 10, 10, (1.0, 1.0)) for i in range(4))
    return Corpus(("a", "b"), docs, laws, rng.integers(0, 5, 40), np.ones(40, np.bool_))


class Remote:
    """Runs a function when its result is fetched."""

    def __init__(self, function):
        self._function = function

    def remote(self, *arguments):
        return lambda: self._function(*(a() if callable(a) else a for a in arguments))


def fake_ray(log, *, reachable=True):
    def init(address, **_):
        log.append(address)
        if not reachable:
            raise ConnectionError("nobody there")

    return SimpleNamespace(
        init=init, put=lambda value: lambda: value, get=lambda answer: answer(), remote=Remote,
        shutdown=lambda: log.append("shutdown"),
    )  # fmt: skip


def test_answers_are_those_of_this_process_in_order(monkeypatch, tmp_path):
    """The cluster gives the same scores in the order of the questions, and is left at the end."""
    log = []
    monkeypatch.setitem(sys.modules, "ray", fake_ray(log))
    data = corpus()
    yardstick = Yardstick.of(data, data.docs)
    questions = [(f"formula({text})", 1, ()) for text in ('"a"', 'linear(1*"a", 1*"b")', '"b"')]
    with workers(data, yardstick, tmp_path, ray="auto") as cluster:
        answers = list(cluster.map(questions))
    wanted = [evaluate(data, yardstick, *question) for question in questions]
    assert [(one.expression, one.bits) for one in answers] == [(one.expression, one.bits) for one in wanted]
    assert log == ["auto", "shutdown"]


def test_a_cluster_that_does_not_answer_is_named(monkeypatch, tmp_path):
    """No cluster at the address, and no Ray at all, are explained."""
    data = corpus()
    yardstick = Yardstick.of(data, data.docs)
    monkeypatch.setitem(sys.modules, "ray", fake_ray([], reachable=False))
    with pytest.raises(UsageError, match="no cluster answers there"), workers(data, yardstick, tmp_path, ray="x:1"):
        pass
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"gguf-fusion\[ray\]"), workers(data, yardstick, tmp_path, ray="auto"):
        pass
