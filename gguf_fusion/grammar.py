"""Grammars: JSON schemas, regular expressions, choices, Lark and GBNF, turned into what the next symbol may be.

llguidance does the parsing; it sees the symbols of the shared text (bytes, or the tokens of the one vocabulary) as its
tokens, so one mask holds for the fused law, whatever vocabularies the experts have. END is allowed exactly where the
text is complete. It comes with the extra ``server``.

Some Lark and GBNF grammars never let go: their terminals are matched greedily, and two that overlap ("a"+ followed by
"ab") can keep one step busy for ever. So these two kinds run in a process of their own, which has to answer in time.
"""

from __future__ import annotations

import json
import multiprocessing
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from gguf_fusion.arrays import I32
from gguf_fusion.engine import SymbolSpace
from gguf_fusion.errors import MissingExtraError, UsageError
from gguf_fusion.sampling import Constraint
from gguf_fusion.vocabulary import Kind

KINDS = ("json_schema", "regex", "choice", "lark", "gbnf")

_JSON_BLANKS = r" |\n {0,16}"
"""Blanks between the parts of a JSON text: with any number of them, small models write nothing else."""

_LARGEST = 2**53 - 1
_VALUES = ("enum", "const", "default", "examples")
"""Keys of a schema that hold values, not schemas."""

_FREE_KINDS = ("lark", "gbnf")

_START_S, _STEP_S = 30.0, 2.0
"""How long the process of a free grammar may take to begin, and for one symbol."""

_LIMIT = 100_000
"""Most characters of a grammar."""


class Grammars:
    """Compiles grammars for one symbol space. Raises MissingExtraError where llguidance is not installed."""

    def __init__(self, space: SymbolSpace) -> None:
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise MissingExtraError("llguidance", "server") from error
        self._library: Any = llguidance
        self._width = -(-space.n_symbols // 32)
        self._symbols = _Symbols(space)
        self._tokenizer = _tokenizer(self._symbols)

    def compile(self, kind: str, source: Any) -> Grammar:
        """A grammar from its source: a schema (object, or JSON text), a pattern, a list of texts, or grammar text.

        Raises UsageError with the library's explanation for anything that is no grammar of this kind.
        """
        try:
            text = self._text(kind, source)
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"{kind}: expected {_WANTED[kind]}, got: {_first_lines(str(error))}") from error
        if kind in _FREE_KINDS:
            return WatchedGrammar(kind, self._symbols, text, self._width)
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise UsageError(f"{kind}: {_first_lines(matcher.get_error())}")
        return MatchedGrammar(matcher, self._width)

    def _text(self, kind: str, source: Any) -> str:
        library = self._library
        if kind not in KINDS:
            raise UsageError(f"grammar: expected one of {', '.join(KINDS)}, got {kind!r}")
        if len(source if isinstance(source, str) else json.dumps(source)) > _LIMIT:
            raise ValueError(f"more than {_LIMIT} characters")
        if kind == "json_schema":
            schema = json.loads(source) if isinstance(source, str) else source
            if not isinstance(schema, (dict, bool)):
                raise TypeError(type(schema).__name__)
            defaults = {"whitespace_pattern": _JSON_BLANKS}
            return str(library.LLMatcher.grammar_from_json_schema(_with_bounds(schema), defaults))
        if kind == "choice":
            if not isinstance(source, Sequence) or not source or not all(isinstance(text, str) for text in source):
                raise TypeError(json.dumps(source))
            return str(library.grammar_from(kind, json.dumps(list(source))))
        if not isinstance(source, str) or not source.strip():
            raise TypeError(json.dumps(source))
        return str(library.grammar_from(kind, source))


_WANTED = {
    "json_schema": "a JSON schema (an object)",
    "regex": "a regular expression",
    "choice": "a list of at least one text",
    "lark": "a Lark grammar",
    "gbnf": "a GBNF grammar",
}


class Grammar(Protocol):
    """A compiled grammar; every text begins its own walk through it, one text at a time."""

    def begin(self) -> Constraint:
        """The state before the first symbol."""
        ...


class MatchedGrammar:
    """A grammar whose steps are known to be short."""

    def __init__(self, matcher: Any, width: int) -> None:
        """Use ``Grammars.compile``."""
        self._matcher = matcher
        self._width = width

    def begin(self) -> GrammarWalk:
        """The state before the first symbol."""
        return GrammarWalk(self._matcher.deep_copy(), self._width)


class GrammarWalk:
    """Where one text is in a grammar. See ``sampling.Constraint``."""

    def __init__(self, matcher: Any, width: int) -> None:
        self._matcher = matcher
        self._width = width

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole one."""
        return bool(self._matcher.is_accepting())

    def mask(self) -> I32:
        """int32[ceil(n_symbols / 32)], bit set = allowed. Raises UsageError where the grammar is too much work."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self._check()
        return bits[: self._width]

    def advance(self, symbol: int) -> None:
        """Move past one symbol."""
        self._matcher.consume_token(symbol)
        self._check()

    def _check(self) -> None:
        """A matcher in error allows END only, which would look like a finished text."""
        if self._matcher.is_error():
            raise UsageError(f"grammar: {_first_lines(self._matcher.get_error())}; a simpler one, or one regex, may do")


class WatchedGrammar:
    """A grammar in a process of its own, which ends with this object or when it does not answer in time."""

    def __init__(self, kind: str, symbols: _Symbols, text: str, width: int) -> None:
        """Use ``Grammars.compile``. Raises UsageError for a grammar that is none."""
        self._kind = kind
        self._width = width
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_answer, args=(theirs, symbols, text), daemon=True)
        process.start()
        theirs.close()
        self._end = weakref.finalize(self, _end, process, self._connection)
        self._receive(_START_S)
        self.restart()

    def begin(self) -> WatchedWalk:
        """The state before the first symbol."""
        return WatchedWalk(self)

    def restart(self) -> I32:
        """The mask at the beginning of a text."""
        return self._ask(None)

    def advance(self, symbol: int) -> I32:
        """The mask after one more symbol."""
        return self._ask(symbol)

    def _ask(self, symbol: int | None) -> I32:
        try:
            self._connection.send(symbol)
        except OSError as error:
            raise self._ended() from error
        return np.frombuffer(self._receive(_STEP_S), np.int32)[: self._width]

    def _receive(self, seconds: float) -> bytes:
        try:
            answer = self._connection.recv() if self._connection.poll(seconds) else None
        except (OSError, EOFError) as error:
            raise self._ended() from error
        if isinstance(answer, bytes):
            return answer
        self._end()
        if answer is None:
            answer = (
                f"the grammar needs more than {seconds:g} s for a step; terminals that overlap do that: "
                f"write them as one, or the whole as one regex"
            )
        raise UsageError(f"{self._kind}: {answer}")

    def _ended(self) -> UsageError:
        return UsageError(f"{self._kind}: the grammar's process has ended; a simpler grammar may do")


class WatchedWalk:
    """Where a text is in a ``WatchedGrammar``."""

    def __init__(self, grammar: WatchedGrammar) -> None:
        self._grammar = grammar
        self._mask: I32 | None = None

    def mask(self) -> I32:
        """int32[ceil(n_symbols / 32)], bit set = allowed. Raises UsageError where it takes too long."""
        if self._mask is None:
            self._mask = self._grammar.restart()
        return self._mask

    def advance(self, symbol: int) -> None:
        """Move past one symbol."""
        self._mask = self._grammar.advance(symbol)


def _answer(connection: Connection, symbols: _Symbols, text: str) -> None:
    """The process of a grammar: None begins a text, a symbol goes on; answers are masks, or what is wrong.

    An empty answer comes first, once everything is there.
    """
    import llguidance

    matcher = llguidance.LLMatcher(_tokenizer(symbols), text, log_level=0)
    connection.send(b"")
    while True:
        try:
            symbol = connection.recv()
        except EOFError:
            return
        if symbol is None:
            matcher.reset()
        else:
            matcher.consume_token(symbol)
        mask = matcher.compute_bitmask()
        connection.send(_first_lines(matcher.get_error()) if matcher.is_error() else bytes(mask))


def _end(process: Any, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()
    process.close()


def _tokenizer(symbols: _Symbols) -> Any:
    import llguidance

    wrapper = llguidance.TokenizerWrapper(symbols)
    n_vocab = len(symbols.tokens)
    return llguidance.LLTokenizer(wrapper, n_vocab=n_vocab, eos_token=symbols.eos_token_id, slices=[])


def _with_bounds(schema: Any) -> Any:
    """The schema with bounds for integers that have none: small models do not find the end of a row of digits.

    ``_LARGEST`` is the limit up to which readers of JSON agree on integers (RFC 7493, section 2.2).
    """
    if isinstance(schema, list):
        return [_with_bounds(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: part if key in _VALUES else _with_bounds(part) for key, part in schema.items()}
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if "integer" in types and "number" not in types:
        if not {"minimum", "exclusiveMinimum"} & set(schema):
            result["minimum"] = -_LARGEST
        if not {"maximum", "exclusiveMaximum"} & set(schema):
            result["maximum"] = _LARGEST
    return result


class _Symbols:
    """The symbols of a space as llguidance wants to see a tokenizer."""

    bos_token_id = None

    def __init__(self, space: SymbolSpace) -> None:
        vocabulary = space.vocabulary
        if vocabulary is None:
            self.tokens = [bytes([byte]) for byte in range(256)]
        else:
            kinds = vocabulary.kinds[: space.n_symbols]
            self.tokens = [vocabulary.piece(i) if kind == Kind.TEXT else b"" for i, kind in enumerate(kinds.tolist())]
        if space.end is None or space.end == len(self.tokens):
            self.tokens.append(b"")  # without END there is still an id for it, which cannot be drawn
        self.eos_token_id = len(self.tokens) - 1 if space.end is None else space.end
        self.special_token_ids = [self.eos_token_id]
        self._ids = {piece: i for i, piece in reversed(list(enumerate(self.tokens))) if piece}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """The longest piece at each place."""
        data = text.encode() if isinstance(text, str) else text
        ids, at = [], 0
        while at < len(data):
            lengths = range(min(self._longest, len(data) - at), 0, -1)
            length = next((n for n in lengths if data[at : at + n] in self._ids), 0)
            if not length:
                raise ValueError(f"the vocabulary has no token for the byte 0x{data[at]:02X}")
            ids.append(self._ids[data[at : at + length]])
            at += length
        return ids


def _first_lines(message: str) -> str:
    """The part of an explanation that fits one line."""
    return " ".join(message.split())[:300]
