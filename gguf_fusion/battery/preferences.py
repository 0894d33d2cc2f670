"""Second stage of a router: answers to checkable prompts are sampled, checked, paired, and λ is refined on the pairs.

Small data: 48 prompts, of which half are learned from, a quarter chooses when to stop, and a quarter judges once. What
comes out is an estimate with a wide interval, given with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64, Bool
from gguf_fusion.battery.items import Item, passes
from gguf_fusion.battery.run import Result, Tell, answers
from gguf_fusion.discover.corpus import SPLITS, split_documents
from gguf_fusion.discover.head_training import Examples
from gguf_fusion.discover.preferences import Answers, Pair, pairs_of, refine
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.statistics import N_RESAMPLES
from gguf_fusion.router.fuser import Routed
from gguf_fusion.router.head import Head


@dataclass(frozen=True, slots=True)
class Change:
    """A share before and after, and the difference with its 95 % interval over prompts (NaN with fewer than two)."""

    before: float
    after: float
    gain: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Refined:
    """The new head, and what held-out prompts say.

    pairs, prompts : per split;  loss : mean preference loss on test pairs before (ln 2) and after, None without pairs
    ranked : share of test pairs whose better answer is likelier per byte, averaged per prompt
    passed : share of test prompts that the router itself answers rightly, greedily
    """

    head: Head
    lam_before: float
    pairs: Mapping[str, int]
    prompts: Mapping[str, int]
    loss: tuple[float, float] | None
    ranked: Change | None
    passed: Change | None

    def as_json(self) -> dict[str, Any]:
        """Plain data without the head's numbers."""
        return {
            "lambda_before": self.lam_before, "lambda": self.head.lam, "pairs": dict(self.pairs),
            "prompts": dict(self.prompts), "loss": self.loss,
            "ranked": None if self.ranked is None else asdict(self.ranked),
            "passed": None if self.passed is None else asdict(self.passed),
        }  # fmt: skip


class Kept:
    """Answers in a file of JSON lines, written as they come: an interruption loses the one in the making."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """``about``: what the answers depend on. Raises UsageError for a file that belongs to something else."""
        self.path = path
        self.results: list[Result] = []
        known = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        if known[-1]:  # cut off by a kill
            path.write_text("".join(line + "\n" for line in known[:-1]), encoding="utf-8")
        try:
            records = [json.loads(line) for line in known[:-1]]
            then = records[0]["about"] if records else None
            self.results = [Result(**record) for record in records[1:]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path}: expected answers that this program wrote, got something else ({error})"
            ) from None
        if then is None:
            self._append({"about": dict(about)})
        elif then != json.loads(json.dumps(about)):
            raise UsageError(
                f"{path} has answers of other experts, another router or other lengths; name another file (--answers)"
            )

    def known(self, item: Item, who: str, seed: int | None) -> bool:
        """Whether an answer is there."""
        return any((one.item, one.who, one.seed) == (item.id, who, seed) for one in self.results)

    def add(self, result: Result) -> None:
        """Keep an answer."""
        self.results.append(result)
        self._append(asdict(result))

    def _append(self, record: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def sample(ensemble: Ensemble, found: Sequence[Item], n_samples: int, kept: Kept, tell: Tell) -> None:
    """Let every expert, and the router, answer every item: once greedily, then with the seeds 1 … ``n_samples``."""
    seeds = (None, *range(1, n_samples + 1))
    for result in answers(ensemble, found, (None,), seeds, tell, kept.known):
        kept.add(result)


def splits_of(found: Sequence[Item], seed: int) -> dict[str, str]:
    """fit, select or test for every item, category by category."""
    return split_documents([(item.id, item.category, item.prompt.encode()) for item in found], seed)


def read_answer(ensemble: Ensemble, head: Head, item: Item, text: str) -> Examples:
    """What the router sees and every law says at each byte of an answer, after the prompt as a chat."""
    rows: list[tuple[F64, F64, F64]] = []
    data = text.encode()
    routed = Routed(head, watch=lambda *seen: rows.append(seen))
    for _ in ensemble.generate(item.prompt, chat=True, given=data, strategy=routed, max_bytes=0):
        pass
    return Examples(
        np.array([x for x, _, _ in rows]), np.array([laws for _, laws, _ in rows], np.float32),
        np.array([own for _, _, own in rows], np.float32), np.frombuffer(data, np.uint8).astype(np.int64),
    )  # fmt: skip


def learn(
    ensemble: Ensemble, head: Head, found: Sequence[Item], kept: Kept, seed: int, tell: Tell,
    text: tuple[Examples, Examples] | None = None,
) -> Refined:  # fmt: skip
    """Pair the kept answers, refine the head on the pairs of fit, stop on those of select, judge on test, once.

    ``text``: bytes of ordinary text that the head learns from (fit, select).
    Raises UsageError where fit or select has no pair: then no prompt was answered both rightly and wrongly.
    """
    by_id = {item.id: item for item in found}
    results = [one for one in kept.results if one.item in by_id and one.answer is not None]
    every = pairs_of([(one.item, bool(one.passed), (one.answer or "").encode()) for one in results])
    used = sorted({k for pair in every for k in (pair.better, pair.worse)})
    places = {k: i for i, k in enumerate(used)}
    pairs = [Pair(p.prompt, places[p.better], places[p.worse]) for p in every]
    splits = splits_of(found, seed)
    of = {split: [pair for pair in pairs if splits[pair.prompt] == split] for split in SPLITS}
    if not of["fit"] or not of["select"]:
        raise UsageError(
            f"expected prompts that were answered both rightly and wrongly in fit and select, got "
            f"{len(of['fit'])} and {len(of['select'])} pairs; sample more answers (--samples) or more prompts"
        )
    examples = []
    for n, k in enumerate(used):
        tell(f"reading answer {n + 1} of {len(used)}: {results[k].item}, {results[k].who}")
        examples.append(read_answer(ensemble, head, by_id[results[k].item], results[k].answer or ""))
    answered = Answers(examples, head)
    better = refine(head, answered, of["fit"], of["select"], text, seed=seed)
    loss = ranked = None
    if of["test"]:
        before, after = (answered.judged(lam, of["test"]) for lam in (head.lam, better.lam))
        loss = before.loss, after.loss
        prompts = [pair.prompt for pair in of["test"]]
        ranked = _change(_by_prompt(prompts, before.ranked), _by_prompt(prompts, after.ranked))
    test = [item for item in found if splits[item.id] == "test"]
    counts = {split: len({pair.prompt for pair in chosen}) for split, chosen in of.items()}
    return Refined(
        better, head.lam, {split: len(chosen) for split, chosen in of.items()}, counts, loss, ranked,
        _passed(ensemble, head, better, test, kept, tell),
    )  # fmt: skip


def _passed(
    ensemble: Ensemble, head: Head, better: Head, test: Sequence[Item], kept: Kept, tell: Tell
) -> Change | None:
    """The router's greedy answers to the test prompts, before (kept) and after."""
    before = {one.item: bool(one.passed) for one in kept.results if one.who == str(Routed(head)) and one.seed is None}
    test = [item for item in test if item.id in before]
    if not test:
        return None
    after = []
    for i, item in enumerate(test):
        tell(f"judging {i + 1} of {len(test)}: {item.id}")
        done = ensemble.complete(
            item.prompt, chat=True, max_bytes=item.max_bytes, temperature=0.0, seed=0, strategy=Routed(better)
        )
        after.append(passes(item, done.text))
    return _change(np.array([before[item.id] for item in test], np.float64), np.array(after, np.float64))


def _by_prompt(prompts: Sequence[str], values: Bool) -> F64:
    """float64[n_prompts]: the mean of the values of every prompt, prompts in order of appearance."""
    of = np.array(prompts)
    return np.array([values[of == prompt].mean() for prompt in dict.fromkeys(prompts)])


def _change(before: F64, after: F64, seed: int = 0) -> Change:
    """Shares over prompts, with a percentile bootstrap of their paired difference."""
    difference = after - before
    low = high = float("nan")
    if len(difference) > 1:
        drawn = np.random.default_rng(seed).integers(0, len(difference), (N_RESAMPLES, len(difference)))
        low, high = (float(x) for x in np.percentile(difference[drawn].mean(axis=1), [2.5, 97.5]))
    return Change(float(before.mean()), float(after.mean()), float(difference.mean()), low, high, len(difference))


def digest(path: Path) -> str:
    """SHA-256 of a router's file: its answers are its own."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
