"""The piece view: steps grouped into what people read, such as tokens of one expert or characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from gguf_fusion.cover.canonical import complete_length, word_start
from gguf_fusion.experts.base import Expert
from gguf_fusion.records import Piece, Step

Ends = Callable[[bytes, bool], Sequence[int]]
"""(open bytes, whether the text is over) -> ends of the pieces that are certain, ascending, in bytes."""


class PieceView:
    """Groups steps into pieces, each handed out as soon as its end is certain.

    A step is never divided: where one adds several bytes (a token), an end inside it moves to its own end. The pieces
    hold all steps in order, so their bytes joined are the text and their log-probabilities add up to that of the text.
    """

    def __init__(self, ends: Ends) -> None:
        """Use ``of_tokens``, ``of_characters`` or ``of_steps``."""
        self._ends = ends
        self._steps: list[Step] = []
        self._open = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def of_tokens(cls, expert: Expert) -> Self:
        """Pieces are the canonical tokens of ``expert``; they come about two words late."""
        return cls(_TokenEnds(expert))

    @classmethod
    def of_characters(cls) -> Self:
        """Pieces are UTF-8 characters; bytes that belong to none are joined to the next one."""
        return cls(lambda data, over: [len(data)] if over or complete_length(data) == len(data) else [])

    @classmethod
    def of_steps(cls) -> Self:
        """Every step is a piece: right where symbols are tokens."""
        return cls(lambda data, _: [len(data)])

    def push(self, step: Step) -> list[Piece]:
        """Pieces that became certain with this step; a step with a finish reason makes all of them so."""
        over = step.finish_reason is not None
        if not step.data:  # END, or a limit that was reached before anything was drawn
            return [*self._certain(over=True), self._piece([step], over=over)]
        self._steps.append(step)
        self._open += step.data
        return self._certain(over=over)

    def finish(self) -> list[Piece]:
        """What is still open, where the text ends without a finish reason."""
        return self._certain(over=True)

    def _certain(self, *, over: bool) -> list[Piece]:
        pieces: list[Piece] = []
        done = 0
        for end in self._ends(self._open, over) if self._open else ():
            group: list[Step] = []
            while self._steps and done < end:
                group.append(self._steps.pop(0))
                done += len(group[-1].data)
            if group:
                pieces.append(self._piece(group, over=over and not self._steps))
        self._open = self._open[done:]
        return pieces

    def _piece(self, steps: Sequence[Step], *, over: bool) -> Piece:
        data = b"".join(step.data for step in steps)
        share = np.array([max(1, len(step.data)) for step in steps], np.float64)
        share /= share.sum()
        return Piece(
            data=data,
            text=self._decoder.decode(data, final=over),
            logprob=float(sum(step.logprob for step in steps)),
            expert_logprobs=np.sum([step.expert_logprobs for step in steps], axis=0),
            weights=share @ np.stack([step.weights for step in steps]),
            responsibility=share @ np.stack([step.responsibility for step in steps]),
            n_decodes=sum(step.n_decodes for step in steps),
            ghost_share=float(share @ np.array([step.ghost_share for step in steps])),
            finish_reason=steps[-1].finish_reason,
        )


class _TokenEnds:
    """Ends of an expert's canonical tokens in a growing text.

    Tokenizers look ahead, but not beyond the next word: a token is certain once a word has begun behind it and some
    bytes have followed. Only the open end of the text is tokenized, and only when a word has begun.
    """

    def __init__(self, expert: Expert) -> None:
        self._expert = expert
        self._seen = 0
        """Word start, in the open bytes, up to which the ends were handed out."""

    def __call__(self, data: bytes, over: bool) -> list[int]:
        limit = len(data) if over else word_start(data, len(data))
        if limit <= self._seen:
            return []
        whole = data if over else data[: complete_length(data)]
        ids = self._expert.tokenize(whole)
        starts = self._expert.vocabulary.piece_start
        ends = np.cumsum(starts[ids + 1] - starts[ids])
        certain = [int(end) for end in ends[ends <= limit]]
        # What stays open begins at the last end; up to the word start there is nothing more to find.
        self._seen = 0 if over else limit - (certain[-1] if certain else 0)
        return certain
