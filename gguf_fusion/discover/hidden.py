"""What a head learns from: the router's hidden states beside the traced laws, computed once and kept."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_fusion.arrays import I64
from gguf_fusion.discover.corpus import Corpus, Doc
from gguf_fusion.discover.head_training import Examples
from gguf_fusion.errors import ExpertFailedError
from gguf_fusion.evaluate.trace_cache import code_digest
from gguf_fusion.evaluate.windows import CONTEXT, SIZE, windows
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.hub.store import cache_dir
from gguf_fusion.router.fuser import running_bits
from gguf_fusion.router.head import features
from gguf_fusion.vocabulary import Kind


@dataclass(frozen=True, slots=True)
class States:
    """The router on one document: states float16[n_tokens, n_embd]; at, since int64[n_bytes].

    ``states[at[t]]`` is the state after the router's last own token that ends before byte t, ``since[t]`` bytes ago.
    """

    states: NDArray[np.float16]
    at: I64
    since: I64


def hidden_states(expert: LlamaExpert, text: bytes) -> States:
    """Read a document with the router's own tokens, in the windows that scoring uses."""
    n = len(text)
    at, since = np.zeros(n, np.int64), np.zeros(n, np.int64)
    found: list[NDArray[np.float16]] = []
    n_before = 0
    for i, window in enumerate(windows(text, [expert], SIZE, CONTEXT)):
        ids = expert.tokenize(text[window.start : window.end])
        bos = expert.vocabulary.bos_id
        ids = ids if bos is None else np.concatenate([[bos], ids]).astype(np.int32)
        starts = expert.vocabulary.piece_start
        lengths = np.where(expert.vocabulary.kinds[ids] == Kind.TEXT, starts[ids + 1] - starts[ids], 0)
        ends = np.cumsum(lengths) + window.start
        states = _read(expert, ids)
        first = 0 if i == 0 else window.score
        where = np.maximum(np.searchsorted(ends, np.arange(first, window.stop), side="right") - 1, 0)
        at[first : window.stop] = n_before + where
        since[first : window.stop] = np.maximum(np.arange(first, window.stop) - ends[where], 0)
        found.append(states)
        n_before += len(states)
    return States(np.concatenate(found), at, since)


def _read(expert: LlamaExpert, ids: Any) -> NDArray[np.float16]:
    expert.forget()
    parts = []
    for first in range(0, len(ids), expert.max_rows):
        stop = min(first + expert.max_rows, len(ids))
        expert.evaluate(ids[:stop], stop - first)
        if expert.hidden is None:
            raise ExpertFailedError(expert.name, "it gave no hidden states; load it with hidden=True")
        parts.append(expert.hidden.astype(np.float16))
    return np.concatenate(parts)


def cached_states(load: Any, sha256: str, text: bytes) -> States:
    """The states of a document from the cache, or computed with the expert that ``load()`` gives and kept."""
    facts = f"{code_digest()} {sha256} {hashlib.sha256(text).hexdigest()}"
    path = cache_dir() / "hidden" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.npz"
    try:
        with np.load(path) as file:
            return States(file["states"], file["at"], file["since"])
    except (OSError, ValueError, KeyError, EOFError):
        pass  # not there, or damaged: computed again
    states = hidden_states(load(), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        np.savez(file, states=states.states, at=states.at, since=states.since)
    Path(file.name).replace(path)
    return states


def examples(
    corpus: Corpus, docs: Sequence[Doc], states: Sequence[States], experts: Sequence[int], router: int,
    extras: Sequence[str], *, every: int = 1,
) -> tuple[Examples, NDArray[np.int64]]:  # fmt: skip
    """(examples of the scored bytes, int64[n] index of each one's document). ``every``: one in so many bytes.

    experts, router : positions in ``corpus.names``
    """
    xs, laws, own, came, which = [], [], [], [], []
    for k, (doc, state) in enumerate(zip(docs, states, strict=True)):
        rows = np.arange(doc.start, doc.stop)
        mine = corpus.laws[rows][:, experts]
        symbols = corpus.text[rows].astype(np.int64)
        given = mine[np.arange(len(rows)), :, symbols].astype(np.float64)
        kept = np.flatnonzero(corpus.scored[rows])[::every]
        x = features(extras, state.states[state.at[kept]], state.since[kept], mine[kept], running_bits(given)[kept])
        xs.append(x.astype(np.float32))
        laws.append(mine[kept])
        own.append(corpus.laws[rows[kept], router])
        came.append(symbols[kept])
        which.append(np.full(len(kept), k))
    parts = [np.concatenate(part) for part in (xs, laws, own, came)]
    return Examples(parts[0], parts[1], parts[2], parts[3]), np.concatenate(which)
