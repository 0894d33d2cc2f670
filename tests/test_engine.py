"""The engine on table experts: laws, stand-ins, limits, evidence."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gguf_fusion.bridge.tables import byte_tables
from gguf_fusion.cover.base import Prompt
from gguf_fusion.cover.direct import TokenCursor
from gguf_fusion.cover.tree import CoverTree
from gguf_fusion.engine import Engine, SymbolSpace
from gguf_fusion.errors import ContextOverflowError, ExpertFailedError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.expressions import parse
from gguf_fusion.lanes import LanePlan, Lanes, lane_plan, serial_plan
from gguf_fusion.records import END
from gguf_fusion.sampling import Sampler, SamplingParams
from gguf_fusion.testing import nested_vocabulary
from gguf_fusion.vocabulary import Kind, Vocabulary

NESTED = nested_vocabulary()
SINGLE = Vocabulary.from_pieces(
    [b"a", b"b", b"c", b"ab", b"cc", b"<s>", b"</s>"], [Kind.TEXT] * 5 + [Kind.CONTROL, Kind.END]
)


def letters(seed: int) -> Callable[[bytes], np.ndarray]:
    """A random byte law over a, b, c and END that depends on the last three bytes."""

    def law(text: bytes) -> np.ndarray:
        probs = np.zeros(257)
        rng = np.random.default_rng([seed, zlib.crc32(text[-3:])])
        probs[[*b"abc", END]] = rng.dirichlet([1.0, 1.0, 1.0, 0.05])
        return probs

    return law


def expert(name: str, vocabulary: Vocabulary = NESTED, seed: int = 1, **options: Any) -> TableExpert:
    return TableExpert.from_byte_law(vocabulary, letters(seed), name=name, **options)


def prompt(text: bytes = b"", *ids: int) -> Prompt:
    return Prompt(ids=np.array(ids, np.int32), observed=np.zeros(len(ids), np.bool_), tail=text)


def engine(
    experts: list[TableExpert],
    *,
    weights: list[float] | None = None,
    strategy: str = "linear(w=static)",
    epsilon: float = 0.0,
    plan: LanePlan | None = None,
    token_space: bool = False,
) -> Engine:
    base = np.array(weights or [1.0] * len(experts))
    lanes = Lanes(plan or serial_plan([e.name for e in experts], 1))
    if token_space:
        cursors = [TokenCursor(e) for e in experts]
        space = SymbolSpace(cursors[0].n_symbols, cursors[0].end_symbol, experts[0].vocabulary)
        return Engine(cursors, parse(strategy), base, lanes, space=space)
    trees = [CoverTree(e, byte_tables(e.vocabulary), epsilon=epsilon) for e in experts]
    return Engine(trees, parse(strategy), base, lanes)


def starts(experts: list[TableExpert], text: bytes = b"") -> list[Prompt]:
    """Each prompt begins with the vocabulary's control token."""
    controls = [int(np.flatnonzero(e.vocabulary.kinds == Kind.CONTROL)[0]) for e in experts]
    return [prompt(text, control) for control in controls]


def drawn(machine: Engine, n: int, seed: int = 0) -> list[int]:
    sampler = Sampler(SamplingParams(seed=seed, min_p=0.0, temperature=1.0), machine.space.n_symbols, machine.space.end)
    symbols = []
    for _ in range(n):
        symbols.append(machine.step(sampler).symbol)
        if symbols[-1] == machine.space.end:
            break
    return symbols


def test_self_fusion_across_vocabularies_is_the_law_itself() -> None:
    """Two experts cut from one byte law under two vocabularies fuse to this law."""
    experts = [expert("one"), expert("two", SINGLE)]
    machine = engine(experts, strategy="loglinear(w=static)")
    machine.start(starts(experts))
    text = b""
    for byte in b"abcabcccab":
        seen = machine.observe(byte)
        assert seen.logprob == pytest.approx(np.log(letters(1)(text)[byte]), abs=1e-5)
        text += bytes([byte])


def test_every_law_sums_to_one_with_ghosts() -> None:
    """Stand-ins fill the share of ghosts: each expert's law and the fused law sum to 1 and exclude nothing."""
    experts = [expert("one", seed=1), expert("two", SINGLE, seed=2)]
    machine = engine(experts, epsilon=0.3)
    machine.start(starts(experts))
    for byte in b"abcabcccabbbca":
        fused = machine._fuse()
        np.testing.assert_allclose(machine._probs.sum(axis=1), 1.0, atol=1e-9)
        assert np.exp(fused.log_f).sum() == pytest.approx(1.0, abs=1e-9)
        assert np.isfinite(fused.log_f).all()
        machine.observe(byte)


def test_ghosts_abstain_in_favour_of_the_others() -> None:
    """On its ghosts' share an expert repeats the others' evaluated law, but for a small floor."""
    experts = [expert("one", seed=1), expert("two", SINGLE, seed=2)]
    machine = engine(experts, epsilon=0.4)
    machine.start(starts(experts))
    found = 0
    for byte in b"abcabcccabbbcaabcab":
        for predictor in machine.predictors:
            predictor.prepare()
        partial_laws = [(p.law()[0].copy(), p.law()[1]) for p in machine.predictors]
        machine._fuse()
        for i in (0, 1):
            share, other = partial_laws[i][1], partial_laws[1 - i][0]
            if share > 0.01 and other.sum() > 0.01:
                found += 1
                filled = partial_laws[i][0] + share * other / other.sum()
                assert 0.5 * np.abs(filled - machine._probs[i]).sum() < 2e-3
        machine.observe(byte)
    assert found


def test_alone_the_predictor_names_its_stand_in() -> None:
    """A single expert through the bridge has a full law too."""
    experts = [expert("one")]
    machine = engine(experts, epsilon=0.4)
    machine.start(starts(experts))
    for byte in b"abcabcccab":
        assert np.isfinite(machine.observe(byte).logprob)
        assert machine._probs.sum() == pytest.approx(1.0, abs=1e-9)


def test_order_of_experts_does_not_matter() -> None:
    """Permuting experts and weights permutes nothing but the columns."""
    make = lambda: [expert("one", seed=1), expert("two", SINGLE, seed=2)]  # noqa: E731
    forward, backward = make(), make()[::-1]
    a, b = engine(forward, weights=[0.3, 0.7], epsilon=0.1), engine(backward, weights=[0.7, 0.3], epsilon=0.1)
    a.start(starts(forward))
    b.start(starts(backward))
    for byte in b"abccabcab":
        seen, other = a.observe(byte), b.observe(byte)
        assert seen.logprob == pytest.approx(other.logprob, abs=1e-9)
        np.testing.assert_allclose(seen.expert_logprobs, other.expert_logprobs[::-1], atol=1e-9)


def test_lanes_change_nothing() -> None:
    """Side by side or in turn, the same seed draws the same text."""
    texts = []
    for make in (lambda names: serial_plan(names, 1), lambda names: lane_plan(dict.fromkeys(names, 1.0), 2)):
        experts = [expert("one", seed=1), expert("two", SINGLE, seed=2)]
        machine = engine(experts, epsilon=0.1, plan=make(["one", "two"]))
        machine.start(starts(experts))
        texts.append(drawn(machine, 60))
    assert texts[0] == texts[1]


def test_a_text_does_not_depend_on_earlier_ones() -> None:
    """Starting again forgets the evidence and the text."""
    experts = [expert("one", seed=1), expert("two", SINGLE, seed=2)]
    machine = engine(experts, strategy="loglinear(w=evidence)")
    machine.start(starts(experts, b"abc"))
    first = drawn(machine, 30)
    machine.start(starts(experts, b"ccc"))
    drawn(machine, 30, seed=5)
    machine.start(starts(experts, b"abc"))
    assert drawn(machine, 30) == first
    machine.start(starts(experts, b"abc"), fresh=False)
    assert len(drawn(machine, 30)) == len(first)


def test_prompt_is_evidence() -> None:
    """The expert that foresaw the prompt has more weight at the first step."""
    experts = [expert("right", seed=1), expert("wrong", SINGLE, seed=2)]
    text = b""
    while len(text) < 120:
        text += bytes([int(letters(1)(text)[:END].argmax())])
    machine = engine(experts, strategy="linear(w=evidence)")
    machine.start(starts(experts, text))
    sampler = Sampler(SamplingParams(seed=0), 257, END)
    step = machine.step(sampler)
    assert step.weights[0] > 0.9
    assert step.responsibility.sum() == pytest.approx(1.0)


def test_steps_say_what_happened() -> None:
    """A step carries its bytes, every expert's log-probability and the decodes it took."""
    experts = [expert("one", seed=1), expert("two", SINGLE, seed=2)]
    machine = engine(experts)
    machine.start(starts(experts, b"ab"))
    sampler = Sampler(SamplingParams(temperature=0.0), 257, END)
    step = machine.step(sampler)
    assert step.data == bytes([step.symbol])
    mixture = np.log(np.exp(step.expert_logprobs).mean())
    assert step.logprob == pytest.approx(mixture, abs=1e-9)
    timings = machine.timings()
    assert timings.decodes == step.n_decodes
    assert set(timings.expert_decodes) == {"one", "two"}


def test_token_space_gives_the_models_own_text() -> None:
    """One expert over its own tokens draws what its rows say, and END is one symbol without bytes."""
    experts = [expert("one")]
    machine = engine(experts, token_space=True)
    machine.start(starts(experts))
    path, law = [12], experts[0].probs
    sampler = Sampler(SamplingParams(temperature=0.0), machine.space.n_symbols, machine.space.end)
    for _ in range(15):
        probs = law(tuple(path))
        probs[[12, 13]] = 0.0
        probs[14] += probs[15]
        probs[15] = 0.0
        step = machine.step(sampler)
        assert step.symbol == int(probs.argmax())
        assert step.data == (b"" if step.symbol == 14 else NESTED.piece(step.symbol))
        if step.symbol == 14:
            break
        path.append(step.symbol)


def test_two_experts_of_one_vocabulary_mix_exactly() -> None:
    """In token space the linear pool is the plain mean of the experts' token laws."""
    experts = [expert("one", seed=1), expert("two", seed=2)]
    machine = engine(experts, token_space=True, weights=[0.25, 0.75])
    machine.start(starts(experts))
    path = (12,)
    for _ in range(4):
        laws = [e.probs(path) for e in experts]
        keep = np.isin(np.arange(NESTED.n_vocab), [12, 13], invert=True)
        laws = [law * keep / (law * keep).sum() for law in laws]
        mean = 0.25 * laws[0] + 0.75 * laws[1]
        token = int(mean[:12].argmax())
        assert machine.observe(token).logprob == pytest.approx(np.log(mean[token]), abs=1e-6)
        path = (*path, token)


def test_a_prompt_without_room_names_the_tightest_expert() -> None:
    """Each expert counts by its own tokenizer; the one that lacks most is named with its numbers."""
    experts = [expert("wide", n_ctx=16), expert("tight", SINGLE, seed=2, n_ctx=16)]
    machine = engine(experts)
    with pytest.raises(
        ContextOverflowError, match="'tight' counts 31 prompt tokens, but its context holds 16"
    ) as caught:
        machine.start(starts(experts, b"abca" * 10))
    assert (caught.value.expert, caught.value.n_ctx) == ("tight", 16)


def test_room_shrinks_to_zero() -> None:
    """Room is what the tightest expert can still take."""
    experts = [expert("one", n_ctx=8)]
    machine = engine(experts, token_space=True)
    machine.start(starts(experts))
    assert machine.room == 7
    for _ in range(7):
        machine.observe(0)
    assert machine.room == 0


def test_a_broken_expert_is_named() -> None:
    """NaN from one of several experts stops the step with its name, whatever the lanes."""
    experts = [expert("one", seed=1), expert("two", SINGLE, seed=2)]
    machine = engine(experts, plan=lane_plan({"one": 1.0, "two": 1.0}, 2))
    machine.start(starts(experts))
    machine.observe(ord("a"))
    good = experts[1].evaluate
    experts[1].evaluate = lambda *a, **k: np.full_like(good(*a, **k), np.nan)  # type: ignore[method-assign]
    with pytest.raises(ExpertFailedError, match="'two'"):
        drawn(machine, 20)
    experts[1].evaluate = good  # type: ignore[method-assign]
    machine.start(starts(experts))
    machine.observe(ord("a"))


def test_an_empty_pool_falls_back_to_the_linear_one() -> None:
    """Where the pool leaves no mass at all, the experts' mixture speaks, and it is counted."""
    vocabulary = Vocabulary.from_pieces([b"a", b"b", b"<s>"], [Kind.TEXT, Kind.TEXT, Kind.CONTROL])
    certain = [TableExpert(vocabulary, lambda path, i=i: np.eye(3)[i], name=f"sure of {i}") for i in (0, 1)]
    machine = engine(certain, token_space=True, strategy="loglinear(w=static)")
    machine.start([prompt(b"", 2), prompt(b"", 2)])
    step = machine.step(Sampler(SamplingParams(seed=1), 3, None))
    assert step.logprob == pytest.approx(np.log(0.5))
    assert machine.n_empty_pools == 1
