"""Prefill of a prompt, and what an expert thought of the last bytes the user wrote."""

from __future__ import annotations

import numpy as np

from gguf_fusion.arrays import F32, F64
from gguf_fusion.cover.base import Prompt
from gguf_fusion.experts.base import Expert, Progress


def prefill(expert: Expert, prompt: Prompt, n_bytes: int, progress: Progress | None = None) -> F64:
    """Evaluate the prompt's ids; return float64[n], ln p of about the last ``n_bytes`` observed bytes, oldest first.

    A token's log-probability is spread evenly over its bytes. Scaffolding is left out, and so is a first token with
    nothing before it.
    """
    ids, vocabulary = prompt.ids, expert.vocabulary
    if not len(ids):
        return np.zeros(0)
    lengths = (vocabulary.piece_start[ids + 1] - vocabulary.piece_start[ids]) * prompt.observed
    from_end = np.cumsum(lengths[::-1])[::-1]
    first = max(1, int(np.searchsorted(-from_end, -n_bytes)) - 1) if from_end[0] else len(ids)
    expert.evaluate(ids[:first], progress=progress)
    per_byte = []
    for start in range(first, len(ids), expert.max_rows):
        stop = min(start + expert.max_rows, len(ids))
        # Rows after tokens start-1 … stop-2 predict tokens start … stop-1; one more token is left for the caller's row.
        rows = expert.evaluate(ids[: stop - 1], stop - start)
        for row, token, length in zip(rows, ids[start:stop], lengths[start:stop], strict=True):
            if length:
                per_byte.append(np.full(length, token_logprob(row, int(token)) / length))
    return np.concatenate(per_byte) if per_byte else np.zeros(0)


def token_logprob(logits: F32, token_id: int) -> float:
    """ln softmax(logits)[token_id] in float64, over all ids of the row."""
    top = float(logits.max())
    return float(logits[token_id]) - top - float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
