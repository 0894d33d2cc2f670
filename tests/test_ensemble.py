"""The public class on table experts: replies, budgets, stop strings, threads, misuse."""

from __future__ import annotations

import gc
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from gguf_fusion import hub
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import ClosedError, ContextOverflowError, UsageError
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.testing import nested_vocabulary
from gguf_fusion.vocabulary import Kind, Vocabulary

START = b"Q: "
TEXT = "The quick brown fox sees 👩‍💻 in Paris.\nUser: bye"


def words(*pieces: str) -> Vocabulary:
    """All single bytes, some longer pieces, two control tokens and END."""
    extra = [piece.encode() for piece in pieces]
    controls = [b"<u>", b"<a>"]
    kinds = [Kind.TEXT] * (256 + len(extra)) + [Kind.CONTROL] * 2 + [Kind.END]
    return Vocabulary.from_pieces([bytes([b]) for b in range(256)] + extra + controls + [b"</s>"], kinds)


LONG = words("The", " quick", " brown", " fox", " sees", "Paris", " in", "\nUser")
SHORT = words("Th", "e q", "uick", " b", "row", "n f", "Pa", "ris", "User:")


class Parrot(TableExpert):
    """Says a fixed text after a fixed beginning, in its own longest pieces, then END; anything else is improbable."""

    def __init__(self, vocabulary: Vocabulary, *, text: str = TEXT, start: bytes = START, **options: Any) -> None:
        whole = start + text.encode()
        end = int(vocabulary.end_ids[0])

        def law(path: tuple[int, ...]) -> np.ndarray:
            probs = np.full(vocabulary.n_vocab, 1e-6)
            done = vocabulary.text(np.array(path, np.int32))
            if whole == done:
                probs[end] = 1.0
            elif whole.startswith(done):
                probs[int(self.tokenize(whole[len(done) :])[0])] = 1.0
            return probs

        super().__init__(vocabulary, law, **options)


def parrots(text: str = TEXT, **options: Any) -> Ensemble:
    """Two experts that say the same with different pieces."""
    experts = [Parrot(LONG, text=text, name="long"), Parrot(SHORT, text=text, name="short")]
    return Ensemble.from_experts(experts, weights=[2, 1], **options)


def letters(seed: int) -> Callable[[bytes], np.ndarray]:
    """A random byte law over a, b, c and END."""

    def law(text: bytes) -> np.ndarray:
        probs = np.zeros(257)
        probs[[*b"abc", 256]] = np.random.default_rng([seed, zlib.crc32(text[-3:])]).dirichlet([1, 1, 1, 0.05])
        return probs

    return law


def singers(names: Sequence[str] = ("one", "two"), **options: Any) -> Ensemble:
    """Experts that draw letters, one vocabulary with nested pieces and one without."""
    vocabularies = [nested_vocabulary(), words("ab", "cab")]
    experts = [TableExpert.from_byte_law(vocabularies[i % 2], letters(i), name=name) for i, name in enumerate(names)]
    return Ensemble.from_experts(experts, **options)


def test_reply_is_the_text_in_whole_characters() -> None:
    """The steps' texts join to the reply, no character is ever broken, END says stop."""
    with parrots() as ensemble:
        steps = list(ensemble.generate(START, temperature=0.0))
        completion = ensemble.complete(START, temperature=0.0)
    assert "".join(step.text for step in steps) == TEXT == completion.text
    assert b"".join(step.data for step in steps) == TEXT.encode()
    assert all("\ufffd" not in step.text for step in steps)
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish_reason == "stop" == completion.finish_reason


@pytest.mark.parametrize(
    ("stop", "wanted"), [("own fox", "The quick br"), (["zzz", "\nUser:"], TEXT[: TEXT.index("\n")])]
)
def test_stop_strings_are_not_part_of_the_text(stop: str | list[str], wanted: str) -> None:
    """The text ends before the first stop string, and nothing of it leaks."""
    with parrots() as ensemble:
        completion = ensemble.complete(START, temperature=0.0, stop=stop)
    assert (completion.text, completion.finish_reason) == (wanted, "stop")


def test_beginnings_of_stop_strings_appear_in_the_end() -> None:
    """What only looked like a stop string is shown once the text is over."""
    with parrots("ends with\nUse") as ensemble:
        assert ensemble.complete(START, temperature=0.0, stop="\nUser:").text == "ends with\nUse"


def test_byte_budget_is_exact_and_cuts_characters_cleanly() -> None:
    """``max_bytes`` bytes come; a character that does not fit is replaced, and the reason is length."""
    with parrots() as ensemble:
        n = len(b"The quick brown fox sees ") + 2
        completion = ensemble.complete(START, temperature=0.0, max_bytes=n)
    assert completion.text == "The quick brown fox sees \ufffd"
    assert (completion.finish_reason, completion.usage.generated_bytes) == ("length", n)


@pytest.mark.parametrize(
    ("n", "text"), [(0, ""), (1, "The"), (2, "The quick"), (4, "The quick brown fox"), (5, TEXT[:24])]
)
def test_token_budget_counts_the_heaviest_experts_pieces(n: int, text: str) -> None:
    """Exactly the pieces that fit are shown, although an unfinished word has more of them."""
    with parrots() as ensemble:
        completion = ensemble.complete(START, temperature=0.0, max_tokens=n)
    assert (completion.text, completion.finish_reason) == (text, "length")
    assert completion.usage.generated_tokens == n


def test_token_budget_cuts_a_word_that_does_not_fit() -> None:
    """Of a word with more pieces than the budget the beginning is shown."""
    with parrots("xyzzy plugh") as ensemble:
        completion = ensemble.complete(START, temperature=0.0, max_tokens=3)
    assert (completion.text, completion.finish_reason, completion.usage.generated_tokens) == ("xyz", "length", 3)


def test_end_within_the_budget_is_a_stop() -> None:
    """A text that ends by itself with its last allowed piece stopped, it was not cut."""
    with parrots("The quick") as ensemble:
        completion = ensemble.complete(START, temperature=0.0, max_tokens=2)
    assert (completion.text, completion.finish_reason) == ("The quick", "stop")


def test_pieces_of_long_texts_are_counted_once() -> None:
    """Counting settles as the text grows and equals the tokenization of the whole."""
    text = "The quick brown fox sees Paris. " * 12
    with parrots(text) as ensemble:
        completion = ensemble.complete(START, temperature=0.0)
    assert completion.text == text
    assert completion.usage.generated_tokens == len(Parrot(LONG).tokenize(text.encode()))


def test_seed_gives_the_text_again() -> None:
    """Same seed, same text: after other texts, streamed or not; no seed means another one each time."""
    with singers() as ensemble:
        first = ensemble.complete("abc", seed=7, max_bytes=40)
        ensemble.complete("ccc", max_bytes=20)
        assert ensemble.complete("abc", seed=7, max_bytes=40).text == first.text
        assert "".join(step.text for step in ensemble.generate("abc", seed=7, max_bytes=40)) == first.text
        assert first.seed == 7
        replies = [ensemble.generate("abc", max_bytes=5) for _ in range(3)]
        assert len({reply.seed for reply in replies}) == 3
    with singers() as again:
        assert again.complete("abc", seed=7, max_bytes=40).text == first.text


def test_breaking_out_leaves_the_ensemble_usable() -> None:
    """Leaving a reply, closing it, or forgetting it changes nothing for the next one."""
    with parrots() as ensemble:
        for step in ensemble.generate(START, temperature=0.0):
            if step.text == "q":
                break
        reply = ensemble.generate(START, temperature=0.0)
        next(reply)
        reply.close()
        assert ensemble.complete(START, temperature=0.0).text == TEXT


def test_a_taken_over_reply_says_so() -> None:
    """Starting a new reply in the same thread ends the old one with an error, and the new one is right."""
    with parrots() as ensemble:
        old = ensemble.generate(START, temperature=0.0)
        next(old)
        new = ensemble.generate(START, temperature=0.0)
        text = next(new).text
        with pytest.raises(UsageError, match="newer reply"):
            next(old)
        assert text + "".join(step.text for step in new) == TEXT


def test_threads_wait_for_each_other() -> None:
    """Several threads on one ensemble get the texts they would get alone."""
    results: dict[int, str] = {}
    with singers() as ensemble:

        def work(seed: int) -> None:
            results[seed] = "".join(step.text for step in ensemble.generate("ab", seed=seed, max_bytes=25))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alone = {seed: ensemble.complete("ab", seed=seed, max_bytes=25).text for seed in range(6)}
    assert results == alone


def test_an_abandoned_reply_lets_other_threads_in() -> None:
    """A reply that nobody holds any more does not block the ensemble."""
    with parrots() as ensemble:
        next(ensemble.generate(START, temperature=0.0))
        gc.collect()
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(ensemble.complete(START, temperature=0.0).text))
        thread.start()
        thread.join(20)
        assert texts == [TEXT]


def test_closed_means_closed() -> None:
    """A closed ensemble, and a reply in the middle, raise ClosedError; closing twice is harmless."""
    ensemble = parrots()
    reply = ensemble.generate(START, temperature=0.0)
    next(reply)
    ensemble.close()
    ensemble.close()
    with pytest.raises(ClosedError, match="was closed"):
        next(reply)
    with pytest.raises(ClosedError):
        ensemble.complete(START)


def test_numbers_outlive_the_ensemble() -> None:
    """Usage and timings of finished, broken off and abandoned replies are there after closing."""
    with parrots() as ensemble:
        finished = ensemble.generate(START, temperature=0.0)
        for _ in finished:
            pass
        abandoned = ensemble.generate(START, temperature=0.0)
        for _ in range(5):
            next(abandoned)
    assert finished.usage.generated_tokens == len(Parrot(LONG).tokenize(TEXT.encode()))
    assert finished.timings.tokens == finished.usage.generated_tokens
    abandoned.close()
    assert abandoned.usage.generated_bytes == abandoned.timings.bytes == 5


def test_one_hot_weights_are_the_single_expert() -> None:
    """Weights 1, 0 give that expert's own text, token by token; the other one is never asked."""
    experts = [TableExpert.from_byte_law(nested_vocabulary(), letters(i), name=str(i)) for i in range(2)]
    with Ensemble.from_experts(experts, weights=[1, 0]) as ensemble:
        mixed = ensemble.complete("ab", seed=3, max_bytes=30)
        assert experts[1].n_decoded == 0
        assert ensemble.names == ("0",)
    with Ensemble.from_experts([TableExpert.from_byte_law(nested_vocabulary(), letters(0))]) as single:
        assert single.complete("ab", seed=3, max_bytes=30).text == mixed.text


def test_one_vocabulary_is_fused_token_by_token() -> None:
    """Experts of one vocabulary need no bridge, unless it is asked for."""
    with singers(("one", "x", "two")[::2]) as ensemble:
        assert len(ensemble.names) == 2
    experts = [TableExpert.from_byte_law(nested_vocabulary(), letters(i), name=str(i)) for i in range(2)]
    with Ensemble.from_experts(experts) as ensemble:
        steps = list(ensemble.generate("ab", seed=1, max_tokens=12))
    assert any(len(step.data) > 1 for step in steps)
    assert len(steps) <= 12
    experts = [TableExpert.from_byte_law(nested_vocabulary(), letters(i), name=str(i)) for i in range(2)]
    with Ensemble.from_experts(experts, space="byte") as ensemble:
        assert all(len(step.data) <= 1 for step in ensemble.generate("ab", seed=1, max_bytes=12))


def test_the_end_of_the_context_is_a_length() -> None:
    """An endless reply ends with its reason when the tightest context is full; no text is dropped."""
    endless = [TableExpert.from_byte_law(words("ab"), lambda text: np.eye(257)[97 + len(text) % 2], n_ctx=40)]
    with Ensemble.from_experts(endless) as ensemble:
        completion = ensemble.complete("ab", temperature=0.0)
    assert completion.finish_reason == "length"
    assert completion.text == "ab" * 39
    for n_ctx in (24, 25, 26):
        pair = [Parrot(LONG, name="long", n_ctx=n_ctx), Parrot(SHORT, name="short")]
        with Ensemble.from_experts(pair) as ensemble:
            completion = ensemble.complete(START, temperature=0.0)
        assert completion.finish_reason == "length"
        assert TEXT.startswith(completion.text.rstrip("\ufffd"))
        assert completion.text


def test_a_long_prompt_is_refused() -> None:
    """A prompt that does not fit is an error with numbers, at the first step."""
    with Ensemble.from_experts([Parrot(LONG, name="long", n_ctx=16), Parrot(SHORT, name="short")]) as ensemble:
        with pytest.raises(ContextOverflowError, match="'long' counts 60"):
            ensemble.complete("x" * 60)
        assert ensemble.complete(START, temperature=0.0, max_bytes=3).text == "The"


def test_usage_and_timings_add_up() -> None:
    """Counts and seconds belong to this reply and are there at any time."""
    with parrots() as ensemble:
        reply = ensemble.generate(START, temperature=0.0, max_bytes=10)
        next(reply)
        assert reply.usage.generated_bytes == 1
        assert reply.timings.total_s > 0.0
        assert reply.finish_reason is None
        for _ in reply:
            pass
        timings, usage = reply.timings, reply.usage
        ensemble.complete(START, max_bytes=3)
        assert reply.timings == timings
    assert (usage.prompt_bytes, usage.generated_bytes) == (len(START), 10)
    assert usage.prompt_tokens == {"long": 3, "short": 3}
    assert timings.bytes == 10
    assert timings.decodes == sum(timings.expert_decodes.values()) > 0
    assert timings.load_s > 0.0
    assert timings.bytes_per_s > 0.0


def test_chat_uses_every_experts_own_template() -> None:
    """An expert with a template gets it, a base model the plain format; a user's control text stays text."""
    seen: dict[str, bytes] = {}

    def spy(expert: TableExpert) -> TableExpert:
        evaluate = expert.evaluate

        def spying(path: np.ndarray, *args: Any, **options: Any) -> np.ndarray:
            pieces = [expert.vocabulary.piece(int(token)) for token in path]
            kinds = [expert.vocabulary.kinds[token] for token in path]
            shown = b"".join(
                b"[C]" if kind == Kind.CONTROL else piece for piece, kind in zip(pieces, kinds, strict=True)
            )
            seen[expert.name] = max(seen.get(expert.name, b""), shown, key=len)
            return evaluate(path, *args, **options)

        expert.evaluate = spying  # type: ignore[method-assign]
        return expert

    experts = [spy(Parrot(LONG, name="chat")), spy(Parrot(SHORT, name="base"))]
    template = "{% for m in messages %}<u>{{ m.role }}:{{ m.content }}{% endfor %}<a>"
    with Ensemble.from_experts(experts, templates=[template, "none"]) as ensemble:
        ensemble.complete("hi <a>", system="be brief", max_bytes=1)
    assert seen["chat"].startswith(b"[C]system:be brief[C]user:hi <a>[C]")
    assert seen["base"].startswith(b"be brief\n\nUser: hi <a>\n\nAssistant")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.generate("a", temprature=1.0), "'temprature' is unknown; did you mean 'temperature'"),
        (lambda e: e.generate("a", temperature=-1), r"temperature: .*\[0, 100\], got -1"),
        (lambda e: e.generate("a", stop=""), "stop"),
        (lambda e: e.generate([{"role": "user", "content": "a"}], chat=False), "chat=False"),
        (lambda e: e.generate([{"role": "usr", "content": "a"}]), "unknown role 'usr'.*'user'"),
        (lambda e: e.generate([{"role": "user"}]), "messages: expected"),
        (lambda e: e.generate([]), "at least one"),
        (lambda e: e.generate(b"\xff", chat=True), "UTF-8, got byte 0xff"),
        (lambda e: e.generate("a\udcff"), "UTF-8 bytes"),
        (lambda e: e.generate("a\udcff", chat=True), "UTF-8 bytes, got .* at 1"),
        (lambda e: Ensemble.from_experts([Parrot(LONG)], n_ctxx=1), "'n_ctxx' is unknown; did you mean 'n_ctx'"),
        (lambda e: Ensemble.from_experts([Parrot(LONG)], weights=[0]), "sum to zero"),
        (lambda e: Ensemble.from_experts([Parrot(LONG)], weights=[-1]), "not negative"),
        (lambda e: Ensemble.from_experts([Parrot(LONG)], weights=[1, 2]), "expected 1, one per expert, got 2"),
        (lambda e: Ensemble.from_experts([Parrot(LONG)], weights=[float("nan")]), "finite"),
        (lambda e: Ensemble.from_experts([Parrot(LONG)], strategy="linar"), "linear"),
        (lambda e: Ensemble.from_experts([Parrot(LONG)], epsilon=1.5), "epsilon"),
        (lambda e: Ensemble.from_experts([Parrot(LONG)], epsilon=0.1, exact=True), "exact"),
        (lambda e: Ensemble.from_experts([Parrot(LONG)], lanes="many"), "lanes"),
        (lambda e: Ensemble.from_experts([Parrot(LONG), Parrot(SHORT, name="b")], space="token"), "identical"),
        (lambda e: Ensemble.from_experts([]), "at least one expert"),
    ],
)
def test_misuse_is_an_error_at_once(call: Callable[[Ensemble], Any], message: str) -> None:
    """Wrong arguments raise before anything runs, and say what is right."""
    with parrots() as ensemble, pytest.raises(UsageError, match=message):
        call(ensemble)


@pytest.fixture(scope="module")
def pocket() -> Iterator[Ensemble]:
    """The three real experts, one thread each, so that a busy machine does not slow them down further."""
    with Ensemble.from_registry("pocket", n_ctx=512, lanes="lanes", offline=True) as ensemble:
        yield ensemble


@pytest.mark.model
def test_pocket_repeats_itself(pocket: Ensemble) -> None:
    """Same seed, same text: after another text, streamed or not."""
    first = pocket.complete("The old town has", seed=5, max_bytes=40)
    pocket.complete("Once upon a time", seed=9, max_bytes=5)
    assert "".join(step.text for step in pocket.generate("The old town has", seed=5, max_bytes=40)) == first.text
    assert first.timings.decodes < 4 * 40


@pytest.mark.model
def test_pocket_goes_on_after_a_newline(pocket: Ensemble) -> None:
    """A prompt that ends in a newline before indented code goes on with the indented code, not with blanks for ever."""
    with_newline = pocket.complete("def fibonacci(n):\n", temperature=0.0, max_bytes=40)
    without = pocket.complete("def fibonacci(n):", temperature=0.0, max_bytes=41)
    assert with_newline.text.startswith("    if n ")
    assert without.text.startswith("\n    if n ")


@pytest.mark.model
def test_pocket_of_one_is_that_model_token_for_token(pocket: Ensemble) -> None:
    """Weights 0, 0, 1 give the greedy text of the one model, evaluated directly; the others are not loaded."""
    with Ensemble.from_registry("pocket", weights=[0, 0, 1], n_ctx=512, offline=True) as single:
        assert single.names == (pocket.names[2],)
        text = single.complete("The capital of France is", temperature=0.0, max_tokens=12).text
    with LlamaExpert.load(hub.locate(pocket.names[2]), n_ctx=512) as expert:
        vocabulary = expert.vocabulary
        path = list(expert.tokenize(b"The capital of France is"))
        excluded = np.isin(vocabulary.kinds, [Kind.CONTROL, Kind.UNUSED])
        n = len(path)
        while len(path) < n + 12:
            row = expert.evaluate(np.array(path, np.int32))[0].copy()
            row[excluded] = -np.inf
            path.append(int(row.argmax()))
    assert text == vocabulary.text(np.array(path[n:], np.int32)).decode()


@pytest.mark.model
def test_pocket_chats_and_refuses_what_does_not_fit(pocket: Ensemble) -> None:
    """A chat goes through each template; the tightest expert decides what is too long."""
    reply = pocket.complete("Say hello.", chat=True, seed=1, max_tokens=8)
    assert reply.text
    assert reply.usage.generated_tokens <= 8
    assert set(reply.usage.prompt_tokens) == set(pocket.names)
    with pytest.raises(ContextOverflowError, match="smollm2-135m-instruct"):
        pocket.complete("今天天气很好我们去公园" * 25)


def test_weights_and_strategy_of_one_text() -> None:
    """A text with its own weights and strategy is that of an ensemble loaded with them; the next one is as before."""
    with singers() as ensemble, singers(weights=[3, 1], strategy="linear") as other:
        usual = ensemble.complete("a", seed=5, max_bytes=40).text
        assert (
            ensemble.complete("a", seed=5, max_bytes=40, weights={"one": 3, "two": 1}, strategy="linear").text
            == ensemble.complete("a", seed=5, max_bytes=40, weights=[0.75, 0.25], strategy="linear").text
            == other.complete("a", seed=5, max_bytes=40).text
        )
        assert ensemble.complete("a", seed=5, max_bytes=40).text == usual
        assert (ensemble.weights, ensemble.strategy) != (other.weights, other.strategy)


@pytest.mark.parametrize("space", ["auto", "byte"])
def test_one_of_several_by_weight_is_that_expert_alone(space: str) -> None:
    """With weight 0 for all others, the text is the one that an expert writes alone."""
    law = nested_vocabulary()
    alone = TableExpert.from_byte_law(law, letters(0), name="one")
    both = [TableExpert.from_byte_law(law, letters(i), name=name) for i, name in enumerate(("one", "two"))]
    with Ensemble.from_experts([alone], space=space) as one, Ensemble.from_experts(both, space=space) as two:
        wanted = one.complete("ab", seed=1, max_bytes=60)
        assert two.complete("ab", seed=1, max_bytes=60, weights={"one": 1}).text == wanted.text


@pytest.mark.parametrize(
    ("weights", "message"),
    [({"ones": 1}, "did you mean 'one'"), ([1], "expected 2"), ([0, 0], "zero"), ([1, float("nan")], "finite")],
)
def test_wrong_weights_of_one_text(weights: Any, message: str) -> None:
    """Unknown experts, a wrong number of weights and weights that are none are refused at once."""
    with singers() as ensemble, pytest.raises(UsageError, match=message):
        ensemble.generate("a", weights=weights)


@pytest.mark.parametrize("ensemble_of", [parrots, singers])
def test_given_bytes_come_first_and_change_nothing(ensemble_of: Callable[[], Ensemble]) -> None:
    """Given bytes are the first steps, with their probabilities; then the text goes on, and counts start there."""
    with ensemble_of() as ensemble:
        steps = list(ensemble.generate(b"a", given=b"bca", temperature=0.0, max_bytes=4, n_top=3))
        given = [step for step in steps if step.given]
        assert b"".join(step.data for step in given) == b"bca"
        assert steps[: len(given)] == given and all(step.logprob < 0 for step in given)
        assert sum(len(step.data) for step in steps[len(given) :]) <= 4
        assert len(list(ensemble.generate(b"a", given=b"bca", max_tokens=0))) == 4


def test_top_symbols_and_divergence() -> None:
    """Steps tell the most probable symbols, best first, the greedy choice among them, and how far experts disagree."""
    with singers() as ensemble:
        for step in ensemble.generate("a", temperature=0.0, max_bytes=12, n_top=3):
            logprobs = [logprob for _, logprob in step.top]
            assert len(step.top) == 3 and logprobs == sorted(logprobs, reverse=True)
            assert step.top[0] == (step.symbol, step.logprob)
            assert step.divergence is not None and 0.0 <= step.divergence <= np.log(2)
        assert all(step.top == () and step.divergence is None for step in ensemble.generate("a", max_bytes=3))


def test_shown_bytes_stop_before_a_stop_string() -> None:
    """What is sure to belong to the text ends before a stop string and before what may become one."""
    with parrots() as ensemble:
        reply = ensemble.generate(START, temperature=0.0, stop="own fox")
        assert all(reply.shown_bytes <= reply.usage.generated_bytes for _ in reply)
        assert reply.finish_reason == "stop" and reply.shown_bytes == len("The quick br")


@pytest.mark.parametrize("space", ["byte", "token"])
def test_all_end_tokens_of_an_expert_end_the_turn_together(space: str) -> None:
    """None of three end tokens is the likeliest symbol, their sum is; the other expert's END counts with its weight."""
    pieces = [bytes([b]) for b in range(256)] + [b"</s>", b"<e>", b"<stop>"]
    vocabulary = Vocabulary.from_pieces(pieces, [Kind.TEXT] * 256 + [Kind.END] * 3)

    def law(end: float) -> Callable[[tuple[int, ...]], np.ndarray]:
        probs = np.full(259, 1e-9)
        probs[ord("x")] = 1.0 - end
        probs[256:] = end / 3
        return lambda _: probs

    experts = [TableExpert(vocabulary, law(0.6), name="one"), TableExpert(vocabulary, law(0.5), name="two")]
    with Ensemble.from_experts(experts, strategy="linear", space=space, epsilon=0.0) as ensemble:
        (step,) = ensemble.generate(b"y", temperature=0.0)
        assert (step.finish_reason, step.data) == ("stop", b"")
        assert np.exp(step.expert_logprobs) == pytest.approx([0.6, 0.5], abs=1e-3)
        assert np.exp(step.logprob) == pytest.approx(0.55, abs=1e-3)
