"""Does fusion beat the best single expert? Five kinds of installed text, dev and test split by document.

Every expert is scored with its own tokens and through the byte bridge, every strategy on the same bytes. The best
single expert of a domain has the fewest bits with its own tokens: on dev, or, harder to beat, on the test texts. The
strategy chosen on dev is the pool ``affine``, fitted on the dev texts of all domains together: in three-fold cross-
validation on dev it gained more than the default and more than what ``discover`` found.

    python bench/domains.py > bench/results/domains.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
from origin import ORIGIN
from texts import Text, digest, texts

from gguf_fusion import hub
from gguf_fusion.config import Registry
from gguf_fusion.cover.tree import DEFAULT_EPSILON
from gguf_fusion.evaluate.exponents import fitted_exponents, rows_of
from gguf_fusion.evaluate.score import Document, DocumentScore, score_trace
from gguf_fusion.evaluate.scorer import Scorer, Settings
from gguf_fusion.evaluate.statistics import bootstrap_gain, sign_flip
from gguf_fusion.expressions import DEFAULT, parse
from gguf_fusion.members import members_of
from gguf_fusion.options import Options

DISCOVERED = (
    'formula(linear(0.6291*temper(1.072, geometric(eta=0.1, gamma=0.99, 0.03917*"smollm2-135m-instruct", '
    '0.2402*"gemma-3-270m", 0.7206*"qwen2.5-coder-0.5b-instruct")), 0.3709*power(r=0.41, eta=0.07831, gamma=0.91236, '
    '0.1037*"smollm2-135m-instruct", 0.2562*"gemma-3-270m", 0.6401*"qwen2.5-coder-0.5b-instruct")))'
)
"""What ``gguf-fusion discover`` (budget 150, seed 0) found on the dev texts, which it split again by itself."""

STRATEGIES = (
    DEFAULT, "average", "bayes", "sqrt-product", "linear(w=evidence(eta=0.1, gamma=0.99))",
    "power(r=0.4, w=evidence(eta=0.1, gamma=0.99))", "adaptive", "confidence", "consensus", "word", "fixed-share",
    DISCOVERED,
)  # fmt: skip


FITTED = "fitted on dev"


def scored(
    found: list[Text], epsilons: tuple[float, ...], threads: int, names: tuple[str, ...] = STRATEGIES
) -> tuple[list[DocumentScore], str]:
    """The scores of all texts, from traces that are computed where they are missing; the strategy fitted on dev."""
    registry = Registry.load()
    members = members_of(registry.ensemble("pocket"), registry)
    paths = [hub.locate(member.ref, registry) for member in members]
    strategies = {name: parse(name) for name in names}
    scores, rows = [], []
    base = np.ones(len(members))
    with Scorer.of_members(
        members, paths, Options(n_threads=threads, lanes="serial"), Settings(epsilons=epsilons)
    ) as scorer:
        for text in found:
            if text.split == "dev":
                with scorer.trace(Document(text.name, text.text, text.domain)) as trace:
                    rows.append(rows_of(trace, text.domain, base))
        fitted = fitted_exponents(rows) if rows else ""
        if fitted:
            strategies[FITTED] = parse(fitted)
        for i, text in enumerate(found):
            with scorer.trace(Document(text.name, text.text, text.domain)) as trace:
                document = Document(text.name, text.text, text.domain)
                scores.append(score_trace(document, trace, strategies, base))
            print(f"{i + 1} of {len(found)}: {text.domain}, {text.name}", file=sys.stderr)
    return scores, fitted


def bits(scores: list[DocumentScore], pick: str, name: str) -> np.ndarray:
    """float64[n_documents]: bits of one expert (own tokens or bridge) or strategy."""
    if pick == "own":
        return np.array([score.experts[name].own_bits for score in scores])
    if pick == "bridge":
        return np.array([score.experts[name].bridge[0].bits for score in scores])
    return np.array([score.fused[name].bits for score in scores])


def record(domain: str, dev: list[DocumentScore], test: list[DocumentScore]) -> dict[str, object]:
    """One line: bits per byte of all on the test documents of a domain, and gains over the best single expert."""
    names = list(test[0].experts)
    n_bytes = np.array([score.n_bytes for score in test], np.float64)
    total = float(n_bytes.sum())
    best_dev = min(names, key=lambda name: bits(dev, "own", name).sum())
    best_test = min(names, key=lambda name: bits(test, "own", name).sum())
    experts = {
        name: {
            "bpb_own": float(bits(test, "own", name).sum() / total),
            "bpb_bridge": float(bits(test, "bridge", name).sum() / total),
            "cost": float(bits(test, "bridge", name).sum() / bits(test, "own", name).sum() - 1.0),
            "decodes_per_token": sum(s.experts[name].bridge[0].n_decodes for s in test)
            / sum(s.experts[name].n_tokens for s in test),
        }
        for name in names
    }
    fused = {}
    for name in test[0].fused:
        ours = bits(test, "fused", name)
        gains = {
            key: bootstrap_gain(ours, theirs, n_bytes)
            for key, theirs in (
                ("own_dev", bits(test, "own", best_dev)),
                ("own_test", bits(test, "own", best_test)),
                ("bridge_dev", bits(test, "bridge", best_dev)),
            )
        }
        fused[name] = {
            "bpb": float(ours.sum() / total),
            **{key: [gain.relative, gain.relative_low, gain.relative_high] for key, gain in gains.items()},
            "p_own_dev": sign_flip(ours, bits(test, "own", best_dev)),
        }
    summary = [
        {
            "strategy": label, "best_single": best_dev, "best_bpb": experts[best_dev]["bpb_own"],
            "fused_bpb": fused[name]["bpb"], "p": fused[name]["p_own_dev"],
            **dict(zip(("gain", "low", "high"), fused[name]["own_dev"], strict=True)),
            **dict(zip(("gain_bridge", "low_bridge", "high_bridge"), fused[name]["bridge_dev"], strict=True)),
        }
        for label, name in (("default", DEFAULT), (FITTED, FITTED))
    ]  # fmt: skip
    return {
        "domain": domain, "documents": len(test), "bytes": int(total), "best_on_dev": best_dev,
        "best_on_test": best_test, "summary": summary, "experts": experts, "fused": fused,
    }  # fmt: skip


def mean_gain(parts: list[tuple[list[DocumentScore], str]], name: str, n_resamples: int = 10_000) -> list[float]:
    """[mean over the domains of the gain over the best single expert, 95 % interval]; documents drawn per domain."""
    rng, drawn = np.random.default_rng(0), np.zeros(n_resamples)
    gains = []
    for test, best in parts:
        pair = np.stack([bits(test, "fused", name), bits(test, "own", best)])
        gains.append(1.0 - pair[0].sum() / pair[1].sum())
        ours, theirs = pair @ rng.multinomial(len(test), np.full(len(test), 1 / len(test)), size=n_resamples).T
        drawn += (1.0 - ours / theirs) / len(parts)
    return [float(np.mean(gains)), *map(float, np.percentile(drawn, [2.5, 97.5]))]


def main() -> None:
    """Print one JSON line per domain, then one with the means over the domains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    found = texts()
    scores, fitted = scored(found, (DEFAULT_EPSILON,), arguments.threads)
    about = {"texts": digest(found), **ORIGIN}
    records, tested = [], []
    for domain in dict.fromkeys(text.domain for text in found):
        parts = {
            split: [s for s, text in zip(scores, found, strict=True) if (text.domain, text.split) == (domain, split)]
            for split in ("dev", "test")
        }
        records.append(record(domain, parts["dev"], parts["test"]))
        tested.append((parts["test"], str(records[-1]["best_on_dev"])))
        print(json.dumps({**records[-1], **about}), flush=True)
    means = {
        name: {
            key: float(np.mean([r["fused"][name][key][0] for r in records]))
            for key in ("own_dev", "own_test", "bridge_dev")
        }
        for name in records[0]["fused"]
    }
    intervals = {name: mean_gain(tested, name) for name in means}
    costs = {
        name: {key: float(np.mean([r["experts"][name][key] for r in records])) for key in ("cost", "decodes_per_token")}
        for name in records[0]["experts"]
    }
    print(
        json.dumps(
            {
                "domain": "mean",
                "summary": [],
                "fused": means,
                "own_dev_interval": intervals,
                "fitted": fitted,
                "experts": costs,
                **about,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
