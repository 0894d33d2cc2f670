"""How far a quantized model is from its reference, in llama-perplexity's terms, with rows streamed.

Both models read the same tokens in chunks; the second half of each chunk is scored, as llama-perplexity does it. Rows
are compared a few at a time and dropped: nothing grows with the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gguf_fusion.arrays import F32, F64, I32
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.base import Expert
from gguf_fusion.vocabulary import Kind

CHUNK = 512
NOISE_FLOOR = 1e-6
"""Mean KL divergence (nats) of a model from itself stays below this: both read the same tokens in the same batches."""

_LN2 = float(np.log(2.0))
_COLUMNS = (
    "tokens", "bytes", "ppl", "ppl_se", "ppl_base", "ln_ppl_ratio", "ln_ppl_ratio_se", "bpb", "kld_mean", "kld_se",
    "kld_median", "kld_99", "kld_max", "same_top", "delta_p_mean", "delta_p_rms", "non_finite",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tokens:
    """The text as both models read it. chunks : int32[n] each;  n_bytes : of every token, 0 for control tokens."""

    chunks: tuple[I32, ...]
    n_bytes: I32


@dataclass(slots=True)
class Quality:
    """Sums over scored tokens; what is reported is a property. Lists hold one number per token."""

    nll: list[float] = field(default_factory=list)
    base_nll: list[float] = field(default_factory=list)
    kld: list[float] = field(default_factory=list)
    delta_p: list[float] = field(default_factory=list)
    n_same_top: int = 0
    n_not_finite: int = 0
    n_bytes: int = 0

    def as_json(self) -> dict[str, float | int | None]:
        """The columns of a table of quants; None where no row was finite."""
        n = len(self.nll)
        if not n:
            return dict.fromkeys(_COLUMNS) | {"tokens": 0, "non_finite": self.n_not_finite}
        nll, base, kld, delta_p = (np.array(one) for one in (self.nll, self.base_nll, self.kld, self.delta_p))
        values = (
            n, self.n_bytes, float(np.exp(nll.mean())), _se(nll) * float(np.exp(nll.mean())),
            float(np.exp(base.mean())), float((nll - base).mean()), _se(nll - base),
            float(nll.sum() / _LN2 / max(1, self.n_bytes)), float(kld.mean()), _se(kld), float(np.median(kld)),
            float(np.quantile(kld, 0.99)), float(kld.max()), self.n_same_top / n, float(delta_p.mean()),
            float(np.sqrt(np.square(delta_p).mean())), self.n_not_finite,
        )  # fmt: skip
        return dict(zip(_COLUMNS, values, strict=True))


def _se(values: F64) -> float:
    """Standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def tokens_of(expert: Expert, text: bytes, chunk: int = CHUNK, most: int | None = None) -> Tokens:
    """Chunks of a text, each with BOS where the model wants one. Raises UsageError for less than one chunk."""
    bos = expert.vocabulary.bos_id
    ids = expert.tokenize(text)
    body = chunk - (bos is not None)
    n = len(ids) // body
    if n < 1:
        raise UsageError(
            f"the text has {len(ids)} tokens, a chunk needs {body}: give a longer text (--text FILE), or a shorter "
            f"chunk (--chunk)"
        )
    n = n if most is None else min(n, most)
    chunks = []
    for i in range(n):
        part = ids[i * body : (i + 1) * body]
        chunks.append(part if bos is None else np.concatenate([[bos], part]).astype(np.int32))
    starts = expert.vocabulary.piece_start
    sizes = np.where(expert.vocabulary.kinds == Kind.TEXT, np.diff(starts), 0).astype(np.int32)
    return Tokens(tuple(chunks), sizes)


def compare(
    reference: Expert, candidate: Expert, tokens: Tokens, tell: Callable[[int, int], None] = lambda done, total: None
) -> Quality:
    """Read the tokens with both models. Raises UsageError where their vocabularies differ.

    ``tell`` hears of finished chunks and their number.
    """
    if reference.vocabulary.fingerprint != candidate.vocabulary.fingerprint:
        raise UsageError(
            f"{candidate.name} and {reference.name} have different vocabularies: their perplexities and divergences "
            f"cannot be compared; compare bits per byte (gguf-fusion score)"
        )
    found = Quality()
    step = min(reference.max_rows, candidate.max_rows)
    for done, ids in enumerate(tokens.chunks):
        reference.forget()
        candidate.forget()
        # The row after token i foretells token i + 1; the second half of the chunk is scored.
        for first in range(len(ids) // 2, len(ids) - 1, step):
            stop = min(first + step, len(ids) - 1)
            base = np.array(reference.evaluate(ids[:stop], stop - first), np.float32)
            rows = candidate.evaluate(ids[:stop], stop - first)
            for k in range(stop - first):
                came = int(ids[first + k + 1])
                _add(found, base[k], rows[k], came, int(tokens.n_bytes[came]))
        tell(done + 1, len(tokens.chunks))
    return found


def _add(found: Quality, base: F32, row: F32, came: int, n_bytes: int) -> None:
    if not (np.isfinite(base).all() and np.isfinite(row).all()):
        found.n_not_finite += 1
        return
    log_p, log_q = _log_softmax(base), _log_softmax(row)
    p = np.exp(log_p)
    found.nll.append(-float(log_q[came]))
    found.base_nll.append(-float(log_p[came]))
    found.kld.append(max(0.0, float(p @ (log_p - log_q))))
    found.delta_p.append(float(np.exp(log_q[came]) - p[came]))
    found.n_same_top += int(base.argmax() == row.argmax())
    found.n_bytes += n_bytes


def _log_softmax(row: F32) -> F64:
    logits = row.astype(np.float64)
    logits -= logits.max()
    logits -= np.log(np.exp(logits).sum())
    return logits


def pareto(rows: Sequence[Mapping[str, Any]], size: str = "size_bytes", cost: str = "kld_mean") -> list[bool]:
    """Which rows no other row beats in both size and cost; a row without a cost is beaten by all."""
    costs = [float("inf") if row[cost] is None else row[cost] for row in rows]
    points = [(row[size], value) for row, value in zip(rows, costs, strict=True)]
    return [
        point[1] < float("inf")
        and not any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in points)
        for point in points
    ]
