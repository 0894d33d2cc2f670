"""Quality of a quantized model: the numbers of a plain computation, streamed; vocabularies must agree."""

import numpy as np
import pytest

from gguf_fusion.errors import UsageError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.measure.quality import compare, pareto, tokens_of
from gguf_fusion.vocabulary import Kind, Vocabulary

PIECES = [b"a", b"b", b"ab", b"ba", b" ", b"</s>"]


def vocabulary(pieces=PIECES):
    return Vocabulary.from_pieces(pieces, [*[Kind.TEXT] * (len(pieces) - 1), Kind.END])


def expert(seed, noise=0.0, pieces=PIECES):
    """An expert whose law depends on the last token; ``noise`` disturbs it."""
    table = np.random.default_rng(seed).normal(size=(len(pieces), len(pieces)))
    table = table + noise * np.random.default_rng(99).normal(size=table.shape)
    return TableExpert(vocabulary(pieces), lambda path: np.exp(table[path[-1] if len(path) else 0]))


def log_softmax(row):
    return row - np.log(np.exp(row).sum())


def test_numbers_are_those_of_a_plain_computation():
    """KL divergence, perplexity, same top and delta p equal loops over whole rows."""
    base, other = expert(1), expert(1, noise=0.4)
    tokens = tokens_of(base, b"ab ba ab b a ba ab " * 6, chunk=20)
    got = compare(base, other, tokens).as_json()
    kld, nll, same, delta, n_bytes = [], [], 0, [], 0
    for ids in tokens.chunks:
        for i in range(len(ids) // 2, len(ids) - 1):
            p, q = (log_softmax(e.evaluate(ids[: i + 1])[0].astype(np.float64)) for e in (base, other))
            came = ids[i + 1]
            kld.append(float((np.exp(p) * (p - q)).sum()))
            nll.append(-q[came])
            same += p.argmax() == q.argmax()
            delta.append(np.exp(q[came]) - np.exp(p[came]))
            n_bytes += len(PIECES[came])
    assert got["tokens"] == len(kld)
    assert got["kld_mean"] == pytest.approx(np.mean(kld), abs=1e-6)
    assert got["kld_max"] == pytest.approx(np.max(kld), abs=1e-6)
    assert got["ppl"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-6)
    assert got["bpb"] == pytest.approx(np.sum(nll) / np.log(2) / n_bytes, rel=1e-6)
    assert got["same_top"] == pytest.approx(same / len(kld))
    assert got["delta_p_rms"] == pytest.approx(np.sqrt(np.mean(np.square(delta))), abs=1e-6)


def test_a_model_against_itself_has_no_divergence():
    """The noise floor of an exact copy is zero, and every top token agrees."""
    got = compare(expert(2), expert(2), tokens_of(expert(2), b"ab ba " * 20, chunk=16)).as_json()
    assert got["kld_max"] < 1e-9
    assert got["same_top"] == 1.0


def test_more_noise_is_farther():
    """A model that is disturbed more has the larger divergence."""
    tokens = tokens_of(expert(3), b"ab ba b a " * 20, chunk=16)
    near, far = (compare(expert(3), expert(3, noise), tokens).as_json()["kld_mean"] for noise in (0.1, 0.8))
    assert 0.0 < near < far


def test_rows_that_are_not_finite_are_counted_and_left_out():
    """NaN in a row is counted; the averages are over the other rows."""
    broken = expert(4)
    evaluate = broken.evaluate

    def with_nan(path, n_rows=1, **more):
        rows = evaluate(path, n_rows, **more).copy()
        rows[0, 0] = np.nan
        return rows

    broken.evaluate = with_nan
    found = compare(expert(4), broken, tokens_of(expert(4), b"ab b a ba " * 20, chunk=16))
    assert found.n_not_finite > 0
    assert np.isfinite(found.as_json()["kld_mean"])


def test_other_vocabularies_are_refused():
    """Models with different vocabularies cannot be compared token by token, and the message says what can be done."""
    with pytest.raises(UsageError, match=r"different vocabularies.*bits per byte"):
        compare(
            expert(5), expert(5, pieces=[b"a", b"b", b"c", b"ba", b" ", b"</s>"]), tokens_of(expert(5), b"ab " * 20, 8)
        )


def test_short_texts_are_refused():
    """Less than one chunk is refused with the number of tokens."""
    with pytest.raises(UsageError, match="a chunk needs 512"):
        tokens_of(expert(6), b"ab ba", chunk=512)


def test_pareto_marks_what_nothing_beats():
    """A level is marked unless another one is at least as small and as close, and better in one of the two."""
    rows = [{"size_bytes": s, "kld_mean": k} for s, k in ((1, 5.0), (2, 3.0), (3, 4.0), (4, 0.0), (4, 0.0))]
    assert pareto(rows) == [True, True, False, True, True]
