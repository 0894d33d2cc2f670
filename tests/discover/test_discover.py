"""The search: closed forms, determinism, resuming, and truths that were planted in the data."""

import json
from pathlib import Path

import numpy as np
import pytest

from gguf_fusion.discover.candidates import Evaluator, Log, Yardstick, as_formula, evaluate, workers
from gguf_fusion.discover.corpus import Corpus, Doc, split_documents
from gguf_fusion.discover.evolution import MAX_DEPTH, MAX_SIZE, _depth, evolved, front
from gguf_fusion.discover.parameters import em_weights, exponents, starting_points
from gguf_fusion.discover.search import fit_documents, judged, search
from gguf_fusion.errors import UsageError
from gguf_fusion.formula.features import Steps
from gguf_fusion.formula.nodes import Memory

NAMES = ("a", "b", "c")
S = 9


def corpus_of(truth, *, n_docs=24, n=150, seed=0, names=NAMES, sharpness=0.5):
    """Documents whose symbols are drawn from ``truth(laws, domain, before)``, made of the experts' random laws."""
    rng = np.random.default_rng(seed)
    laws = np.log(rng.dirichlet(np.full(S, sharpness), (n_docs * n, len(names))))
    text = np.zeros(n_docs * n, np.int64)
    docs = []
    for d in range(n_docs):
        domain = f"domain{d % 2}"
        split = ("fit", "fit", "fit", "fit", "select", "select", "test", "test")[d % 8]
        docs.append(Doc(f"doc{d}", domain, split, d * n, (d + 1) * n, n, (1.0,) * len(names)))
        before = S - 1
        for t in range(d * n, (d + 1) * n):
            probs = truth(laws[t], domain, before)
            text[t] = before = int(rng.choice(S, p=probs / probs.sum()))
    return Corpus(tuple(names), tuple(docs), laws.astype(np.float32), text, np.ones(n_docs * n, np.bool_))


def evaluator_of(corpus, log=None, mapper=None):
    docs = fit_documents(corpus)
    return Evaluator(corpus, Yardstick.of(corpus, docs), log or Log(None, {}, resume=False), mapper)


def quiet(tier, n, best):
    """Nobody listens."""


def mixture(laws, domain, before):
    return np.array([0.6, 0.3, 0.1]) @ np.exp(laws)


def test_em_finds_the_weights_and_never_gets_worse():
    """Weights planted in data are found, and their bits are at most those of the best single expert."""
    corpus = corpus_of(mixture, n_docs=40, n=300)
    given = corpus.given(corpus.of("fit"))
    weights = em_weights(given)
    np.testing.assert_allclose(weights, [0.6, 0.3, 0.1], atol=0.05)
    bits = -np.log2(np.exp(given) @ weights).mean()
    assert bits <= (-given / np.log(2.0)).mean(axis=0).min()


def test_exponents_are_recovered():
    """Exponents of a planted log-linear law are found, their sum included."""
    planted = np.array([0.9, 0.4, 0.0])
    corpus = corpus_of(lambda laws, d, b: np.exp(planted @ laws), n_docs=40, n=300)
    np.testing.assert_allclose(exponents(corpus, corpus.of("fit")), planted, atol=0.12)


def test_planted_formula_is_found_or_equalled():
    """On data drawn from a gated formula the search comes as close to it on test as the formula itself, nearly."""
    corpus = corpus_of(lambda laws, domain, before: np.exp(0.7 * laws[0] + 0.3 * laws[2]), n_docs=32, n=200)
    planted = 'formula(geometric(0.7*"a", 0.3*"c"))'
    evaluator = evaluator_of(corpus)
    scored = search(evaluator, (1, 2, 3), 120, 3, quiet)
    found = judged(corpus, scored, "linear(w=static)")
    test = corpus.of("test")
    truth_bpb = corpus.bits(as_formula(planted).root, test).sum() / sum(d.n_scored for d in test)
    assert found.test_bpb <= truth_bpb * 1.01
    assert found.against[0].gain.relative_low > 0.0


def test_evolution_alone_finds_a_planted_pool():
    """Tier 3 without tier 1 recovers a planted geometric mean from plain starting points."""
    corpus = corpus_of(lambda laws, domain, before: np.exp(0.5 * laws[0] + 0.5 * laws[1]), n_docs=32, n=150)
    evaluator = evaluator_of(corpus)
    scored = search(evaluator, (3,), 300, 5, quiet)
    planted = evaluate(corpus, evaluator.yardstick, 'formula(geometric(0.5*"a", 0.5*"b"))', 3)
    assert min(one.bpb for one in scored) <= planted.bpb * 1.005


def test_nothing_is_found_where_nothing_is():
    """Where the uniform pool is the truth, what a search finds has no gain over it on test beyond the interval."""
    corpus = corpus_of(lambda laws, domain, before: np.exp(laws).mean(axis=0), n_docs=40, n=200)
    found = judged(corpus, search(evaluator_of(corpus), (1, 2, 3), 60, 1, quiet), "linear(w=static)")
    uniform = next(a for a in found.against if a.name == "uniform linear pool")
    assert uniform.gain.relative_low <= 0.0
    assert abs(uniform.gain.relative) < 0.02


def test_same_seed_same_search_with_any_number_of_workers(tmp_path):
    """The candidates and their scores do not depend on how many processes evaluate them."""
    corpus = corpus_of(mixture, n_docs=16, n=60)
    alone = search(evaluator_of(corpus), (1, 2, 3), 40, 7, quiet)
    corpus.save(tmp_path)
    docs = fit_documents(corpus)
    yardstick = Yardstick.of(corpus, docs)
    with workers(corpus, yardstick, tmp_path, 2) as mapper:
        shared = search(Evaluator(corpus, yardstick, Log(None, {}, resume=False), mapper), (1, 2, 3), 40, 7, quiet)
    assert [(one.expression, one.bits) for one in alone] == [(one.expression, one.bits) for one in shared]


def test_interrupted_equals_uninterrupted(tmp_path: Path):
    """A search cut off in the middle of a line and resumed ends with the same candidates and computes only the rest."""
    corpus = corpus_of(mixture, n_docs=16, n=60)
    about = {"seed": 7}
    whole = tmp_path / "whole.jsonl"
    evaluator = evaluator_of(corpus, Log(whole, about, resume=False))
    wanted = search(evaluator, (1, 2, 3), 40, 7, quiet)
    lines = whole.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:30])
    again = evaluator_of(corpus, Log(cut, about, resume=True))
    found = search(again, (1, 2, 3), 40, 7, quiet)
    assert [one.expression for one in found] == [one.expression for one in wanted]
    assert again.n_new < evaluator.n_new
    assert all(json.loads(line) for line in cut.read_text().splitlines())


def test_a_log_of_another_search_is_refused(tmp_path: Path):
    """Results of different seeds or documents are not mixed, and an existing file is not overwritten."""
    path = tmp_path / "log.jsonl"
    Log(path, {"seed": 1}, resume=False)
    with pytest.raises(UsageError, match="another search"):
        Log(path, {"seed": 2}, resume=True)
    with pytest.raises(UsageError, match="--resume"):
        Log(path, {"seed": 1}, resume=False)
    path.write_text("no json\n")
    with pytest.raises(UsageError, match="got something else"):
        Log(path, {"seed": 1}, resume=True)


def test_trees_stay_within_their_limits_and_interiors_change():
    """Evolved trees respect depth and size, are normalised laws, and inner nodes are crossed as well as leaves."""
    corpus = corpus_of(mixture, n_docs=16, n=60)
    evaluator = evaluator_of(corpus)
    seeds = evaluator.score([(text, 1, ()) for text in starting_points(corpus)])
    children = [one for batch in evolved(evaluator, seeds, 80, 0) for one in batch]
    roots = [as_formula(one.expression).root for one in children]
    assert len({type(root).__name__ for root in roots}) >= 3
    assert max(one.nodes for one in children) <= MAX_SIZE
    assert max(_depth(root) for root in roots) <= MAX_DEPTH
    came = corpus.text[:50]
    before = np.concatenate([[S - 1], came[:-1]])
    for root in roots:
        memory = Memory(root, NAMES, np.ones(3), S)
        law = root.law(Steps(corpus.laws[:50].astype(np.float64), before, came), memory)
        np.testing.assert_allclose(np.exp(law).sum(axis=1), 1.0, atol=1e-6)


def test_no_pool_of_probabilities_beats_the_symbol_oracle():
    """Linear pools of any weights stay above the bits of the best expert of every single symbol."""
    corpus = corpus_of(mixture, n_docs=8, n=100)
    docs = corpus.of("fit")
    oracle = -corpus.given(docs).max(axis=1).sum() / np.log(2.0)
    for text in ('formula(linear(1*"a", 1*"b"))', 'formula(linear(eta=1, gamma=1, 1*"a", 1*"b", 1*"c"))'):
        assert corpus.bits(as_formula(text).root, docs).sum() >= oracle


def test_the_front_has_no_beaten_member():
    """No member of the front is at least as good in everything and better in something than another."""
    corpus = corpus_of(mixture, n_docs=16, n=60)
    members = front(search(evaluator_of(corpus), (1, 2), 30, 0, quiet))
    assert len(members) > 1
    for one in members:
        for other in members:
            if one is not other:
                better = [a <= b for a, b in zip(one.objectives, other.objectives, strict=True)]
                assert not all(better) or one.objectives == other.objectives


def test_documents_are_split_whole_and_copies_stay_together():
    """Splits depend on texts and seed alone; a copy of a document goes where the document went."""
    documents = [(f"{i}", "d", bytes([i]) * 50) for i in range(16)] + [("copy", "d", bytes([3]) * 50)]
    splits = split_documents(documents, 0)
    assert splits["copy"] == splits["3"]
    counts = [list(splits.values()).count(split) for split in ("fit", "select", "test")]
    assert min(counts) >= 3
    assert splits == split_documents(documents[::-1], 0)


def test_too_few_documents_are_refused():
    """A search without documents to judge on says what to give."""
    corpus = corpus_of(mixture, n_docs=2, n=50)
    with pytest.raises(UsageError, match="at least four documents"):
        judged(corpus, search(evaluator_of(corpus), (2,), 5, 0, quiet))
