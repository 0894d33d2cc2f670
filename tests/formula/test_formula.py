"""Formulae: what is printed is what is read, every node is a law, and step by step equals whole texts at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_fusion.errors import StrategyError
from gguf_fusion.expressions import parse
from gguf_fusion.formula.features import FEATURES, Steps
from gguf_fusion.formula.fuser import parse_formula
from gguf_fusion.formula.nodes import Memory

NAMES = ("coder", "chat", "a b.gguf")
S = 17
EXAMPLES = [
    'formula("coder")',
    'formula(linear(0.7*"coder", 0.3*"chat"))',
    'formula(geometric(eta=0.1, gamma=0.99, 1*"coder", 2*"chat", 1*"a b.gguf"))',
    'formula(power(r=-0.5, eta=1, gamma=1, 0.2*"coder", 0.8*temper(1.2, "chat")))',
    'formula(gate(inside_word<0.5, "coder", min("chat", max("coder", "a b.gguf"))))',
    'formula(linear(eta=0.5, gamma=0.9, 1*geometric(0.5*"coder", 0.5*"chat"), 1*gate(entropy<1.5, "coder", "chat")))',
    "formula(fuse(linear(w=evidence(eta=1, gamma=1))))",
    'formula(linear(0.5*fuse(loglinear(w=evidence(eta=0.1, gamma=0.99))), 0.5*"chat"))',
]


def some_text(n=40, seed=0):
    rng = np.random.default_rng(seed)
    laws = np.log(rng.dirichlet(np.full(S, 0.3), (n, len(NAMES))))
    return laws, rng.integers(0, S - 1, n)


def at_once(formula, laws, came):
    before = np.concatenate([[S - 1], came[:-1]])
    memory = Memory(formula.root, NAMES, np.ones(len(NAMES)), S)
    return formula.root.law(Steps(laws, before, came), memory)


@pytest.mark.parametrize("text", EXAMPLES)
def test_printed_is_read(text):
    """A formula prints as the text it was read from."""
    assert str(parse_formula(text, parse)) == text


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_law_sums_to_one(text):
    """Every step of every formula is a law over all symbols."""
    laws, came = some_text()
    law = at_once(parse_formula(text, parse), laws, came)
    assert law.shape == (40, S)
    np.testing.assert_allclose(np.exp(law).sum(axis=1), 1.0, atol=1e-9)


@pytest.mark.parametrize("text", EXAMPLES)
def test_step_by_step_equals_at_once(text):
    """Reading symbol by symbol gives what reading the whole text gives."""
    formula = parse_formula(text, parse)
    laws, came = some_text()
    fuser = formula.bind(len(NAMES), S, np.ones(len(NAMES)), NAMES)
    steps = []
    for step, symbol in zip(laws, came, strict=True):
        steps.append(fuser.fuse(step).log_f)
        fuser.advance(int(symbol), step, generated=False)
    np.testing.assert_allclose(np.array(steps), at_once(formula, laws, came), atol=1e-9)


@pytest.mark.parametrize("text", EXAMPLES)
def test_snapshot_restores(text):
    """After a restored snapshot the laws are the same as before."""
    fuser = parse_formula(text, parse).bind(len(NAMES), S, np.ones(len(NAMES)), NAMES)
    laws, came = some_text()
    for step, symbol in zip(laws[:10], came[:10], strict=True):
        fuser.fuse(step)
        fuser.advance(int(symbol), step, generated=False)
    kept = fuser.snapshot()
    wanted = fuser.fuse(laws[10]).log_f.copy()
    for step, symbol in zip(laws[10:20], came[10:20], strict=True):
        fuser.fuse(step)
        fuser.advance(int(symbol), step, generated=False)
    fuser.restore(kept)
    np.testing.assert_array_equal(fuser.fuse(laws[10]).log_f, wanted)


def test_generated_symbols_are_no_evidence():
    """Only given text moves the weights."""
    formula = parse_formula('formula(linear(eta=1, gamma=1, 1*"coder", 1*"chat"))', parse)
    laws, came = some_text()
    fuser = formula.bind(len(NAMES), S, np.ones(len(NAMES)), NAMES)
    fresh = fuser.fuse(laws[0]).log_f.copy()
    fuser.advance(int(came[0]), laws[0], generated=True)
    np.testing.assert_array_equal(fuser.fuse(laws[0]).log_f, fresh)


def test_pools_agree_with_the_registry():
    """A pool with evidence is the registered strategy of the same parameters."""
    laws, came = some_text()
    equal = '1*"coder", 1*"chat", 1*"a b.gguf"'
    pairs = [
        (f"formula(geometric(eta=0.1, gamma=0.99, {equal}))", "loglinear(w=evidence(eta=0.1, gamma=0.99))"),
        (f"formula(linear(eta=1, gamma=1, {equal}))", "linear(w=evidence(eta=1, gamma=1))"),
        (f"formula(power(r=-1, {equal}))", "power(r=-1, w=static)"),
    ]
    for mine, theirs in pairs:
        a = at_once(parse_formula(mine, parse), laws, came)
        b = at_once(parse_formula(f"formula(fuse({theirs}))", parse), laws, came)
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_prompt_bytes_are_evidence():
    """Probabilities of a prompt's bytes move the weights as the bytes themselves would."""
    formula = parse_formula('formula(linear(eta=1, gamma=1, 1*"coder", 1*"chat"))', parse)
    laws, came = some_text()
    one, two = (formula.bind(len(NAMES), S, np.ones(len(NAMES)), NAMES) for _ in range(2))
    one.observe_prompt(laws[np.arange(20), :, came[:20]].T)
    for step, symbol in zip(laws[:20], came[:20], strict=True):
        two.fuse(step)
        two.advance(int(symbol), step, generated=False)
    np.testing.assert_allclose(one.fuse(laws[20]).log_f, two.fuse(laws[20]).log_f, atol=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("formula(", "it ends early"),
        ('formula("coder"', "it ends early"),
        ('formula(lin("coder"))', "unknown operator 'lin'"),
        ('formula(linear("coder"))', "expected a number"),
        ('formula(linear(0*"coder"))', "positive sum"),
        ('formula(power(1*"coder"))', "r=… is missing"),
        ('formula(linear(q=1, 1*"coder"))', "has no 'q'"),
        ('formula(gate(mood<1, "coder", "chat"))', "unknown feature 'mood'"),
        ('formula(gate(entropy<1, "coder"))', "expected 2 parts, got 1"),
        ('formula("coder") more', "expected the end"),
        ("formula(fuse(nonsense))", "unknown strategy"),
    ],
)
def test_bad_formulae_say_where(text, message):
    """What cannot be read is named."""
    with pytest.raises(StrategyError, match=message.replace("(", r"\(")):
        parse_formula(text, parse)


def test_unknown_expert_is_named():
    """A formula with an expert that is not loaded says which are."""
    formula = parse_formula('formula("poet")', parse)
    with pytest.raises(StrategyError, match="no expert with a weight is called 'poet' here; the experts are coder"):
        formula.bind(len(NAMES), S, np.ones(len(NAMES)), NAMES)


@given(st.integers(0, 2**31), st.sampled_from(sorted(FEATURES)))
@settings(max_examples=30, deadline=None)
def test_features_are_finite(seed, name):
    """Features are numbers even where experts rule symbols out."""
    laws, came = some_text(5, seed)
    laws[0, 0, 1:] = -np.inf
    laws[0, 0, 0] = 0.0
    values = FEATURES[name](Steps(laws, came, came))
    assert np.isfinite(values).all()
    assert values.shape == (5,)
