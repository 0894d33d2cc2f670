"""Bridges from token to token: their rules by hand, and the probability of a text against brute force."""

from functools import cache

import numpy as np
import pytest

from gguf_fusion.errors import ExpertFailedError, UsageError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.expressions import parse
from gguf_fusion.piecewise.bridges import FirstPiece, Matched, TopUnion, Union, geometric, other_bridges, weighed
from gguf_fusion.piecewise.space import PieceSpace, token_masses
from gguf_fusion.piecewise.text_law import ESCAPE, Way, context_of, laws_at, text_laws
from gguf_fusion.vocabulary import Kind, Vocabulary


def expert(name, words, seed):
    """Its law depends on the bytes alone; its last id is END."""
    vocabulary = Vocabulary.from_pieces(
        [b"<c>", *words, b"</s>"], [Kind.CONTROL, *[Kind.TEXT] * len(words), Kind.END], bos_id=0
    )

    @cache
    def law(text):
        rng = np.random.default_rng([seed, *text])
        return rng.dirichlet(np.full(vocabulary.n_vocab, 0.7))

    return TableExpert(vocabulary, lambda path: law(vocabulary.text(np.array(path))), name=name)


A = expert("a", [b"a", b"b", b"ab", b"abb", b"bb"], 1)
B = expert("b", [b"b", b"a", b"ba", b"abba"], 2)
EXPERTS = [A, B]
SPACE = PieceSpace(EXPERTS)
EQUAL = np.array([0.5, 0.5])


def law_of(**masses):
    law = np.zeros(SPACE.n)
    for name, mass in masses.items():
        law[SPACE.end if name == "end" else SPACE.entry[name.encode()]] = mass
    return law


def masses_of(one, **masses):
    found = np.zeros(one.vocabulary.n_vocab)
    for name, mass in masses.items():
        found[-1 if name == "end" else one.vocabulary.ids_of(name.encode())[0]] = mass
    return found


MASSES = [
    masses_of(A, a=0.1, b=0.1, ab=0.5, abb=0.1, bb=0.1, end=0.1),
    masses_of(B, a=0.2, b=0.1, ba=0.3, abba=0.2, end=0.2),
]


def test_pieces_that_may_come_next():
    """Beginnings of the rest, and pieces that go beyond it."""
    assert SPACE.pieces == [b"a", b"ab", b"abb", b"abba", b"b", b"ba", b"bb"]
    assert [SPACE.pieces[i] for i in SPACE.agreeing(b"abbb")] == [b"a", b"ab", b"abb"]
    assert [SPACE.pieces[i] for i in SPACE.agreeing(b"ab")] == [b"a", b"ab", b"abb", b"abba"]


def test_union_keeps_every_piece_apart():
    """An expert gives nothing to a piece that it lacks, END has an entry of its own."""
    bridge = Union(SPACE)
    fused = bridge.fused(bridge.mapped(MASSES), EQUAL)
    expected = law_of(a=0.15, ab=0.25, abb=0.05, abba=0.1, b=0.1, ba=0.15, bb=0.05, end=0.15)
    np.testing.assert_allclose(fused, expected)


def test_first_piece_gives_what_the_pivot_lacks_to_the_first_piece_of_its_spelling():
    """'ba' counts for 'b', 'abba' for 'abb'; the pivot itself is as it was."""
    bridge = FirstPiece(SPACE, 0)
    a, b = bridge.mapped(MASSES)
    np.testing.assert_allclose(a, law_of(a=0.1, ab=0.5, abb=0.1, b=0.1, bb=0.1, end=0.1))
    np.testing.assert_allclose(b, law_of(a=0.2, abb=0.2, b=0.4, end=0.2))


def test_top_union_speaks_for_foreign_pieces_by_the_first_token():
    """k = 1: the words are 'ab' and 'ba'. The expert b spells 'ab' from 'a', the expert a spells 'ba' from 'b'."""
    bridge = TopUnion(SPACE, k=1)
    a, b = bridge.mapped(MASSES)
    np.testing.assert_allclose(a, law_of(ab=0.5, ba=0.1) / 0.6)
    np.testing.assert_allclose(b, law_of(ab=0.2, ba=0.3) / 0.5)


def test_top_union_counts_no_token_twice():
    """Where the first token of a foreign word is a word itself, it speaks for itself only."""
    bridge = TopUnion(SPACE, k=3)
    b = bridge.mapped([masses_of(A, a=0.3, ab=0.4, abb=0.3), MASSES[1]])[1]
    assert b[SPACE.entry[b"a"]] > 0
    assert b[SPACE.entry[b"ab"]] == 0
    assert b.sum() == pytest.approx(1.0)


def test_matched_spreads_evenly_over_a_spelling_and_cuts_small_sums():
    """'abba' is 'abb' and 'a' for the pivot; what stays below the threshold is gone, the rest sums to 1."""
    bridge = Matched(SPACE, 0, k=2, threshold=0.2)
    a, b = bridge.mapped([masses_of(A, ab=0.6, b=0.4), masses_of(B, abba=0.5, ba=0.3, a=0.2)])
    np.testing.assert_allclose(a, law_of(ab=0.6, b=0.4))
    np.testing.assert_allclose(b, law_of(abb=0.3125, a=0.3125 + 0.1875, b=0.1875))
    fused = bridge.fused([a, b], EQUAL)
    np.testing.assert_allclose(fused, law_of(a=0.25, ab=0.3, b=0.29375) / 0.84375)


def test_matched_takes_a_piece_without_its_blank_for_the_same():
    """A quirk of the original that is kept: ' x' counts for 'x' where the pivot has no ' x'."""
    one, other = expert("one", [b"x", b" "], 1), expert("other", [b" x"], 2)
    space = PieceSpace([one, other])
    law = Matched(space, 0).mapped([masses_of(one, x=1.0), np.array([0.0, 1.0, 0.0])])[1]
    assert law[space.entry[b"x"]] == 1.0


@pytest.mark.parametrize("bridge", other_bridges(EXPERTS, 0), ids=lambda bridge: bridge.name)
def test_laws_over_pieces(bridge):
    """Every mapped and fused law sums to 1; weight 0 is no influence; alone, the pivot's law is its own or a part."""
    masses = laws_at(EXPERTS, b"ab")
    mapped = bridge.mapped(masses)
    for law in [*mapped, bridge.fused(mapped, np.array([0.3, 0.7])), bridge.fused(mapped, np.array([1.0, 0.0]))]:
        assert law.sum() == pytest.approx(1.0)
        assert (law >= 0).all()
    np.testing.assert_allclose(weighed(mapped, np.array([0.0, 1.0])), mapped[1])


def brute_force(way, text, first):
    """P(an output begins with the text), by recursion over all paths."""
    bridge, space = way.bridge, way.bridge.space

    def mass(at):
        masses = laws_at(EXPERTS, text[:at])
        law = bridge.fused(bridge.mapped(masses), way.weights)
        if not bridge.complete:
            whole = Union(space)
            law = (1 - ESCAPE) * law + ESCAPE * whole.fused(whole.mapped(masses), way.weights)
        rest, total = text[at:], 0.0
        for piece, p in zip(space.pieces, law[:-1], strict=True):
            if piece.startswith(rest):
                total += p
            elif rest.startswith(piece):
                total += p * mass(at + len(piece))
        return total

    return mass(first)


WAYS = [Way(bridge, weights) for bridge in other_bridges(EXPERTS, 0) for weights in (EQUAL, np.array([0.0, 1.0]))]


@pytest.mark.parametrize("text", [b"abbab", b"abbaabb", b"ba"])
def test_text_law_is_the_sum_over_all_paths(text):
    """Every bridge, fused and one expert alone, against recursion."""
    for way, found in zip(WAYS, text_laws(EXPERTS, WAYS, text, 1), strict=True):
        assert found.bits == pytest.approx(-np.log2(brute_force(way, text, 1)), abs=2e-3)
        assert found.path_bits >= found.bits - 1e-9
        assert found.path[0] == 1
        assert found.path[-1] == len(text)
        assert all(np.diff(found.path) > 0)


def test_prefix_probabilities_are_a_law_over_texts():
    """Going on by any byte, or ending: together 1."""
    way = Way(FirstPiece(SPACE, 0), EQUAL)
    masses = laws_at(EXPERTS, b"a")
    ends = way.bridge.fused(way.bridge.mapped(masses), EQUAL)[SPACE.end]
    going_on = sum(2.0 ** -text_laws(EXPERTS, [way], b"a" + byte, 1)[0].bits for byte in (b"a", b"b"))
    assert going_on + ends == pytest.approx(1.0, abs=1e-6)


def test_texts_and_spaces_that_do_not_fit_are_refused():
    """A text needs bytes before and after the border; ways need one space."""
    way = Way(Union(SPACE), EQUAL)
    for ways, text, first in (
        ([way], b"ab", 0),
        ([way], b"ab", 2),
        ([], b"ab", 1),
        ([way, Way(Union(PieceSpace(EXPERTS)), EQUAL)], b"ab", 1),
    ):
        with pytest.raises(UsageError):
            text_laws(EXPERTS, ways, text, first)
    with pytest.raises(UsageError, match="at least one"):
        TopUnion(SPACE, k=0)


def test_a_broken_row_names_its_expert():
    """NaN and infinite logits."""
    row = np.zeros(A.vocabulary.n_vocab, np.float32)
    for bad in (np.nan, np.inf):
        row[1] = bad
        with pytest.raises(ExpertFailedError, match="'a'"):
            token_masses(A, row)


def test_bos_comes_first():
    """Where a model wants one."""
    assert context_of(A, b"ab").tolist() == [0, 3]


@pytest.mark.parametrize(("pool", "strategy"), [(weighed, "linear"), (geometric, "loglinear")])
def test_evidence_is_that_of_the_byte_strategies(pool, strategy):
    """Where all pieces are single bytes, a union with evidence gives what the strategy of that name gives."""
    experts = [expert("one", [b"a", b"b"], 7), expert("other", [b"b", b"a"], 8)]
    space = PieceSpace(experts)
    union, text, base = Union(space), b"ababbbaab", np.array([0.3, 0.7])
    alone = [Way(union, one) for one in np.eye(2)]
    found = text_laws(experts, [*alone, Way(union, base, pool, 0.5, 0.9)], text, 1)[-1]
    laws = np.array([union.mapped(laws_at(experts, text[:at])) for at in range(1, len(text))]).transpose(1, 0, 2)
    came = np.array([space.entry[text[at : at + 1]] for at in range(1, len(text))])
    fuser = parse(f"{strategy}(w=evidence(eta=0.5, gamma=0.9))").bind(2, space.n, base, ["one", "other"])
    with np.errstate(divide="ignore"):
        law, _, _ = fuser.fuse_block(np.log(laws), came)
    bits = -law[np.arange(len(came)), came].sum() / np.log(2)
    # the geometric pool leaves a hundredth to the union law
    assert found.bits == pytest.approx(bits, abs=1e-6 if pool is weighed else 0.02 * len(came))
    assert text_laws(experts, [*alone, Way(union, np.array([0.0, 1.0]), pool, 0.5)], text, 1)[-1].bits == pytest.approx(
        text_laws(experts, alone, text, 1)[1].bits
    )


def test_evidence_needs_the_experts_alone():
    """A way with evidence without the ways of the single experts is refused."""
    with pytest.raises(UsageError, match="each single expert"):
        text_laws(EXPERTS, [Way(Union(SPACE), EQUAL, eta=0.1)], b"ab", 1)


def test_a_geometric_mean_excludes_what_one_expert_excludes():
    """Pieces that both have share the mass; with nothing in common nothing is left."""
    fused = geometric([law_of(a=0.5, ab=0.5), law_of(a=0.2, b=0.8)], EQUAL)
    np.testing.assert_allclose(fused, law_of(a=1.0))
    assert geometric([law_of(a=1.0), law_of(b=1.0)], EQUAL).sum() == 0.0
    np.testing.assert_allclose(geometric([law_of(a=1.0), law_of(b=1.0)], np.array([1.0, 0.0])), law_of(a=1.0))
