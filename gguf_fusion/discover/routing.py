"""Training a router end to end on a corpus, and judging it on test documents against what it must beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.discover.candidates import as_formula
from gguf_fusion.discover.corpus import Corpus, Doc
from gguf_fusion.discover.head_training import Examples, train
from gguf_fusion.discover.hidden import States, examples
from gguf_fusion.errors import UsageError
from gguf_fusion.evaluate.statistics import Gain, bootstrap_gain
from gguf_fusion.router.head import EXTRAS, Head, fused

_FIT_BYTES = 40_000
"""Bytes that training holds in memory; of more text every second, third, … byte is taken."""

_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Compared:
    """One way to combine, on the test documents: bits per byte, and its gain over the best single expert."""

    name: str
    bpb: float
    gain: Gain | None


@dataclass(frozen=True, slots=True)
class Learned:
    """A head and how it did. ``accuracy``: share of test bytes where it chose the expert that gave the byte most."""

    head: Head
    compared: tuple[Compared, ...]
    accuracy: float
    best_single: str
    n_bytes: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """Plain data, without the tensors."""
        return {
            "experts": list(self.head.experts), "router": self.head.router, "lambda": self.head.lam,
            "hard": self.head.hard, "extras": list(self.head.extras), "best_single": self.best_single,
            "accuracy": self.accuracy, "n_bytes": dict(self.n_bytes),
            "compared": [asdict(one) for one in self.compared],
        }  # fmt: skip


def learn(
    corpus: Corpus,
    states: Mapping[str, States],
    experts: Sequence[str],
    router: str,
    router_sha256: str,
    *,
    extras: Sequence[str] = ("since",),
    ablation: bool = True,
    seed: int = 0,
    epochs: int = 30,
    tell: Callable[[str], None] = lambda text: None,
) -> Learned:
    """Train on fit documents, stop on select documents, judge once on test documents.

    ``states``: by document name. Raises UsageError where a split has no document.
    """
    splits = {split: corpus.of(split) for split in ("fit", "select", "test")}
    for split, docs in splits.items():
        if not docs:
            raise UsageError(f"no {split} documents: give at least four documents per domain")
    mine, own = [corpus.names.index(name) for name in experts], corpus.names.index(router)
    n_fit = sum(doc.n_scored for doc in splits["fit"])
    every = -(-n_fit // _FIT_BYTES)

    def load(split: str, names: Sequence[str], step: int = 1) -> Examples:
        docs = splits[split]
        return examples(corpus, docs, [states[doc.name] for doc in docs], mine, own, names, every=step)[0]

    def trained(names: Sequence[str], *, complementary: bool = True) -> Head:
        fit, mean, scale = train(
            load("fit", names, every), load("select", names, every), seed=seed, epochs=epochs,
            complementary=complementary, tell=lambda epoch, loss: tell(_line(names, epoch, loss)),
        )  # fmt: skip
        return Head(
            tuple(experts), router, router_sha256, fit.w, fit.c, mean, scale, fit.lam, extras=tuple(names),
        )  # fmt: skip

    head = trained(extras)
    judge = _Judge(corpus, splits["test"], states, mine, own)
    known = [*splits["fit"], *splits["select"]]
    singles = {name: float(_given_bits(corpus, known, i).sum()) for name, i in zip(experts, mine, strict=True)}
    best = min(singles, key=lambda name: singles[name])
    theirs = _given_bits(corpus, splits["test"], corpus.names.index(best))
    only = trained(extras, complementary=False)
    rows: list[tuple[str, F64]] = [(f"best single expert ({best})", theirs)]
    equal = ", ".join(f'1*"{name}"' for name in experts)
    for label, text in (
        ("uniform linear pool", f"linear({equal})"),
        ("linear(evidence)", f"linear(eta=1, gamma=1, {equal})"),
        ("loglinear(evidence, forgetting)", f"geometric(eta=0.1, gamma=0.99, {equal})"),
    ):
        rows.append((label, corpus.bits(as_formula(f"formula({text})").root, splits["test"])))
    rows.append(("experts only, hard (lambda = 0)", judge.bits(only, hard=True)))
    rows.append(("experts only, soft (lambda = 0)", judge.bits(only, hard=False)))
    routed = {hard: judge.bits(head, hard=hard) for hard in (True, False)}
    rows.append(("fusionroute, hard", routed[True]))
    rows.append(("fusionroute, soft", routed[False]))
    if ablation:
        for names in [tuple(e for e in extras if e != dropped) for dropped in extras] + [
            (*extras, added) for added in EXTRAS if added not in extras
        ]:
            label = "fusionroute, soft, " + ("with " + ", ".join(names) if names else "hidden state alone")
            rows.append((label, judge.bits(trained(names), hard=False)))
    oracle = np.array([judge.oracle(k) for k in range(len(splits["test"]))])
    # The form that is used is chosen on select, not on what is reported.
    chooser = _Judge(corpus, splits["select"], states, mine, own)
    head = _with_form(
        head, hard=float(chooser.bits(head, hard=True).sum()) <= float(chooser.bits(head, hard=False).sum())
    )
    n_bytes = np.array([doc.n_scored for doc in splits["test"]], np.float64)
    domains = [doc.domain for doc in splits["test"]]
    compared = [
        Compared(name, float(bits.sum() / n_bytes.sum()), bootstrap_gain(bits, theirs, n_bytes, domains))
        for name, bits in rows
    ]
    compared.append(Compared("oracle of every byte (a bound)", float(oracle.sum() / n_bytes.sum()), None))
    totals = {split: sum(doc.n_scored for doc in docs) for split, docs in splits.items()}
    return Learned(head, tuple(compared), judge.accuracy(head), best, totals)


def _line(names: Sequence[str], epoch: int, loss: float) -> str:
    what = ", ".join(("hidden state", *names))
    return f"{what}: epoch {epoch + 1}, {loss / np.log(2.0):.4f} bits per byte on dev documents"


def _with_form(head: Head, *, hard: bool) -> Head:
    return Head(
        head.experts, head.router, head.router_sha256, head.w, head.c, head.mean, head.scale, head.lam, hard,
        head.extras, head.card,
    )  # fmt: skip


def _given_bits(corpus: Corpus, docs: Sequence[Doc], expert: int) -> F64:
    """float64[n_docs]: one expert's bits of the scored bytes."""
    return np.array([-corpus.given([doc])[:, expert].sum() / np.log(2.0) for doc in docs])


class _Judge:
    """Scores heads on some documents."""

    def __init__(
        self, corpus: Corpus, docs: Sequence[Doc], states: Mapping[str, States], experts: Sequence[int], router: int
    ) -> None:
        self._corpus, self._docs, self._states = corpus, docs, states
        self._experts, self._router = experts, router

    def _examples(self, k: int, extras: Sequence[str]) -> Examples:
        doc = self._docs[k]
        return examples(self._corpus, [doc], [self._states[doc.name]], self._experts, self._router, extras)[0]

    def bits(self, head: Head, *, hard: bool) -> F64:
        """float64[n_docs]."""
        out = np.zeros(len(self._docs))
        for k in range(len(self._docs)):
            data = self._examples(k, head.extras)
            omega = head.weights(np.asarray(data.features, np.float64))
            for first in range(0, len(data.came), _BLOCK):
                at = slice(first, first + _BLOCK)
                laws, own = data.laws[at].astype(np.float64), data.router[at].astype(np.float64)
                law = fused(omega[at], head.lam, laws, own, hard=hard)
                out[k] -= law[np.arange(len(law)), data.came[at]].sum() / np.log(2.0)
        return out

    def oracle(self, k: int) -> float:
        """Bits of a document if every byte were given by the expert that gave it most."""
        data = self._examples(k, ())
        return float(-data.laws[np.arange(len(data.came)), :, data.came].max(axis=1).sum() / np.log(2.0))

    def accuracy(self, head: Head) -> float:
        """Share of bytes at which the head's first choice gave the byte the most."""
        right = total = 0
        for k in range(len(self._docs)):
            data = self._examples(k, head.extras)
            given = data.laws[np.arange(len(data.came)), :, data.came]
            chosen = head.weights(np.asarray(data.features, np.float64)).argmax(axis=1)
            right += int((given[np.arange(len(chosen)), chosen] >= given.max(axis=1)).sum())
            total += len(chosen)
        return right / max(1, total)
