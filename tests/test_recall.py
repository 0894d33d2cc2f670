"""Reading on: the next prompt costs what is new, and the weights know what they would know after reading all again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from gguf_fusion.arrays import F64
from gguf_fusion.chat import NO_TEMPLATE
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.vocabulary import Kind, Vocabulary

TURNS = "{% for m in messages %}<u>{{ m.content }}<a>{% endfor %}"


def vocabulary(*words: str) -> Vocabulary:
    """Single bytes, words, two control tokens, END."""
    extra = [word.encode() for word in words]
    kinds = [Kind.TEXT] * (256 + len(extra)) + [Kind.CONTROL] * 2 + [Kind.END]
    return Vocabulary.from_pieces([bytes([b]) for b in range(256)] + extra + [b"<u>", b"<a>", b"</s>"], kinds)


def letters(seed: int) -> Callable[[bytes], F64]:
    """A random law of the next letter, given the last three bytes."""

    def law(text: bytes) -> F64:
        probs = np.full(257, 1e-5)
        probs[[*b"abc ", 256]] = np.random.default_rng([seed, zlib.crc32(text[-3:])]).dirichlet([1, 1, 1, 1, 0.01])
        return probs / probs.sum()

    return law


class Counting(TableExpert):
    """Remembers which rows it was asked for."""

    asked: list[tuple[int, int]]

    def evaluate(self, path, n_rows=1, *, branch=False, progress=None):  # type: ignore[no-untyped-def]
        self.__dict__.setdefault("asked", []).append((len(path), n_rows))
        return super().evaluate(path, n_rows, branch=branch, progress=progress)


def pair(templates: Sequence[str] = (TURNS, NO_TEMPLATE), *, same: bool = False, prompt_cache: int = 0) -> Ensemble:
    """Two experts of different vocabularies (or one and the same)."""
    first, second = vocabulary("ab", "ca", "a b"), vocabulary("bc", "ab ", "c")
    experts = [
        Counting.from_byte_law(first, letters(1), name="one"),
        Counting.from_byte_law(first if same else second, letters(2), name="two"),
    ]
    strategy = "linear(w=evidence(eta=0.1, gamma=0.99))"
    return Ensemble.from_experts(experts, templates=templates, strategy=strategy, prompt_cache=prompt_cache)


def text_of(ensemble: Ensemble, messages: list[dict[str, str]], max_bytes: int = 30) -> str:
    return "".join(step.text for step in ensemble.generate(messages, reuse=True, seed=3, max_bytes=max_bytes))


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("templates", [(TURNS, NO_TEMPLATE), (TURNS, TURNS)])
def test_a_text_read_on_is_the_text_read_afresh(templates: tuple[str, str], same: bool) -> None:
    """Turn after turn, regenerated and shortened, laws and weights are those of an ensemble that reads all again."""
    reply = b"ab ca b"
    messages = said("ab ca")
    with pair(templates, same=same) as reading, pair(templates, same=same) as afresh:
        for new in ("abc", "a b c a" * 60, None, "ca", None, "b"):
            on = list(reading.generate(messages, reuse=True, given=reply, max_bytes=0))
            again = list(afresh.generate(messages, given=reply, max_bytes=0))
            for step, other in zip(on, again, strict=True):
                assert step.expert_logprobs == pytest.approx(other.expert_logprobs)
                # The bytes of a reply count as they were foreseen then: as bytes, not as an even share of tokens.
                assert step.weights == pytest.approx(other.weights, abs=0.05)
            messages = messages[:-2] or said("c") if new is None else [*messages, *said("", reply.decode(), new)[1:]]


def test_the_next_turn_decodes_its_new_tokens_only() -> None:
    """Counted: of a long conversation a second turn decodes the question, and the reply where its tokens changed."""
    with pair() as ensemble:
        first = said("ab ca bc ab a b c ca ab" * 40)
        answer = "".join(s.text for s in ensemble.generate(first, reuse=True, seed=3, max_bytes=30))
        before = [(e.n_decoded, len(e.asked)) for e in ensemble.experts]  # type: ignore[attr-defined]
        next(ensemble.generate([*first, *said("", answer, "ab c")[1:]], reuse=True, seed=3))
        for expert, (n_decoded, n_asked) in zip(ensemble.experts, before, strict=True):
            new = len(expert.tokenize(answer.encode() + b"\n\nUser: ab c\n\nAssistant:\n"))
            assert expert.n_decoded - n_decoded <= new + 4
            assert sum(n_rows for _, n_rows in expert.asked[n_asked:]) <= new + 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_conversations_in_turn(kept: int) -> None:
    """With a cache every conversation reads its new tokens only, and says what it says without one."""
    topics = ["ab ca bc ab a b c ca ab" * 40, "ca ca b a bc" * 60, "b a" * 90]
    with pair() as alone:
        expected = [text_of(alone, said(topic)) for topic in topics]
    with pair(prompt_cache=kept) as ensemble:
        answers = [text_of(ensemble, said(topic)) for topic in topics]
        assert answers == expected
        for topic, answer in zip(topics, answers, strict=True):
            before = [(e.n_decoded, len(e.asked)) for e in ensemble.experts]  # type: ignore[attr-defined]
            text_of(ensemble, [*said(topic), *said("", answer, "ab c")[1:]], max_bytes=0)
            for expert, (n_decoded, n_asked) in zip(ensemble.experts, before, strict=True):
                new = len(expert.tokenize(answer.encode() + b"\n\nUser: ab c\n\nAssistant:\n")) + 4
                rows = sum(n_rows for _, n_rows in expert.asked[n_asked:])  # type: ignore[attr-defined]
                assert (expert.n_decoded - n_decoded <= new) is bool(kept)
                assert rows <= new


def test_a_text_read_afresh_leaves_no_trace() -> None:
    """Bytes written by a text that is not remembered are never taken for those of one that is."""
    with pair((NO_TEMPLATE, NO_TEMPLATE)) as ensemble, pair((NO_TEMPLATE, NO_TEMPLATE)) as afresh:
        list(ensemble.generate("ab ca", reuse=True, given=b"ca b", max_bytes=0))
        list(ensemble.generate("b", given=b"abc abc abc", max_bytes=0))
        on = list(ensemble.generate("abc abc abc", reuse=True, given=b"ab", max_bytes=0))
        again = list(afresh.generate("abc abc abc", given=b"ab", max_bytes=0))
        for step, other in zip(on, again, strict=True):
            assert step.weights == pytest.approx(other.weights)


@pytest.mark.model
def test_the_next_turn_of_real_experts() -> None:
    """Counted on pocket: the second turn decodes its new tokens, and a few where the reply ended."""
    with Ensemble.from_registry("pocket", offline=True, lanes="serial", n_threads=1) as ensemble:
        first = said("Name the capital of France, and say one sentence about it. " * 4)
        answer = "".join(s.text for s in ensemble.generate(first, reuse=True, temperature=0.0, max_bytes=60))
        before = [e.n_decoded for e in ensemble.experts]
        second = ensemble.generate([*first, *said("", answer, "And of Spain?")[1:]], reuse=True, temperature=0.0)
        next(second)
        for expert, n in zip(ensemble.experts, before, strict=True):
            new = len(expert.tokenize(b"And of Spain?")) + 16  # scaffolding, and the open end of the reply
            assert expert.n_decoded - n <= new < second.usage.prompt_tokens[expert.name] / 2
