"""Seconds and memory of a whole search (``discover --tier all``) on 1 MB of traced text.

No models are read: traces of the real shape are made up, document by document, by experts that are each good at some
domains. Everything after the traces is what the command does: gathering, three tiers, judging.

    python bench/discover_speed.py >> bench/results/discover_speed.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from origin import ORIGIN

from gguf_fusion.discover import candidates, corpus, search
from gguf_fusion.evaluate.trace import Trace, columns_dtype
from gguf_fusion.records import N_SYMBOLS

NAMES = ("one", "two", "three")
DOMAINS = ("prose", "code", "German", "tables")
CONTEXT = 32
SHARE = 0.03
"""Ghost share of every law: about what the bridge leaves open."""


def traces(n_bytes: int, n_documents: int, seed: int) -> Iterator[tuple[str, str, Trace]]:
    """Yield (name, domain, trace): laws that give the byte that comes more the better the expert knows its domain."""
    size = n_bytes // n_documents
    for k in range(n_documents):
        rng = np.random.default_rng([seed, k])
        domain = k % len(DOMAINS)
        text = rng.integers(32, 127, size).astype(np.uint8)
        logits = rng.normal(0.0, 2.5, (size, len(NAMES), N_SYMBOLS)).astype(np.float32)
        for i in range(len(NAMES)):
            skill = 6.5 if i == domain % len(NAMES) else 4.5
            logits[np.arange(size), i, text] += np.maximum(rng.normal(skill, 3.0, size), 0.0)
        laws = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True)) + np.float32(np.log(1.0 - SHARE))
        columns = np.zeros((size, len(NAMES)), columns_dtype(1))
        columns["joint_logprob"] = laws[np.arange(size), :, text]
        columns["joint_share"] = SHARE
        columns["joint_decodes"] = rng.integers(0, 2, (size, len(NAMES)))
        yield f"{k}", DOMAINS[domain], Trace(
            text=text.tobytes(), names=NAMES, epsilons=(0.004,), joint_epsilon=0.004, scored=np.arange(size) >= CONTEXT,
            laws=laws.astype(np.float16), columns=columns, n_windows=1, seconds=0.0,
        )  # fmt: skip


class Memory:
    """Watches this process and its children; ``private``: MiB that they alone hold, ``mapped``: of the corpus' file."""

    def __init__(self) -> None:
        self.private = self.mapped = 0.0
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            found = [_resident(pid) for pid in [os.getpid(), *_children()]]
            self.private = max(self.private, sum(one[0] for one in found))
            self.mapped = max(self.mapped, *(one[1] for one in found))


def _children() -> list[int]:
    pids = []
    for task in Path("/proc/self/task").iterdir():
        try:
            pids += [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:
            continue  # the thread has ended meanwhile
    return pids


def _resident(pid: int) -> tuple[float, float]:
    """(anonymous, file-backed) resident MiB of a process; zeros when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith("Rss")}
    return sizes.get("RssAnon", 0.0), sizes.get("RssFile", 0.0)


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = last = time.perf_counter()
    seconds: dict[str, float] = {}

    def took(what: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[what] = round(seconds.get(what, 0.0) + now - last, 1)
        last = now

    with Memory() as memory, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = list(_names(arguments.documents))
        splits = corpus.split_documents(
            [(n, d, np.random.default_rng(k).bytes(64)) for k, (n, d) in enumerate(made)], arguments.seed
        )
        gathered = corpus.gather(
            _timed(traces(arguments.bytes, arguments.documents, arguments.seed), took), splits, arguments.bytes, folder
        )
        took("gathering")
        fit = search.fit_documents(gathered)
        yardstick = candidates.Yardstick.of(gathered, fit)
        with candidates.workers(gathered, yardstick, folder, arguments.workers) as mapper:
            evaluator = candidates.Evaluator(gathered, yardstick, candidates.Log(None, {}, resume=False), mapper)
            scored = search.search(
                evaluator, search.TIERS, arguments.budget, arguments.seed, lambda tier, n, best: took(tier)
            )
            took("search, rest")
            found = search.judged(gathered, scored)
            took("judging")
    made_up = seconds.pop("making up traces")
    record = {
        **ORIGIN, "bytes": arguments.bytes, "documents": arguments.documents,
        "fit_bytes": sum(doc.n_scored for doc in fit), "experts": len(NAMES), "budget": arguments.budget,
        "workers": arguments.workers, "load": round(os.getloadavg()[0], 1),
        "candidates": found.n_candidates, "seconds": seconds,
        "total_s": round(time.perf_counter() - began - made_up, 1), "private_mib": round(memory.private),
        "mapped_mib": round(memory.mapped), "winner": found.winner, "test_bpb": found.test_bpb,
    }  # fmt: skip
    print(json.dumps(record))


def _names(n_documents: int) -> Iterator[tuple[str, str]]:
    for k in range(n_documents):
        yield f"{k}", DOMAINS[k % len(DOMAINS)]


def _timed(found: Iterator[tuple[str, str, Trace]], took: object) -> Iterator[tuple[str, str, Trace]]:
    """The traces; the time that making them up takes is counted apart."""
    while True:
        took("gathering")  # type: ignore[operator]
        one = next(found, None)
        took("making up traces")  # type: ignore[operator]
        if one is None:
            return
        yield one


if __name__ == "__main__":
    main()
