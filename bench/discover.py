"""Strategies that were tuned, stacked or evolved, beside the best one that was not.

The texts of ``texts.py``: searched on two thirds of the dev documents of every domain, chosen on the last third, judged
once on the test documents. "Untuned" are the strategies as the package names them; the best of them is chosen on all
dev documents.

    python bench/discover.py > bench/results/discover.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from origin import ORIGIN
from texts import Text, digest, texts

from gguf_fusion import hub
from gguf_fusion.config import Registry
from gguf_fusion.discover import candidates, corpus, search
from gguf_fusion.discover.candidates import Scored, as_formula
from gguf_fusion.discover.corpus import Corpus, Doc
from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.scorer import Scorer, Settings
from gguf_fusion.evaluate.statistics import bootstrap_gain
from gguf_fusion.evaluate.trace import Trace
from gguf_fusion.expressions import DEFAULT
from gguf_fusion.members import members_of
from gguf_fusion.options import Options

UNTUNED = (
    DEFAULT, "average", "bayes", "sqrt-product", "linear(w=evidence(eta=0.1, gamma=0.99))",
    "power(r=0.4, w=evidence(eta=0.1, gamma=0.99))", "adaptive", "confidence", "consensus", "word", "fixed-share",
)  # fmt: skip
WAYS = {1: "tuned", 2: "stacked", 3: "evolved"}


def splits_of(found: Sequence[Text]) -> dict[str, str]:
    """fit, select or test for every document."""
    chosen = {}
    for domain in dict.fromkeys(text.domain for text in found):
        dev = [text for text in found if (text.domain, text.split) == (domain, "dev")]
        chosen |= {_name(text): "select" if i % 3 == 2 else "fit" for i, text in enumerate(dev)}
    return chosen | {_name(text): "test" for text in found if text.split == "test"}


def _name(text: Text) -> str:
    return f"{text.domain}/{text.name}"


def traces(scorer: Scorer, found: Sequence[Text]) -> Iterator[tuple[str, str, Trace]]:
    """Yield (name, domain, trace); traces are computed where they are missing."""
    for text in found:
        with scorer.trace(Document(_name(text), text.text, text.domain)) as trace:
            yield _name(text), text.domain, trace


def best(scored: Sequence[Scored], tier: int, gathered: Corpus, select: Sequence[Doc]) -> Scored:
    """The candidate of a tier with the fewest bits on select, of the ten with the fewest on fit."""
    usable = sorted((one for one in scored if one.tier == tier), key=lambda one: (one.bpb, one.expression))[:10]
    return min(usable, key=lambda one: float(gathered.bits(as_formula(one.expression).root, select).sum()))


def main() -> None:
    """Print one JSON line per domain and one for all of them together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int)
    arguments = parser.parse_args()
    found = texts()
    registry = Registry.load()
    members = members_of(registry.ensemble("pocket"), registry)
    paths = [hub.locate(member.ref, registry) for member in members]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Scorer.of_members(members, paths, Options(n_threads=1, lanes="serial"), Settings()) as scorer:
            total = sum(len(text.text) for text in found)
            gathered = corpus.gather(traces(scorer, found), splits_of(found), total, folder)
        began = time.perf_counter()
        fit = search.fit_documents(gathered, total)
        yardstick = candidates.Yardstick.of(gathered, fit)
        with candidates.workers(gathered, yardstick, folder, arguments.workers) as mapper:
            evaluator = candidates.Evaluator(gathered, yardstick, candidates.Log(None, {}, resume=False), mapper)
            scored = search.search(evaluator, search.TIERS, arguments.budget, arguments.seed, _tell)
        winner = search.judged(gathered, scored)
        records = _records(gathered, scored, winner.winner)
        seconds = time.perf_counter() - began
        about = {
            **ORIGIN, "texts": digest(found), "budget": arguments.budget, "seed": arguments.seed,
            "candidates": winner.n_candidates, "fit_bytes": sum(doc.n_scored for doc in fit), "seconds": round(seconds),
        }  # fmt: skip
        for record in records:
            print(json.dumps({**record, **about}), flush=True)


def _records(gathered: Corpus, scored: Sequence[Scored], winner: str) -> list[dict[str, object]]:
    dev, select, test = [*gathered.of("fit"), *gathered.of("select")], gathered.of("select"), gathered.of("test")
    untuned = {text: f"formula(fuse({text}))" for text in UNTUNED}
    on_dev = {text: float(gathered.bits(as_formula(e).root, dev).sum()) for text, e in untuned.items()}
    baseline = min(on_dev, key=lambda text: on_dev[text])
    ways = {WAYS[tier]: best(scored, tier, gathered, select).expression for tier in WAYS} | {"winner": winner}
    given = gathered.given(dev).sum(axis=0)
    single = gathered.names[int(given.argmax())]
    compared = {
        **ways, f"best untuned ({baseline})": untuned[baseline], f"default ({DEFAULT})": untuned[DEFAULT],
        f"best single ({single})": f'formula("{single}")',
    }  # fmt: skip
    bits = {name: gathered.bits(as_formula(expression).root, test) for name, expression in compared.items()}
    n_bytes = np.array([doc.n_scored for doc in test], np.float64)
    domains = np.array([doc.domain for doc in test])
    records: list[dict[str, object]] = []
    for domain in (*dict.fromkeys(domains.tolist()), "all"):
        here = domains == domain if domain != "all" else np.ones(len(test), np.bool_)
        rows = []
        theirs = bits[f"best untuned ({baseline})"][here]
        for name, ours in bits.items():
            gain = bootstrap_gain(ours[here], theirs, n_bytes[here], domains[here].tolist())
            rows.append({
                "name": name, "expression": compared[name], "bpb": float(ours[here].sum() / n_bytes[here].sum()),
                "gain": gain.relative, "low": gain.relative_low, "high": gain.relative_high,
            })  # fmt: skip
        records.append(
            {"domain": domain, "documents": int(here.sum()), "bytes": int(n_bytes[here].sum()), "compared": rows}
        )
    return records


def _tell(tier: str, n: int, best: float) -> None:
    print(f"{tier}: {n} more, best {best:.4f} bits per byte on fit", file=sys.stderr)


if __name__ == "__main__":
    main()
