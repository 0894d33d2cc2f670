"""Scores of documents: sums of bits and counts, from traces. What is derived from them is a property."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from gguf_fusion.arrays import F32, F64, Bool
from gguf_fusion.evaluate.trace import Trace
from gguf_fusion.evidence import SEPARATORS
from gguf_fusion.fusion import linear, normalised
from gguf_fusion.records import N_SYMBOLS
from gguf_fusion.strategy import Strategy

_LN2 = float(np.log(2.0))


@dataclass(frozen=True, slots=True)
class Document:
    """A text to score; ``domain`` groups documents in reports."""

    name: str
    text: bytes
    domain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeScore:
    """One expert alone through the byte bridge. ``share_sum`` adds up ghost shares over bytes."""

    epsilon: float
    bits: float
    n_bytes: int
    n_tokens: int
    n_decodes: int
    share_sum: float
    n_reanchors: int
    floor_hits: int
    """Bytes to which the law gave probability 0; they make ``bits`` infinite."""

    @property
    def bits_per_byte(self) -> float:
        return ratio(self.bits, self.n_bytes)

    @property
    def decodes_per_token(self) -> float:
        """Rows asked for per token of the text's own tokenization."""
        return ratio(self.n_decodes, self.n_tokens)

    @property
    def ghost_share(self) -> float:
        return ratio(self.share_sum, self.n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertScore:
    """One expert: with its own tokens, alone through the bridge (per epsilon), and in company.

    ``joint_decodes`` and ``joint_share_sum`` are those of the tree that read in company of the other experts.
    """

    own_bits: float
    n_bytes: int
    n_tokens: int
    bridge: tuple[BridgeScore, ...]
    joint_decodes: int
    joint_share_sum: float

    @property
    def bits_per_byte(self) -> float:
        """With its own tokens."""
        return ratio(self.own_bits, self.n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedScore:
    """One strategy; the arrays hold one entry per scored byte."""

    bits: float
    n_bytes: int
    zero_hits: int
    """Bytes to which the fused law gave probability 0; they make ``bits`` infinite."""
    empty_pools: int
    """Bytes at which the pool left no mass anywhere and the linear pool stepped in, as in the engine."""
    brier: F32
    """float32[n_bytes]: Σ_s (f(s) - 1[s = x])²."""
    confidence: F32
    """float32[n_bytes]: largest probability of the fused law."""
    correct: Bool
    """bool[n_bytes]: whether the most probable byte came."""
    weights: F32
    """float32[n_bytes, n_experts]: what mixed the experts before each byte."""

    @property
    def bits_per_byte(self) -> float:
        return ratio(self.bits, self.n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentScore:
    """All scores of one document. ``oracle_bits``: the best expert of every single byte, a bound and no result."""

    name: str
    domain: str
    total_bytes: int
    n_bytes: int
    n_windows: int
    seconds: float
    experts: Mapping[str, ExpertScore]
    oracle_bits: float
    word_first: Bool
    """bool[n_bytes]: whether a word begins with the scored byte."""
    fused: Mapping[str, FusedScore] = field(default_factory=dict)
    larger: Mapping[str, ExpertScore] = field(default_factory=dict)
    """Single models to compare with that are no members."""

    @property
    def floor_hits(self) -> int:
        """Probabilities of 0 that a byte met, in any law."""
        bridges = sum(b.floor_hits for expert in self.experts.values() for b in expert.bridge)
        return bridges + sum(fused.zero_hits for fused in self.fused.values())

    def best_single(self) -> str:
        """The expert that needs the fewest bits with its own tokens."""
        return min(self.experts, key=lambda name: self.experts[name].own_bits)


def ratio(part: float, whole: float) -> float:
    """part / whole, NaN for nothing."""
    return part / whole if whole else float("nan")


def score_trace(
    document: Document, trace: Trace, strategies: Mapping[str, Strategy], weights: F64, roles: Sequence[str] = ()
) -> DocumentScore:
    """Score one document; ``weights``: float64[n_experts], the base weights of every strategy."""
    scored = trace.scored
    columns = trace.columns[scored]
    fused = {name: fuse(trace, strategy, weights, roles) for name, strategy in strategies.items()}
    return DocumentScore(
        name=document.name,
        domain=document.domain,
        total_bytes=len(document.text),
        n_bytes=int(scored.sum()),
        n_windows=trace.n_windows,
        seconds=trace.seconds,
        experts={name: _expert(trace, columns[:, i]) for i, name in enumerate(trace.names)},
        oracle_bits=float(-columns["logprob"][:, :, 0].max(axis=1).sum(dtype=np.float64) / _LN2)
        if len(columns)
        else 0.0,
        word_first=word_starts(trace.text)[scored],
        fused=fused,
    )


def word_starts(text: bytes) -> Bool:
    """bool[n_bytes]: where a word begins, at the start or after white space or ASCII punctuation."""
    separates = np.isin(np.frombuffer(text, np.uint8), SEPARATORS)
    starts: Bool = ~separates
    starts[1:] &= separates[:-1]
    return starts


def _expert(trace: Trace, columns: np.ndarray) -> ExpertScore:
    n, n_tokens = len(columns), int(columns["own_token"].sum())
    bridge = []
    for k, epsilon in enumerate(trace.epsilons):
        logprob = columns["logprob"][:, k].astype(np.float64)
        bridge.append(
            BridgeScore(
                epsilon=epsilon,
                bits=float(-logprob.sum() / _LN2),
                n_bytes=n,
                n_tokens=n_tokens,
                n_decodes=int(columns["decodes"][:, k].sum(dtype=np.int64)),
                share_sum=float(columns["share"][:, k].sum(dtype=np.float64)),
                n_reanchors=int(columns["reanchors"][:, k].sum(dtype=np.int64)),
                floor_hits=int(np.isneginf(logprob).sum()),
            )
        )
    return ExpertScore(
        own_bits=float(columns["own_bits"].sum(dtype=np.float64)),
        n_bytes=n,
        n_tokens=n_tokens,
        bridge=tuple(bridge),
        joint_decodes=int(columns["joint_decodes"].sum(dtype=np.int64)),
        joint_share_sum=float(columns["joint_share"].sum(dtype=np.float64)),
    )


def fuse(trace: Trace, strategy: Strategy, weights: F64, roles: Sequence[str] = ()) -> FusedScore:
    """Run a strategy over a trace, block by block; the engine does the same step by step on observed text.

    The whole document is evidence, context included; only scored bytes count. In the engine the weights in force mix
    what stands in for an expert's ghosts, here the given weights do: they are a share of about a hundredth.
    """
    n_experts = len(trace.names)
    fuser = strategy.bind(n_experts, N_SYMBOLS, weights, trace.names, roles)
    base = weights / weights.sum()
    n = len(trace.text)
    log_f, confidence, brier = np.zeros(n), np.zeros(n, np.float32), np.zeros(n, np.float32)
    correct, used = np.zeros(n, np.bool_), np.zeros((n, n_experts), np.float32)
    text = np.frombuffer(trace.text, np.uint8).astype(np.int64)
    empty_pools = 0

    def measure(at: slice, laws: F64, mixed: F64) -> None:
        came = text[at]
        steps = np.arange(len(came))
        law = np.exp(laws)
        best = law.argmax(axis=1)
        given = laws[steps, came]
        log_f[at], confidence[at], correct[at] = given, law[steps, best], best == came
        brier[at] = np.einsum("ts,ts->t", law, law) - 2.0 * np.exp(given) + 1.0
        used[at] = mixed.T

    with ThreadPoolExecutor(1) as pool:
        pending: deque[Future[None]] = deque()
        for first, logprobs in _ahead(trace, base):
            at = slice(first, first + logprobs.shape[1])
            laws, mixed, log_z = fuser.fuse_block(logprobs, text[at])
            empty = np.isneginf(log_z)
            if empty.any():
                empty_pools += int((empty & trace.scored[at]).sum())
                laws[empty] = normalised(linear(logprobs[:, empty], mixed[:, empty]))[0]
            pending.append(pool.submit(measure, at, laws, mixed))
            if len(pending) > _AHEAD:
                pending.popleft().result()
        for measured in pending:
            measured.result()
    kept = trace.scored
    return FusedScore(
        bits=float(-log_f[kept].sum() / _LN2),
        n_bytes=int(kept.sum()),
        zero_hits=int(np.isneginf(log_f[kept]).sum()),
        empty_pools=empty_pools,
        brier=brier[kept],
        confidence=confidence[kept],
        correct=correct[kept],
        weights=used[kept],
    )


def _ahead(trace: Trace, weights: F64) -> Iterator[tuple[int, F64]]:
    """The blocks of a trace, prepared in a thread while earlier ones are used."""
    starts = trace.block_starts()
    with ThreadPoolExecutor(1) as pool:
        coming = deque((first, pool.submit(trace.block, first, weights)) for first in starts[:_AHEAD])
        for later in starts[_AHEAD:]:
            first, block = coming.popleft()
            yield first, block.result()
            coming.append((later, pool.submit(trace.block, later, weights)))
        for first, block in coming:
            yield first, block.result()


_AHEAD = 4


def total(scores: Sequence[DocumentScore], name: str = "all", domain: str = "") -> DocumentScore:
    """Sums over documents: of one ensemble, with the same strategies."""
    if not scores:
        raise ValueError("scores: expected at least one document, got none")
    first = scores[0]
    return DocumentScore(
        name=name,
        domain=domain,
        total_bytes=sum(s.total_bytes for s in scores),
        n_bytes=sum(s.n_bytes for s in scores),
        n_windows=sum(s.n_windows for s in scores),
        seconds=sum(s.seconds for s in scores),
        experts={name: _sum_experts([s.experts[name] for s in scores]) for name in first.experts},
        oracle_bits=sum(s.oracle_bits for s in scores),
        word_first=np.concatenate([s.word_first for s in scores]),
        larger={name: _sum_experts([s.larger[name] for s in scores]) for name in first.larger},
        fused={name: _sum_fused([s.fused[name] for s in scores]) for name in first.fused},
    )


def _sum_experts(scores: Sequence[ExpertScore]) -> ExpertScore:
    return ExpertScore(
        own_bits=sum(s.own_bits for s in scores),
        n_bytes=sum(s.n_bytes for s in scores),
        n_tokens=sum(s.n_tokens for s in scores),
        bridge=tuple(_sum_bridges(same) for same in zip(*(s.bridge for s in scores), strict=True)),
        joint_decodes=sum(s.joint_decodes for s in scores),
        joint_share_sum=sum(s.joint_share_sum for s in scores),
    )


def _sum_bridges(scores: Sequence[BridgeScore]) -> BridgeScore:
    return BridgeScore(
        epsilon=scores[0].epsilon,
        bits=sum(s.bits for s in scores),
        n_bytes=sum(s.n_bytes for s in scores),
        n_tokens=sum(s.n_tokens for s in scores),
        n_decodes=sum(s.n_decodes for s in scores),
        share_sum=sum(s.share_sum for s in scores),
        n_reanchors=sum(s.n_reanchors for s in scores),
        floor_hits=sum(s.floor_hits for s in scores),
    )


def _sum_fused(scores: Sequence[FusedScore]) -> FusedScore:
    return FusedScore(
        bits=sum(s.bits for s in scores),
        n_bytes=sum(s.n_bytes for s in scores),
        zero_hits=sum(s.zero_hits for s in scores),
        empty_pools=sum(s.empty_pools for s in scores),
        brier=np.concatenate([s.brier for s in scores]),
        confidence=np.concatenate([s.confidence for s in scores]),
        correct=np.concatenate([s.correct for s in scores]),
        weights=np.concatenate([s.weights for s in scores]),
    )
