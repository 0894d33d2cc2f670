"""What a harness asks of a language model, answered by an ensemble on byte strings.

No text is ever cut into tokens to be scored: the next-byte laws give the probability of a continuation after a context
directly, whatever tokens either of them has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gguf_fusion.chat import Message
from gguf_fusion.cover.canonical import complete_length
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.base import Expert

_SPARE = 24
"""Tokens of a context left free: BOS, and paths that are a little longer than the canonical one."""


def require_bytes(ensemble: Ensemble) -> None:
    """Raise UsageError unless the symbols are bytes: a border inside a token has no probability otherwise."""
    if ensemble.space.vocabulary is not None:
        raise UsageError("evaluation needs an ensemble over bytes, got one over tokens; load it with space='byte'")


def continuation(
    ensemble: Ensemble, context: bytes | Sequence[Message], text: bytes, begun: bytes = b""
) -> tuple[float, bool]:
    """(ln f(text | context), whether every byte of it was the most probable symbol).

    begun : bytes that stand between the two: an answer to messages that has begun already; they are not scored

    A context that leaves too little room loses its beginning; messages do not: ContextOverflowError.
    """
    given = begun + text
    if isinstance(context, bytes):
        context = shortened(ensemble.experts, context, given)
    steps = ensemble.generate(context, given=given, max_bytes=0, n_top=1, reuse=True)
    scored = [step for step in steps if step.given][len(begun) :]
    return sum(step.logprob for step in scored), all(step.symbol == step.top[0][0] for step in scored)


def document(ensemble: Ensemble, text: bytes) -> float:
    """ln f(text) of a whole document, in nats; every byte is scored once.

    A document that is longer than the tightest context is scored part by part. Before every part but the first stands
    as much of the document as fills half a context. Raises UsageError where a context has no room for any text.
    """
    experts = ensemble.experts
    total, at = 0.0, 0
    while at < len(text):
        before = shortened(experts, text[:at], share=0.5)
        n = _largest(len(text) - at, lambda n: fits(experts, before + text[at : at + n]))  # noqa: B023 (called at once)
        n = complete_length(text[at : at + n]) or n
        if not n:
            raise UsageError("a context holds no text at all; raise it (-c/--n-ctx)")
        total += continuation(ensemble, before, text[at : at + n])[0]
        at += n
    return total


def fits(experts: Sequence[Expert], text: bytes, share: float = 1.0, n_more: int = 0) -> bool:
    """Whether a text, and ``n_more`` tokens after it, fit a share of every expert's context."""
    return all(len(expert.tokenize(text)) + n_more + _SPARE <= share * expert.n_ctx for expert in experts)


def shortened(
    experts: Sequence[Expert], context: bytes, rest: bytes = b"", *, share: float = 1.0, n_more: int = 0
) -> bytes:
    """The longest end of a context that fits together with what follows; it begins with a whole character."""
    n = _largest(len(context), lambda n: fits(experts, context[len(context) - n :] + rest, share, n_more))
    end = context[len(context) - n :]
    return end if n == len(context) else end.lstrip(bytes(range(0x80, 0xC0)))


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest n up to ``limit`` that ``holds``, for what holds up to some n; 0 where nothing does."""
    if holds(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
