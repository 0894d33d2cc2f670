"""Quality of a quantized model: the numbers of a plain computation, streamed; vocabularies must agree."""

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

from gguf_fusion import hub
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.measure.making import made
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


def test_a_row_without_figures_is_beaten_by_all():
    """A model whose rows are not finite is on no front."""
    rows = [{"size_bytes": 1, "kld_mean": None}, {"size_bytes": 2, "kld_mean": 0.1}]
    assert pareto(rows) == [False, True]


def plain_rows(file, chunk):
    """float64[n, n_vocab]: log-probabilities after each token, straight from the binding, all tokens in one batch.

    One token at a time would be another kernel of the native library, whose rounding differs by more than 1e-3.
    """
    settings = lib.llama_model_default_params()
    settings.use_extra_bufts = False
    model = lib.llama_model_load_from_file(str(file).encode(), settings)
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = settings.n_outputs_max = 256
    settings.n_threads = settings.n_threads_batch = 1
    settings.flash_attn_type = 0
    context = lib.llama_init_from_model(model, settings)
    batch = lib.llama_batch_init(len(chunk), 0, 1)
    batch.n_tokens = len(chunk)
    for i, token in enumerate(chunk):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    assert lib.llama_decode(context, batch) == 0
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(chunk), n_vocab)).astype(np.float64)
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return np.array([log_softmax(row - row.max()) for row in rows])


def check_against_plain_rows(base_file, other_file, text, chunk):
    """Compare two files, and check every figure against loops over rows that come straight from the binding."""
    with (
        LlamaExpert.load(base_file, n_ctx=256, n_threads=1) as base,
        LlamaExpert.load(other_file, n_ctx=256, n_threads=1) as other,
    ):
        tokens = tokens_of(base, text, chunk)
        got = compare(base, other, tokens).as_json()
    kld, nll, delta, n_bytes = [], [], [], 0
    for ids in tokens.chunks:
        p, q = plain_rows(base_file, ids), plain_rows(other_file, ids)
        for i in range(len(ids) // 2, len(ids) - 1):
            came = ids[i + 1]
            kld.append(float((np.exp(p[i]) * (p[i] - q[i])).sum()))
            nll.append(-q[i, came])
            delta.append(np.exp(q[i, came]) - np.exp(p[i, came]))
            n_bytes += int(tokens.n_bytes[came])
    assert got["tokens"] == len(kld) > 50
    assert got["kld_mean"] == pytest.approx(np.mean(kld), abs=1e-3)
    assert got["kld_median"] == pytest.approx(np.median(kld), abs=1e-3)
    assert np.log(got["ppl"]) == pytest.approx(np.mean(nll), abs=1e-3)
    assert got["bpb"] == pytest.approx(np.sum(nll) / np.log(2) / n_bytes, abs=1e-3)
    assert got["delta_p_rms"] == pytest.approx(np.sqrt(np.mean(np.square(delta))), abs=1e-3)
    return got


def test_figures_agree_with_an_independent_computation(tiny_model, same_process):
    """On a tiny model and its level Q4_0: KL divergence, perplexity and bits per byte to 1e-3."""
    reference = tiny_model()
    level, _ = made(reference, "Q4_0", requantize=False, n_threads=1, tell=lambda text: None)
    got = check_against_plain_rows(reference, level, b"what the others thought of that. " * 8, 64)
    assert got["kld_mean"] > 0.005


@pytest.mark.model
def test_figures_of_a_real_model_agree_too():
    """The same on SmolLM2 and a level made from it."""
    reference = hub.locate("smollm2-135m-instruct")
    level, _ = made(reference, "Q8_0", requantize=True, n_threads=1, tell=lambda text: None)
    text = b"The kettle boiled over while nobody was looking; cups of tea went cold on the table by the window. " * 8
    check_against_plain_rows(reference, level, text, 64)
