"""The battery: its items are complete, and every reference and check does what it is there for."""

import re
from dataclasses import replace

import pytest

from gguf_fusion.battery.items import CATEGORIES, Item, items, passes
from gguf_fusion.battery.run import Log, Result, table
from gguf_fusion.errors import UsageError

LITERAL = {"instruction-1", "instruction-2"}
"""Items that ask for a few words only: their references explain, and do not pass."""


def test_every_category_has_its_items():
    """At least 48 items, six of each category, with different ids, in four languages and two scripts at least."""
    every = items()
    assert len(every) >= 48
    assert len({item.id for item in every}) == len(every)
    for category in CATEGORIES:
        assert len(items(category)) >= 6
    multilingual = items("multilingual")
    assert len({item.language for item in multilingual}) >= 4
    assert any(re.search(r"[\u0400-\u04ff]", item.prompt) for item in multilingual)
    assert all(100 <= len(item.reference.encode()) <= 600 for item in every)
    with pytest.raises(UsageError, match="--category"):
        items("cooking")


@pytest.mark.parametrize("item", [item for item in items() if item.id not in LITERAL], ids=lambda item: item.id)
def test_references_pass_their_own_checks(item):
    """A reference is a right answer, and an empty one is not."""
    if item.id != "math-2":  # its reference ends with a check of the result
        assert passes(item, item.reference)
    assert not passes(item, "")


CHOICE = {"kind": "choice", "options": {"A": "hat", "B": "umbrella"}, "answer": "B"}


def item(**check):
    return Item("x", "factual", "en", "?", "", check, 100)


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        ({"kind": "numeric", "value": 102}, "17 * 6 = 102.", "It is 103."),
        ({"kind": "numeric", "value": 3.14, "tolerance": 0.01}, "about 3.142", "about 3.2"),
        ({"kind": "numeric", "value": 1234}, "1,234 people", "no number"),
        ({"kind": "exact", "accept": ["new york"]}, "  New  York ", "York"),
        (CHOICE, "B) since it rains", "A) since it rains"),
        (CHOICE, "The answer is B because A is dry.", "A is dry."),
        (CHOICE, "**B**", "A, or perhaps B."),
        (CHOICE, "I would take the umbrella.", "An umbrella or a hat."),
        ({"kind": "regex", "pattern": r"\bAu\b"}, "Au, of course", "Ag"),
        (
            {"kind": "code", "tests": "assert f(2) == 4"},
            "Sure:\n```python\ndef f(x):\n    return 2 * x\n```",
            "def f(x): return 3",
        ),
        ({"kind": "code", "tests": "assert f() is None"}, "def f(): pass", "while True: pass"),
        (
            {"kind": "constraints", "contains": ["fox"], "absent": ["dog"], "min_words": 2},
            "A Fox ran",
            "A fox and a dog",
        ),
        ({"kind": "constraints", "max_words": 3}, "one two three", "one two three four"),
    ],
)
def test_checks_tell_right_from_wrong(check, right, wrong):
    """Every kind of check accepts a right answer and refuses a wrong one, endless programs included."""
    assert passes(item(**check), right)
    assert not passes(item(**check), wrong)


def test_tables_add_up():
    """Bits are summed over bytes, answers counted."""
    results = [Result("a", "math", "x", 10.0, 5), Result("b", "code", "x", 2.0, 10)]
    assert table(results) == {"x": {"math": 2.0, "code": 0.2, "all": 0.8}}
    answers = [replace(one, bits=None, passed=flag) for one, flag in zip(results, (True, False), strict=True)]
    assert table(answers) == {"x": {"math": 1.0, "code": 0.0, "all": 0.5}}


def test_a_run_that_was_cut_short_goes_on(tmp_path):
    """Results are kept as they come; a half line is dropped, other items, experts and seeds are not known."""
    path, one, facts = tmp_path / "out.jsonl", item(kind="exact", accept=["x"]), {"experts": ["a"]}
    log = Log(path, facts, resume=True)
    log.add(one, Result("x", "factual", "a", 12.0, 10))
    log.add(one, Result("x", "factual", "b", passed=True, answer="é", seed=1))
    path.write_bytes(path.read_bytes() + b'{"key": "half')
    again = Log(path, facts, resume=True)
    assert again.known(one, "a", None)
    assert again.known(one, "b", 1)
    assert not again.known(one, "b", 2)
    assert not again.known(replace(one, prompt="!"), "a", None)
    again.add(one, Result("x", "factual", "c", 1.0, 10))
    assert [r.who for r in Log(path, facts, resume=True).results([one], ["c", "b", "a"], [None, 1])] == ["c", "b", "a"]
    assert not Log(path, {"experts": ["other"]}, resume=True).known(one, "a", None)
    path.write_text("[1]\n")
    with pytest.raises(UsageError, match="earlier battery --out"):
        Log(path, facts, resume=True)
    assert not Log(path, facts, resume=False).known(one, "a", None)
