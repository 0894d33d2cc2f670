"""Token laws whose byte marginal is known exactly: one byte law, cut into the tokens of any vocabulary.

A text is drawn from the byte law; then it is cut from left to right. At each border a coin, independent of the text,
chooses the longest piece that matches the text (with probability ``greedy``) or the shortest. The token law is what an
ideal expert, seeing tokens only, would predict. It depends on the path, not on the bytes alone: that the longest match
was "a" says that no longer piece matches here, so the text cannot go on with "bc" if "abc" is a piece.

Why not simply multiply byte probabilities by a stopping probability that depends on the bytes? Let q(u) be the
probability of the token u after a text, P(u) that of its bytes. If rows depended on bytes only, the marginal would be
right only if q(u) = P(u) (1 - sum of q(v)/P(v) over proper prefixes v of u) wherever END or a byte without a longer
piece may follow. With full support that leaves single bytes as the only tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.records import END
from gguf_fusion.vocabulary import Kind, Vocabulary

ByteLaw = Callable[[bytes], F64]
"""Maps a text to float64[257], the probabilities of the next byte and of END, sum 1."""

_Forbidden = frozenset[bytes]
"""Strings none of which the text goes on with; no member is a prefix of another."""


class SegmentedLaw:
    """Callable: token path -> float64[n_vocab] probabilities. Slow; for toys and small vocabularies."""

    def __init__(self, vocabulary: Vocabulary, law: ByteLaw, *, greedy: float = 1.0) -> None:
        """Every byte that can occur needs a piece of its own. Ids with equal bytes share their mass equally."""
        if not 0.0 <= greedy <= 1.0:
            raise ValueError(f"greedy: expected a probability, got {greedy}")
        self.vocabulary = vocabulary
        self._byte_law = lru_cache(maxsize=None)(law)
        self._coins = [(weight, longest) for weight, longest in ((greedy, True), (1.0 - greedy, False)) if weight > 0.0]
        self._ids: dict[bytes, list[int]] = {}
        for token in vocabulary.text_ids.tolist():
            self._ids.setdefault(vocabulary.piece(token), []).append(token)
        self._longer = {u: [p for p in self._ids if p != u and p.startswith(u)] for u in self._ids}
        self._has_shorter = {u: any(u[:n] in self._ids for n in range(1, len(u))) for u in self._ids}
        self._states: dict[tuple[int, ...], dict[_Forbidden, float]] = {}

    def __call__(self, path: tuple[int, ...]) -> F64:
        """float64[n_vocab], sum 1."""
        text = self._text(path)
        row = np.zeros(self.vocabulary.n_vocab)
        ends = self.vocabulary.end_ids
        for forbidden, weight in self._after(path).items():
            scale = weight / self._allowed(text, forbidden)
            end = self._byte_law(text)[END]
            if end > 0.0:
                if not len(ends):
                    raise ValueError("the byte law ends texts, but the vocabulary has no END id")
                row[ends] += scale * end / len(ends)
            for piece, ids in self._ids.items():
                mass = sum(coin * self._joint(text, forbidden, piece, longest)[0] for coin, longest in self._coins)
                row[ids] += scale * mass / len(ids)
        total = float(row.sum())
        if total < 1.0 - 1e-9:
            raise ValueError(f"the vocabulary cannot spell {1.0 - total:.3g} of the law after {text!r}")
        return row / total

    def _text(self, path: tuple[int, ...]) -> bytes:
        return self.vocabulary.text(np.array(path, np.int32))

    def _after(self, path: tuple[int, ...]) -> dict[_Forbidden, float]:
        """Weights, sum 1, of what may be forbidden after ``path``: the coins are not seen, so several are possible.

        A path that cannot occur is treated as a fresh start. Control tokens change nothing.
        """
        if not path:
            return {frozenset(): 1.0}
        known = self._states.get(path)
        if known is not None:
            return known
        before, token = path[:-1], path[-1]
        states = self._after(before)
        if self.vocabulary.kinds[token] == Kind.TEXT:
            text, piece = self._text(before), self.vocabulary.piece(token)
            weights: dict[_Forbidden, float] = {}
            for forbidden, weight in states.items():
                scale = weight / self._allowed(text, forbidden)
                for coin, longest in self._coins:
                    mass, after = self._joint(text, forbidden, piece, longest)
                    if mass > 0.0:
                        weights[after] = weights.get(after, 0.0) + scale * coin * mass
            total = sum(weights.values())
            states = {f: w / total for f, w in weights.items()} if total > 0.0 else {frozenset(): 1.0}
        self._states[path] = states
        return states

    def _joint(self, text: bytes, forbidden: _Forbidden, piece: bytes, longest: bool) -> tuple[float, _Forbidden]:
        """(P(the text goes on with ``piece``, which is the one chosen, and with nothing forbidden), what is then)."""
        if any(piece.startswith(f) for f in forbidden) or (not longest and self._has_shorter[piece]):
            return 0.0, frozenset()
        rest = {f[len(piece) :] for f in forbidden if f.startswith(piece)}
        if longest:
            rest.update(p[len(piece) :] for p in self._longer[piece])
        after = frozenset(f for f in rest if not any(f != g and f.startswith(g) for g in rest))
        return self._chain(text, piece) * self._allowed(text + piece, after), after

    def _allowed(self, text: bytes, forbidden: _Forbidden) -> float:
        """P(the text goes on with nothing forbidden)."""
        return max(0.0, 1.0 - sum(self._chain(text, f) for f in forbidden))

    def _chain(self, text: bytes, more: bytes) -> float:
        """P(the text goes on with ``more``): the product of its bytes' probabilities."""
        product = 1.0
        for i, byte in enumerate(more):
            product *= float(self._byte_law(text + more[:i])[byte])
        return product
