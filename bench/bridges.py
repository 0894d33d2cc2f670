"""The byte bridge beside four bridges from token to token, on the same texts in one run, experts of equal weight.

For every bridge: bits per byte of each expert alone through it, of the experts fused, decodes per token of a text's own
tokens, and seconds. All are fused by a linear pool with fixed weights, by a linear one whose weights follow evidence,
and by the default strategy, a geometric one with evidence. Evidence is what an expert alone gave to each byte. A
geometric mean gives nothing to a piece that one expert lacks: there 1 % of the union law goes on (see below). The byte
bridge also has "word" (evidence within a word): a pool that begins anew at every byte is not the same as one that does
so at every piece, and this comes closest to it.

Bridges from token to token get the sum over all ways to write a text piece by piece (see ``piecewise/text_law.py``);
decodes and seconds are those of writing its most probable path. Their pivot, where there is one, is the expert with the
fewest bits on the very text. UniTE and llm-fusion give most texts no probability at all: they are mixed with 1 % of the
union law, and the share of steps that needed it is told.

All begin at the same place, a border of all tokenizations after some 32 bytes, and score up to such a border.

    python bench/bridges.py > bench/results/bridges.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
from fidelity import POCKET
from origin import ORIGIN
from texts import DOMAINS, digest, texts

from gguf_fusion import hub
from gguf_fusion.bridge.store import cached_byte_tables
from gguf_fusion.cover.base import Prompt
from gguf_fusion.cover.ghosts import fill
from gguf_fusion.cover.prefill import token_logprob
from gguf_fusion.cover.tree import DEFAULT_EPSILON, EXACT_EPSILON, CoverTree
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.expressions import parse
from gguf_fusion.piecewise.bridges import FirstPiece, Matched, PieceBridge, TopUnion, Union, geometric
from gguf_fusion.piecewise.space import PieceSpace
from gguf_fusion.piecewise.text_law import Way, context_of, laws_at, text_laws
from gguf_fusion.records import N_SYMBOLS

CONTEXT = 32
ROWS = 32
LINEAR = "linear"
EVIDENCE = {"eta": 0.1, "gamma": 0.99}
"""The default strategy's."""

POOLS = {
    LINEAR: {},
    "linear(w=evidence(eta=0.1, gamma=0.99))": EVIDENCE,
    "loglinear(w=evidence(eta=0.1, gamma=0.99))": {"pool": geometric, **EVIDENCE},
}
STRATEGIES = (*POOLS, "word")


def shared_borders(experts: Sequence[LlamaExpert], text: bytes) -> list[int]:
    """Places where a token of every expert ends, in a text whose beginning is tokenized the same as alone."""
    found: set[int] | None = None
    for expert in experts:
        lengths = np.diff(expert.vocabulary.piece_start)
        ends = set(np.cumsum(lengths[expert.tokenize(text)]).tolist())
        found = ends if found is None else found & ends
    return [
        end for end in sorted(found or ())
        if all(len(e.tokenize(text[:end])) + len(e.tokenize(text[end:])) == len(e.tokenize(text)) for e in experts)
    ]  # fmt: skip


def own_bits(expert: LlamaExpert, text: bytes, first: int) -> tuple[float, int]:
    """Bits of an expert's own tokens of ``text[first:]``, and how many they are."""
    before, ids = len(context_of(expert, text[:first])), context_of(expert, text)
    expert.forget()
    bits = 0.0
    for at in range(before, len(ids), ROWS):
        stop = min(at + ROWS, len(ids))
        rows = expert.evaluate(ids[: stop - 1], stop - at)
        bits -= sum(token_logprob(row, int(token)) for row, token in zip(rows, ids[at:stop], strict=True))
    return bits / np.log(2.0), len(ids) - before


def through_bytes(experts: Sequence[LlamaExpert], text: bytes, first: int, epsilon: float) -> tuple[np.ndarray, float]:
    """Log laws float64[n_experts, n_bytes, 257] through the byte bridge; seconds after the context was read."""
    trees = [CoverTree(expert, cached_byte_tables(expert.vocabulary), epsilon=epsilon) for expert in experts]
    for expert, tree in zip(experts, trees, strict=True):
        expert.forget()
        ids = context_of(expert, text[:first])
        tree.start(Prompt(ids=ids, observed=np.zeros(len(ids), np.bool_), tail=b""))
        tree.law()
    n = len(trees)
    probs, stand_ins, shares = np.zeros((n, N_SYMBOLS)), np.zeros((n, N_SYMBOLS)), np.zeros(n)
    equal, laws = np.full(n, 1.0 / n), np.zeros((n, len(text) - first, N_SYMBOLS))
    linear = parse(LINEAR).bind(n, N_SYMBOLS, equal, [expert.name for expert in experts])
    began = time.perf_counter()
    for t, byte in enumerate(text[first:]):
        for i, tree in enumerate(trees):
            probs[i], shares[i] = tree.law()
        fill(probs, shares, equal, stand_ins, lambda i: trees[i].stand_in())
        laws[:, t] = np.log(probs)
        linear.fuse(np.ascontiguousarray(laws[:, t]))
        for i, tree in enumerate(trees):
            tree.push(byte, float(stand_ins[i, byte]))
    return laws, time.perf_counter() - began


def bits_of(laws: np.ndarray, strategy: str, came: bytes, names: Sequence[str]) -> float:
    """Bits of a text under a strategy."""
    fuser = parse(strategy).bind(len(names), N_SYMBOLS, np.full(len(names), 1.0 / len(names)), names)
    symbols = np.frombuffer(came, np.uint8).astype(np.int64)
    law, _, _ = fuser.fuse_block(laws, symbols)
    return float(-law[np.arange(len(symbols)), symbols].sum() / np.log(2.0))


def walk(
    experts: Sequence[LlamaExpert], bridge: PieceBridge, weights: np.ndarray, text: bytes, path: list[int]
) -> float:
    """Seconds to write a text piece by piece: rows, laws of all pieces, pool; after the context was read."""
    began = time.perf_counter()
    for border in path[:-1]:
        bridge.fused(bridge.mapped(laws_at(experts, text[:border])), weights)
    return time.perf_counter() - began


def say(at: int) -> None:
    """Progress on stderr."""
    print(f"  byte {at}", file=sys.stderr, flush=True)


def measure(experts: Sequence[LlamaExpert], text: bytes, space: PieceSpace) -> dict[str, object]:
    """One record: own bits of every expert, and one entry per bridge."""
    borders = shared_borders(experts, text)
    first = next(border for border in borders if border >= CONTEXT)
    text = text[: borders[-1]]
    n_bytes, names = len(text) - first, [expert.name for expert in experts]
    own, n_tokens = zip(*(own_bits(expert, text, first) for expert in experts), strict=True)
    pivot = int(np.argmin(own))
    equal = np.full(len(experts), 1.0 / len(experts))
    entries: list[dict[str, object]] = []

    def add(bridge: str, strategy: str, singles: list[float], fused: float, decodes: list[int], **more: float) -> None:
        entries.append(
            {
                "bridge": bridge,
                "strategy": strategy,
                "bpb_single": {n: bits / n_bytes for n, bits in zip(names, singles, strict=True)},
                "cost": float(np.sum(singles) / np.sum(own) - 1.0),
                "bpb_fused": fused / n_bytes,
                "gain": 1.0 - fused / min(own),
                "decodes_per_token": sum(decodes) / sum(n_tokens),
                **more,
            }
        )

    contexts = [len(context_of(expert, text[:first])) for expert in experts]
    for name, epsilon in (("byte bridge", DEFAULT_EPSILON), ("byte bridge, exact", EXACT_EPSILON)):
        alone = [through_bytes([expert], text, first, epsilon)[0] for expert in experts]
        singles = [bits_of(law, LINEAR, text[first:], [n]) for law, n in zip(alone, names, strict=True)]
        before = [expert.n_decoded for expert in experts]
        laws, seconds = through_bytes(experts, text, first, epsilon)
        decodes = [e.n_decoded - n - c for e, n, c in zip(experts, before, contexts, strict=True)]
        for strategy in STRATEGIES:
            fused = bits_of(laws, strategy, text[first:], names)
            add(name, strategy, singles, fused, decodes, seconds_per_kb=1000.0 * seconds / n_bytes, helped=0.0)

    bridges = [FirstPiece(space, pivot), TopUnion(space), Union(space), Matched(space, pivot)]
    ways = [
        [
            *(Way(bridge, equal, **given) for given in POOLS.values()),
            *(Way(bridge, one) for one in np.eye(len(experts))),
        ]
        for bridge in bridges
    ]
    flat = [way for some in ways for way in some]
    found = dict(zip(map(id, flat), text_laws(experts, flat, text, first, lambda at: at % 100 or say(at)), strict=True))
    for bridge, some in zip(bridges, ways, strict=True):
        singly = [found[id(way)].bits for way in some[len(POOLS) :]]
        path = found[id(some[0])].path.tolist()
        for expert in experts:
            expert.forget()
            expert.evaluate(context_of(expert, text[:first]))
        before = [expert.n_decoded for expert in experts]
        seconds = walk(experts, bridge, equal, text, path)
        decodes = [expert.n_decoded - n for expert, n in zip(experts, before, strict=True)]
        for strategy, way in zip(POOLS, some[: len(POOLS)], strict=True):
            fused = found[id(way)]
            add(
                bridge.name, strategy, singly, fused.bits, decodes,
                seconds_per_kb=1000.0 * seconds / n_bytes, helped=fused.n_escaped / (len(fused.path) - 1),
                bpb_one_path=fused.path_bits / n_bytes,
            )  # fmt: skip
    return {
        "bytes": n_bytes,
        "pivot": names[pivot],
        "bpb_own": {name: bits / n_bytes for name, bits in zip(names, own, strict=True)},
        "bridges": entries,
    }


def main() -> None:
    """Print one JSON line per kind of text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1100)
    parser.add_argument("--documents", type=int, default=2, help="of every kind")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    experts = [
        LlamaExpert.load(hub.locate(name), name=name, n_ctx=2048, max_rows=ROWS, n_threads=arguments.threads)
        for name in POCKET
    ]
    space = PieceSpace(experts)
    found = texts(arguments.domains, n_dev=arguments.documents, n_test=0)
    # One document of every kind after the other, so that a run that is cut short is not one of code alone.
    turns = [found[i :: arguments.documents] for i in range(arguments.documents)]
    for text in (text for turn in turns for text in turn):
        print(f"{text.domain}: {text.name}", file=sys.stderr)
        record = {"domain": text.domain, "document": text.name, "digest": digest([text])}
        record |= measure(experts, text.text[: arguments.bytes].decode("utf-8", "ignore").encode(), space)
        record |= ORIGIN
        print(json.dumps(record), flush=True)
    for expert in experts:
        expert.close()


if __name__ == "__main__":
    main()
