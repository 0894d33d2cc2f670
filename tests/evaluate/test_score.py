"""Scoring on toy experts: windows, own tokens against the bridge, fusion by hand, and traces on disk."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate import trace_cache
from gguf_fusion.evaluate.baselines import checks, fitted_pool, given_of, laws_of
from gguf_fusion.evaluate.score import Document, DocumentScore, score_trace, total
from gguf_fusion.evaluate.scorer import Scorer, Settings
from gguf_fusion.evaluate.windows import FIRST_BYTES, windows
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.expressions import parse
from gguf_fusion.testing import byte_vocabulary, nested_vocabulary

VOCABULARY = nested_vocabulary()
TEXT = bytes(np.random.default_rng(0).choice(list(b"abc"), 700).tolist())


def expert(name: str, seed: int, n_symbols: int = 16) -> TableExpert:
    def law(path: tuple[int, ...]) -> np.ndarray:
        recent = VOCABULARY.text(np.array(path[-4:], np.int32))[-3:]
        return np.random.default_rng([seed, zlib.crc32(recent)]).dirichlet(np.full(n_symbols, 0.5)) + 1e-6

    return TableExpert(VOCABULARY, law, name=name)


def scorer(*seeds: int, keep: bool = False, loaded: list[str] | None = None, **settings: object) -> Scorer:
    names = [f"e{i}" for i in range(len(seeds))]

    def load() -> list[TableExpert]:
        if loaded is not None:
            loaded.append("load")
        return [expert(name, seed) for name, seed in zip(names, seeds, strict=True)]

    identity = {"experts": list(seeds)} if keep else None
    return Scorer(load, Settings(**settings), identity=identity, lanes="serial", n_threads=1)


def scores(reader: Scorer, text: bytes = TEXT, strategies: tuple[str, ...] = ("linear",)) -> DocumentScore:
    document = Document("text", text)
    with reader, reader.trace(document) as trace:
        return score_trace(document, trace, {s: parse(s) for s in strategies}, np.ones(len(trace.names)))


def test_exact_bridge_needs_no_more_bits_than_own_tokens() -> None:
    """The marginal over all covers is never below the text's own tokens: at epsilon 0 the bridge costs nothing.

    Control and unused ids are no text to the bridge, which only helps it.
    """
    score = scores(scorer(1, epsilons=(0.0,)))
    [result] = score.experts.values()
    assert result.bridge[0].n_bytes == result.n_bytes == score.n_bytes
    assert 0 < result.bridge[0].bits <= result.own_bits * 1.0001
    assert result.bridge[0].share_sum < 1e-3
    assert score.floor_hits == 0


def test_larger_epsilon_saves_decodes() -> None:
    """Each epsilon has its own decodes and ghost share; own bits do not depend on it."""
    tight, loose = scores(scorer(1, epsilons=(0.01, 0.5))).experts["e0"].bridge
    assert loose.n_decodes < tight.n_decodes
    assert loose.ghost_share > tight.ghost_share
    assert loose.n_tokens == tight.n_tokens


@pytest.mark.parametrize("strategy", ["linear", "loglinear", "power(r=0.5)", "linear(w=evidence)"])
def test_copies_of_one_expert_show_no_gain(strategy: str) -> None:
    """Two copies of one expert are that expert."""
    score = scores(scorer(3, 3, epsilons=(0.0,)), strategies=(strategy,))
    assert score.fused[strategy].bits == pytest.approx(score.experts["e0"].bridge[0].bits, rel=1e-3)


def test_fused_by_hand() -> None:
    """The linear pool of two evaluated laws is their mean, byte by byte."""
    document, reader = Document("text", TEXT), scorer(1, 2, epsilons=(0.0,))
    with reader, reader.trace(document) as trace:
        fused = score_trace(document, trace, {"linear": parse("linear")}, np.array([0.25, 0.75])).fused["linear"]
        logs = trace.columns["joint_logprob"].astype(np.float64)[trace.scored]
    by_hand = -np.log2(np.exp(logs) @ [0.25, 0.75]).sum()
    assert fused.bits == pytest.approx(by_hand, rel=1e-4)
    assert fused.n_bytes == trace.scored.sum()
    assert fused.zero_hits == 0


def test_no_pool_beats_the_oracle() -> None:
    """The best expert of every single byte bounds each linear pool."""
    score = scores(scorer(1, 2, 5, epsilons=(0.0,)), strategies=("linear", "linear(w=evidence)"))
    assert all(fused.bits >= score.oracle_bits * (1 - 1e-4) for fused in score.fused.values())


def test_documents_add_up() -> None:
    """Totals are sums over documents, whatever their order."""
    one, two = (scores(scorer(1, 2), text) for text in (TEXT[:400], TEXT[300:]))
    both = total([one, two])
    assert both.n_bytes == one.n_bytes + two.n_bytes
    assert both.fused["linear"].bits == pytest.approx(one.fused["linear"].bits + two.fused["linear"].bits)
    assert total([two, one]).experts["e1"].own_bits == pytest.approx(both.experts["e1"].own_bits)


@pytest.mark.parametrize("text", [b"", b"a", b"ab", TEXT[:FIRST_BYTES]])
def test_tiny_documents(text: bytes) -> None:
    """An empty document and one that is all context have nothing to score, and break nothing."""
    score = scores(scorer(1, 2), text)
    assert score.n_bytes == 0
    assert score.fused["linear"].bits == 0.0


def test_windows_join_without_a_gap() -> None:
    """Every byte after the first few is scored in exactly one window, and each window has its context."""
    text = (b"abca bca\ncab " * 300)[:3000]
    found = windows(text, [_Bytes()], size=600, context=100)
    assert len(found) > 4
    assert FIRST_BYTES <= found[0].score < FIRST_BYTES + 16
    for before, after in zip(found[:-1], found[1:], strict=True):
        assert after.score == before.stop
        assert after.start <= after.score - 100
        assert after.end - after.start <= 600 + 100
    assert found[-1].stop == len(text)


class _Bytes:
    """Tokenizes every byte alone."""

    vocabulary = byte_vocabulary()

    def tokenize(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)


@pytest.mark.parametrize("sizes", [(600, 8), (300, 200)])
def test_window_sizes_are_checked(sizes: tuple[int, int]) -> None:
    """A window needs context and something to score."""
    with pytest.raises(UsageError, match="window: expected"):
        Settings(window=sizes[0], context=sizes[1])


def test_windowed_scores_cover_the_same_bytes_for_everybody() -> None:
    """A long document in windows: experts, bridge and fusion are scored on the same bytes."""
    score = scores(scorer(1, 2, window=320, context=40), TEXT)
    assert score.n_windows > 1
    counts = {e.n_bytes for e in score.experts.values()} | {score.fused["linear"].n_bytes, score.n_bytes}
    assert len(counts) == 1
    assert score.n_bytes > len(TEXT) - FIRST_BYTES - 16


def test_kept_trace_is_used_and_a_damaged_one_is_not() -> None:
    """A second strategy needs no expert; a truncated trace is computed again with the same result."""
    loaded: list[str] = []
    first = scores(scorer(1, 2, keep=True, loaded=loaded))
    again = scores(scorer(1, 2, keep=True, loaded=loaded), strategies=("linear", "loglinear"))
    assert loaded == ["load"]
    assert again.fused["linear"].bits == first.fused["linear"].bits
    [stored] = trace_cache.stored()
    laws = stored.path / "laws.npy"
    laws.write_bytes(laws.read_bytes()[:-100])
    repaired = scores(scorer(1, 2, keep=True, loaded=loaded))
    assert loaded == ["load", "load"]
    assert repaired.fused["linear"].bits == first.fused["linear"].bits


@pytest.mark.parametrize(
    "meta", ["", "{", "[]", "{}", '{"files": {"laws.npy": [1]}, "about": {}}', '{"files": [], "about": 1}']
)
def test_a_trace_whose_description_is_broken_is_computed_again(meta: str) -> None:
    """Neither using nor listing it stumbles."""
    loaded: list[str] = []
    first = scores(scorer(1, keep=True, loaded=loaded))
    [stored] = trace_cache.stored()
    (stored.path / "meta.json").write_text(meta)
    assert trace_cache.stored() == []
    assert scores(scorer(1, keep=True, loaded=loaded)).fused["linear"].bits == first.fused["linear"].bits
    assert loaded == ["load", "load"]


@pytest.mark.parametrize("change", [{"epsilons": (0.3,)}, {"window": 2048}, {"rejoin": None}])
def test_settings_are_part_of_the_key(change: dict[str, object]) -> None:
    """A trace with other settings, or of another text, is another trace."""
    assert scorer(1, keep=True).key(TEXT) != scorer(1, keep=True, **change).key(TEXT)
    assert scorer(1, keep=True).key(TEXT) != scorer(1, keep=True).key(TEXT + b"a")
    assert scorer(1, keep=True).key(TEXT) == scorer(1, keep=True).key(TEXT)


def test_clear_removes_everything() -> None:
    """Clearing counts what it removes and leaves nothing."""
    scores(scorer(1, keep=True))
    n, size = trace_cache.clear()
    assert n == 1
    assert size > len(TEXT) * 257 * 2
    assert trace_cache.stored() == []


def test_rejoin_changes_little() -> None:
    """Reading on from the text's own tokens saves rows and moves the bits by less than a percent."""
    never, soon = (scores(scorer(7, epsilons=(0.05,), rejoin=rejoin)).experts["e0"].bridge[0] for rejoin in (None, 16))
    assert soon.bits == pytest.approx(never.bits, rel=0.01)


@pytest.mark.parametrize("strategy", ["loglinear(w=evidence(eta=0.1, gamma=0.99))", "linear", "product"])
def test_baselines_come_out_as_they_must(strategy: str) -> None:
    """Copies of one expert gain nothing, save for pools that sharpen; an expert that knows nothing loses its weight."""
    with scorer(1, 2) as reader, reader.trace(Document("text", TEXT)) as trace:
        found = checks(trace, parse(strategy), np.ones(2))
    assert (abs(found.copies_gain) < 1e-9) == (strategy != "product")
    assert found.noise_weight < 1e-6


def test_the_fitted_pool_is_no_worse_than_any_single_expert() -> None:
    """Linear weights fitted on a text cost no more bits on it than its best expert or the uniform pool."""
    with scorer(1, 2, 3) as reader, reader.trace(Document("text", TEXT)) as trace:
        given = given_of(trace, np.ones(3))
        pool = fitted_pool([given], trace.names)
        laws = laws_of(trace, np.ones(3))
        fused = score_trace(
            Document("text", TEXT), trace, {pool: parse(pool), "average": parse("average")}, np.ones(3)
        ).fused
    np.testing.assert_allclose(np.exp(laws).sum(axis=2), 1.0, atol=1e-3)
    assert fused[pool].bits <= -given.sum(axis=0).max() / np.log(2) + 0.1
    assert fused[pool].bits <= fused["average"].bits + 0.1
