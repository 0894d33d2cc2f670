"""Running the battery: bits of the references, or answers that are checked."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.battery.items import Item, passes
from gguf_fusion.discover.corpus import filled
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.scorer import Scorer
from gguf_fusion.strategy import Strategy

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One way to answer one item. bits, bytes : of the reference;  passed, answer : of a generated text."""

    item: str
    category: str
    who: str
    bits: float | None = None
    bytes: int = 0
    passed: bool | None = None
    answer: str | None = None
    seed: int | None = None


def reference_bits(
    scorer: Scorer,
    found: Sequence[Item],
    strategies: Mapping[str, Strategy],
    weights: F64,
    roles: Sequence[str],
    tell: Tell,
) -> Iterator[Result]:
    """Yield the bits of every reference after its prompt: for each expert through its bridge, and fused."""
    for i, item in enumerate(found):
        tell(f"{i + 1} of {len(found)}: {item.id}")
        prompt, reference = (item.prompt + "\n").encode(), item.reference.encode()
        with scorer.trace(Document(item.id, prompt + reference)) as trace:
            laws = filled(trace).astype(np.float64).transpose(1, 0, 2)
            names = trace.names
        came = np.frombuffer(prompt + reference, np.uint8).astype(np.int64)
        kept = slice(max(len(prompt), 32), None)
        n = len(came) - max(len(prompt), 32)
        given = np.take_along_axis(laws, came[None, :, None], axis=2)[:, :, 0]
        for name, row in zip(names, given, strict=True):
            yield Result(item.id, item.category, name, float(-row[kept].sum() / np.log(2.0)), n)
        for label, strategy in strategies.items():
            fuser = strategy.bind(len(names), laws.shape[2], weights, names, roles)
            fuser.hint(item.prompt.encode())
            law, _, _ = fuser.fuse_block(laws, came)
            bits = -law[np.arange(len(came)), came][kept].sum() / np.log(2.0)
            yield Result(item.id, item.category, label, float(bits), n)


def answers(
    ensemble: Ensemble,
    found: Sequence[Item],
    strategies: Sequence[str | None],
    seeds: Sequence[int | None],
    tell: Tell,
    known: Container[tuple[str, str, int | None]] = (),
) -> Iterator[Result]:
    """Yield checked answers: every expert alone, then every strategy (None: the ensemble's own); seed None is greedy.

    ``known``: (item, who, seed) that are not asked for again.
    """
    alone = "linear(w=static)"  # with all weight on one expert every pool is that expert
    ways: list[tuple[str, dict[str, object]]] = [
        (name, {"weights": {name: 1.0}, "strategy": alone}) for name in ensemble.names
    ]
    ways += [(strategy or ensemble.strategy, {"strategy": strategy}) for strategy in strategies]
    for i, item in enumerate(found):
        for who, given in ways:
            for seed in seeds:
                if (item.id, who, seed) in known:
                    continue
                tell(f"{i + 1} of {len(found)}: {item.id}, {who}")
                done = ensemble.complete(
                    item.prompt, chat=True, max_bytes=item.max_bytes, temperature=0.0 if seed is None else 0.7,
                    seed=seed or 0, **given,  # type: ignore[arg-type]
                )  # fmt: skip
                yield Result(item.id, item.category, who, None, 0, passes(item, done.text), done.text, seed)


def table(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """who -> category (and "all") -> bits per byte of the references, or share of answers that passed."""
    found: dict[str, dict[str, float]] = {}
    for who in dict.fromkeys(one.who for one in results):
        mine = [one for one in results if one.who == who]
        for category in (*dict.fromkeys(one.category for one in mine), "all"):
            here = [one for one in mine if category in ("all", one.category)]
            if here[0].bits is not None:
                value = sum(one.bits or 0.0 for one in here) / max(1, sum(one.bytes for one in here))
            else:
                value = sum(bool(one.passed) for one in here) / len(here)
            found.setdefault(who, {})[category] = value
    return found
