"""Dev and test: by document, deterministic, near-duplicates on one side."""

from __future__ import annotations

import numpy as np

from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.split import split, together


def text(seed: int, n: int = 400) -> bytes:
    return bytes(np.random.default_rng(seed).integers(97, 123, n).tolist())


def test_half_of_every_domain() -> None:
    """Each domain is halved, and nothing is on both sides or on none."""
    documents = [Document(str(i), text(i), "ab"[i % 2]) for i in range(20)]
    dev, test = split(documents)
    assert sorted(dev + test) == list(range(20))
    assert sum(documents[i].domain == "a" for i in dev) == 5


def test_names_and_order_do_not_matter() -> None:
    """The same texts fall on the same side under other names and in another order."""
    documents = [Document(str(i), text(i)) for i in range(9)]
    turned = [Document("x", document.text) for document in reversed(documents)]
    assert {documents[i].text for i in split(documents)[0]} == {turned[i].text for i in split(turned)[0]}


def test_near_duplicates_stay_together() -> None:
    """A text, its edited copy and an excerpt of it are one group, even across domains; strangers are not."""
    whole = text(1)
    family = [whole, whole[:200] + b"#" + whole[201:], whole[50:200]]
    documents = [Document(str(i), t, str(i)) for i, t in enumerate([*family, text(2), text(3)])]
    assert sorted(map(sorted, together(documents))) == [[0, 1, 2], [3], [4]]
    dev, test = split(documents)
    assert {0, 1, 2} <= set(dev) or {0, 1, 2} <= set(test)


def test_what_cannot_be_split() -> None:
    """Nothing, one document, copies of one, and empty texts leave dev empty."""
    assert split([]) == ([], [])
    assert split([Document("a", text(1))]) == ([], [0])
    assert split([Document(n, text(1)) for n in "abc"]) == ([], [0, 1, 2])
    assert split([Document("a", b""), Document("b", b"")])[0] == []
