"""How vocabularies relate: counts on toys, the command on real ones."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_fusion.cli import main
from gguf_fusion.compat import Classes, compare, pairs
from gguf_fusion.vocabulary import Kind, Vocabulary


class Toy:
    """Tokenizes by longest match."""

    def __init__(self, name, pieces):
        self.name, self.pieces = name, pieces
        self.vocabulary = Vocabulary.from_pieces(pieces, [Kind.TEXT] * len(pieces))

    def tokenize(self, text):
        ids = []
        while text:
            best = max((p for p in self.pieces if text.startswith(p)), key=len)
            ids.append(self.pieces.index(best))
            text = text[len(best) :]
        return np.array(ids, np.int32)


A = Toy("a", [b"a", b"b", b"ab", b"abb", b"x"])
B = Toy("b", [b"b", b"a", b"ba", b"abba", b"bb"])


def test_counts_are_those_of_the_definitions():
    """Shared pieces, ids, and classes of pieces in both directions."""
    report = compare(A, B)
    assert not report.identical
    assert report.shared == 2
    assert report.same_ids == 0
    assert report.forth == Classes(exact=2, approx=2, unmatched=1)
    assert report.back == Classes(exact=2, approx=3, unmatched=0)
    assert report.bridge == "byte"
    assert report.text is None


def test_straddling_tokens_are_counted():
    """Tokens with a border of the other tokenization inside, and borders in common."""
    on = compare(A, B, b"abbaab").text
    # a: abb|a|ab  b: abba|a|b
    assert on.n_tokens == (3, 3)
    assert on.shared_borders == 2
    assert on.straddling == (1, 1)


def test_a_vocabulary_is_the_same_as_itself():
    """Identical vocabularies: all ids, all pieces, no straddling, fused by tokens."""
    report = compare(A, Toy("twin", A.pieces), b"abbaab")
    assert report.identical
    assert report.same_ids == report.shared == 5
    assert report.forth == Classes(5, 0, 0)
    assert report.text.straddling == (0, 0)
    assert report.bridge == "token"


def test_pairs_are_all_pairs():
    """Three experts have three pairs."""
    assert [(one.name, other.name) for one, other in pairs([A, B, Toy("c", [b"c"])])] == [
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    ]


def test_one_expert_is_not_enough():
    """A comparison needs two."""
    result = CliRunner().invoke(main, ["compat", "smollm2-135m-instruct"])
    assert "at least two experts" in str(result.exception) + result.output


@pytest.mark.model
def test_real_vocabularies():
    """The pocket ensemble: three pairs, every class adds up, all need the byte bridge."""
    result = CliRunner().invoke(main, ["compat", "pocket", "--offline", "--json"])
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)
    assert len(reports) == 3
    for report in reports:
        assert report["bridge"] == "byte"
        assert sum(report["forth"].values()) == report["pieces"][0]
        assert sum(report["back"].values()) == report["pieces"][1]
        assert 0 < report["shared"] < min(report["pieces"])
