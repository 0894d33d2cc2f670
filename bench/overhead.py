"""What everything beside the decodes costs: bridge, fusion, sampling and Python against the seconds of the experts.

One run per number of threads on the default ensemble, experts in turn, so that wall time minus decode time is all the
rest. And the kernel that turns one row of logits into masses, against a NumPy softmax of the same row, interleaved.

    python bench/overhead.py --what run > bench/results/overhead.jsonl
    python bench/overhead.py --what kernel > bench/results/kernel.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from origin import ORIGIN

from gguf_fusion import Ensemble, hub
from gguf_fusion.bridge.store import cached_byte_tables
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.kernels.softmax import BLOCK, row_masses
from gguf_fusion.records import END

POCKET = ("smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct")
TEXT = (
    "A bench is a long seat for several people. It may stand in a park, in a hall, or at a table in a workshop, where"
)


def run(threads: int, n_bytes: int) -> dict[str, object]:
    """One text of ``n_bytes``: shares of the decode time."""
    with Ensemble.from_registry("pocket", n_threads=threads, lanes="serial", offline=True) as ensemble:
        settings = {"temperature": 0.0, "max_bytes": n_bytes, "logit_bias": {END: -100.0}, "seed": 1}
        ensemble.complete(TEXT, **{**settings, "max_bytes": 16})
        spent = ensemble.complete(TEXT, **settings).timings
    wall = spent.total_s - spent.prefill_s
    decode = spent.decode_s
    return {
        "threads": threads, "bytes": spent.bytes, "decodes": spent.decodes, "decode_s": decode,
        "bridge": spent.bridge_s / decode, "fusion": spent.fusion_s / decode, "sampling": spent.sampling_s / decode,
        "overhead": (wall - decode) / decode, "us_per_byte": 1e6 * (wall - decode) / spent.bytes,
    }  # fmt: skip


def softmax(row: np.ndarray) -> np.ndarray:
    """As users write it."""
    shifted = np.exp(row - row.max())
    return shifted / shifted.sum()


def kernel(name: str, repetitions: int) -> dict[str, object]:
    """Medians of the kernel and of NumPy on one real row, in turn."""
    with LlamaExpert.load(hub.locate(name), n_ctx=256, n_threads=1) as expert:
        row = expert.evaluate(expert.tokenize(TEXT.encode()))[0].copy()
        tables = cached_byte_tables(expert.vocabulary)
    probs, sums = np.empty(tables.n_text, np.float32), np.empty(-(-tables.n_text // BLOCK))
    mine: list[float] = []
    theirs: list[float] = []
    calls: list[tuple[list[float], Callable[[], object]]] = [
        (mine, lambda: row_masses(row, tables.order, tables.end_ids, probs, sums)),
        (theirs, lambda: softmax(row)),
    ]
    for _ in range(repetitions):
        for times, call in calls:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    kernel_us, numpy_us = (1e6 * float(np.median(times[10:])) for times in (mine, theirs))
    return {"expert": name, "n_vocab": len(row), "kernel_us": kernel_us, "numpy_us": numpy_us,
            "times_faster": numpy_us / kernel_us}  # fmt: skip


def main() -> None:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("run", "kernel"), required=True)
    parser.add_argument("--bytes", type=int, default=300)
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    arguments = parser.parse_args()
    for name in POCKET if arguments.what == "kernel" else ():
        print(json.dumps({**kernel(name, arguments.repetitions), **ORIGIN}), flush=True)
    for threads in arguments.threads if arguments.what == "run" else ():
        print(json.dumps({**run(threads, arguments.bytes), **ORIGIN}), flush=True)


if __name__ == "__main__":
    main()
