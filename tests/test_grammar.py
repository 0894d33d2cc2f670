"""Grammars over bytes and over tokens: what they allow, where they end, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from gguf_fusion.engine import SymbolSpace
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import MissingExtraError, UsageError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.grammar import Grammars
from gguf_fusion.records import END
from gguf_fusion.sampling import allowed
from gguf_fusion.testing import byte_vocabulary
from gguf_fusion.vocabulary import Kind, Vocabulary

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 4},
    {"enum": ["red", "grün", "蓝", "🎉"]},
    {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"type": ["integer", "null"]}},
     "required": ["ok", "n"], "additionalProperties": False},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 5}]},
]  # fmt: skip


def walk(grammar: Any, seed: int, n_symbols: int = 257, end: int = END, longest: int = 400) -> list[int]:
    """Symbols of a random text of the grammar, which likes to come to an end."""
    rng = np.random.default_rng(seed)
    state = grammar.begin()
    symbols: list[int] = []
    for _ in range(longest):
        may = np.flatnonzero(allowed(state.mask(), n_symbols))
        assert len(may), "a dead end"
        if end in may and rng.random() < 0.5:
            return symbols
        plain = [s for s in may if s < 128 and s not in b"0123456789{[,"] or list(may)
        symbols.append(int(rng.choice(plain if rng.random() < 0.7 else may)))
        if symbols[-1] == end:
            return symbols[:-1]
        state.advance(symbols[-1])
    raise AssertionError(f"no end after {bytes(symbols)!r}")


@pytest.mark.parametrize("schema", SCHEMAS)
def test_random_texts_of_a_schema_are_valid(schema: dict[str, Any]) -> None:
    """Whatever is drawn, the text is JSON and valid, with the library that checks schemas as the judge."""
    grammar = Grammars(SymbolSpace()).compile("json_schema", schema)
    for seed in range(20):
        jsonschema.validate(json.loads(bytes(walk(grammar, seed)).decode()), schema)


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", "[a-c]{2,4}é?", "[a-c]{2,4}é?"),
        ("choice", ["ja", "nein", "🎉"], "ja|nein|🎉"),
        ("gbnf", 'root ::= ("yes" | "no") "!"*', "(yes|no)!*"),
        ("lark", 'start: "a" | /[0-9]{2}/', "a|[0-9]{2}"),
    ],
)
def test_random_texts_of_other_grammars(kind: str, source: Any, pattern: str) -> None:
    """Texts match the pattern that says the same, and more than one of them comes."""
    grammar = Grammars(SymbolSpace()).compile(kind, source)
    texts = [bytes(walk(grammar, seed)).decode() for seed in range(15)]
    assert all(re.fullmatch(pattern, text) for text in texts) and len(set(texts)) > 1


def test_blanks_in_json_come_to_an_end() -> None:
    """Between the parts of a JSON text there is one blank, or a line break with an indent, never a run of them."""
    state = Grammars(SymbolSpace()).compile("json_schema", {"type": "object"}).begin()
    for byte in b"{ ":
        state.advance(byte)
    assert not {*b" \n\t"} & set(np.flatnonzero(allowed(state.mask(), 257)).tolist())


def test_integers_come_to_an_end() -> None:
    """An integer without bounds has at most 16 digits; a schema's own bounds and values stay."""
    grammars = Grammars(SymbolSpace())

    def takes(schema: Any, text: str) -> bool:
        state = grammars.compile("json_schema", schema).begin()
        for byte in text.encode():
            if not allowed(state.mask(), 257)[byte]:
                return False
            state.advance(byte)
        return bool(allowed(state.mask(), 257)[END])

    for schema in ({"type": "integer"}, {"type": ["integer", "null"]}, {"type": "integer", "minimum": 5}):
        assert takes(schema, "9007199254740991") and not takes(schema, "9007199254740992")
    assert takes({"type": ["integer", "null"]}, "null")
    assert takes({"type": "integer", "maximum": 10**17}, "1" + "0" * 17)
    assert takes({"const": {"type": "integer"}}, '{"type":"integer"}')


def test_tokens_are_symbols_where_vocabularies_are_the_same() -> None:
    """Longer pieces are allowed where all of their bytes are; control tokens never."""
    pieces = [bytes([b]) for b in range(256)] + [b"yes", b"yep", b"no!", b"<c>", b"</s>"]
    vocabulary = Vocabulary.from_pieces(pieces, [Kind.TEXT] * 259 + [Kind.CONTROL, Kind.END])
    grammar = Grammars(SymbolSpace(261, 260, vocabulary)).compile("choice", ["yes", "no!!"])
    assert set(np.flatnonzero(allowed(grammar.begin().mask(), 261))) == {ord("y"), ord("n"), 256, 258}
    texts = {b"".join(pieces[s] for s in walk(grammar, seed, 261, 260)) for seed in range(20)}
    assert texts == {b"yes", b"no!!"}


def monkeys(n: int = 2, **options: Any) -> Ensemble:
    """Experts that type anything."""
    law: Callable[[bytes], np.ndarray] = lambda text: np.random.default_rng(len(text)).dirichlet(np.ones(257))  # noqa: E731
    experts = [TableExpert.from_byte_law(byte_vocabulary(), law, name=f"m{i}") for i in range(n)]
    return Ensemble.from_experts(experts, **options)


@pytest.mark.parametrize("space", ["byte", "token"])
def test_an_ensemble_keeps_to_its_grammar(space: str) -> None:
    """Experts that type anything write a text of the grammar, and end where it ends."""
    with monkeys(space=space) as ensemble:
        grammar = Grammars(ensemble.space).compile("regex", "[a-z]{3} [0-9]{2}")
        for seed in range(5):
            reply = ensemble.complete("x", seed=seed, constraint=grammar.begin(), max_bytes=50)
            assert re.fullmatch("[a-z]{3} [0-9]{2}", reply.text) and reply.finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", [], "a JSON schema"),
        ("json_schema", "{", "a JSON schema"),
        ("json_schema", {"type": "strin"}, "Invalid type"),
        ("json_schema", {"$ref": "http://example.com/x"}, "not present"),
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a" * 200_000, "more than"),
        ("choice", [], "at least one"),
        ("choice", ["a", 1], "at least one"),
        ("lark", "start: b", "unknown name"),
        ("gbnf", "root ::= (", "GBNF"),
        ("gbnf", " ", "GBNF"),
        ("yaml", "x", "one of json_schema"),
    ],
)
def test_what_is_no_grammar_is_told(kind: str, source: Any, message: str) -> None:
    """The message is one line with the library's reason."""
    with pytest.raises(UsageError, match=message) as caught:
        Grammars(SymbolSpace()).compile(kind, source)
    assert "\n" not in str(caught.value)


def test_a_grammar_that_never_answers_is_given_up() -> None:
    """Terminals that overlap keep the library busy for ever; that is an error instead."""
    began = time.monotonic()
    with pytest.raises(UsageError, match="as one regex"):
        Grammars(SymbolSpace()).compile("lark", 'start: A B\nA: /a+/\nB: "ab"\n')
    assert time.monotonic() - began < 20
    assert multiprocessing.active_children() == []


def test_a_grammar_whose_process_is_gone_is_an_error() -> None:
    """A process that was killed, such as for its memory, is told to whoever goes on."""
    grammar = Grammars(SymbolSpace()).compile("lark", 'start: "a"')
    [child] = multiprocessing.active_children()
    child.kill()
    child.join()
    with pytest.raises(UsageError, match="has ended"):
        grammar.begin().mask()


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where llguidance is not installed, the message says how to get it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"gguf-fusion\[server\]"):
        Grammars(SymbolSpace())
