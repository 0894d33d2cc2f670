"""Running the battery: bits of the references, or answers that are checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.battery.items import Item, passes
from gguf_fusion.discover.corpus import filled
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.scorer import Scorer
from gguf_fusion.strategy import Strategy

Tell = Callable[[str], None]
Known = Callable[[Item, str, int | None], bool]
"""Whether the result of an item, of somebody (expert or strategy), with a seed, is there already."""


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
    names: Sequence[str],
    strategies: Mapping[str, Strategy],
    weights: F64,
    roles: Sequence[str],
    tell: Tell,
    known: Known,
) -> Iterator[Result]:
    """Yield the bits of every reference after its prompt: for each expert through its bridge, and fused."""
    for i, item in enumerate(found):
        if all(known(item, who, None) for who in (*names, *strategies)):
            continue
        tell(f"{i + 1} of {len(found)}: {item.id}")
        prompt, reference = (item.prompt + "\n").encode(), item.reference.encode()
        with scorer.trace(Document(item.id, prompt + reference)) as trace:
            laws = filled(trace).astype(np.float64).transpose(1, 0, 2)
        came = np.frombuffer(prompt + reference, np.uint8).astype(np.int64)
        kept = slice(max(len(prompt), 32), None)
        n = len(came) - max(len(prompt), 32)
        given = np.take_along_axis(laws, came[None, :, None], axis=2)[:, :, 0]
        for name, row in zip(names, given, strict=True):
            if known(item, name, None):
                continue
            yield Result(item.id, item.category, name, float(-row[kept].sum() / np.log(2.0)), n)
        for label, strategy in strategies.items():
            if known(item, label, None):
                continue
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
    known: Known,
) -> Iterator[Result]:
    """Yield checked answers: every expert alone, then every strategy (None: the ensemble's); seed None is greedy."""
    alone = "linear(w=static)"  # with all weight on one expert every pool is that expert
    ways: list[tuple[str, dict[str, object]]] = [
        (name, {"weights": {name: 1.0}, "strategy": alone}) for name in ensemble.names
    ]
    ways += [(strategy or ensemble.strategy, {"strategy": strategy}) for strategy in strategies]
    for i, item in enumerate(found):
        for who, given in ways:
            for seed in seeds:
                if known(item, who, seed):
                    continue
                tell(f"{i + 1} of {len(found)}: {item.id}, {who}")
                done = ensemble.complete(
                    item.prompt, chat=True, max_bytes=item.max_bytes, temperature=0.0 if seed is None else 0.7,
                    seed=seed or 0, **given,  # type: ignore[arg-type]
                )  # fmt: skip
                yield Result(item.id, item.category, who, None, 0, passes(item, done.text), done.text, seed)


class Log:
    """Results in a file, a line each, written as they come: what a run that was cut short need not do again.

    A line also says what it depends on; results of other items, models or modes are left alone.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any], *, resume: bool) -> None:
        """``facts``: JSON, what all results depend on besides their item. Raises UsageError for an unusable file."""
        self._facts = facts
        self._lines: dict[str, Result] = {}
        self._path = path
        if path is None:
            return
        try:
            if resume and path.exists():
                self._read(path)
            path.open("a" if resume else "w").close()
        except OSError as error:
            raise UsageError(f"--out {path}: expected a file that can be written, got: {error.strerror}") from error

    def _read(self, path: Path) -> None:
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):  # the end of a line was lost: the next one must not be glued to its beginning
            path.write_bytes(whole)
        try:
            for line in whole.splitlines():
                record = json.loads(line)
                key = record.pop("key")
                self._lines[key] = Result(**record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--resume {path}: expected lines of an earlier battery --out, got: {error}; give another --out"
            ) from error

    def _key(self, item: Item, who: str, seed: int | None) -> str:
        facts = {**self._facts, "item": asdict(item), "who": who, "seed": seed}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]

    def known(self, item: Item, who: str, seed: int | None) -> bool:
        """Whether an earlier run has this result."""
        return self._key(item, who, seed) in self._lines

    def results(self, found: Sequence[Item], who: Sequence[str], seeds: Sequence[int | None]) -> list[Result]:
        """The known results of this run, in its order."""
        keys = (self._key(item, one, seed) for item in found for one in who for seed in seeds)
        return [self._lines[key] for key in keys if key in self._lines]

    def add(self, item: Item, result: Result) -> None:
        """Keep a result."""
        key = self._key(item, result.who, result.seed)
        self._lines[key] = result
        if self._path is not None:
            with self._path.open("a", encoding="utf-8", newline="\n") as stream:
                stream.write(json.dumps({"key": key, **asdict(result)}, ensure_ascii=False) + "\n")


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
