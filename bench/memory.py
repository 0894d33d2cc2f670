"""Predicted against measured memory of one expert on the CPU: a child process loads it, reads a prompt and decodes.

Measured is what the child's resident memory grows by, weights mapped from the file included; predicted is what
``gguf-fusion plan`` says: weights, cache and buffers.

    python bench/memory.py > bench/results/memory.jsonl

Or the peak of ``gguf-fusion run`` on the default ensemble, Python and all, against its files, its caches and 300 MB:

    python bench/memory.py --run > bench/results/run_memory.jsonl

Or the peak of ``gguf-fusion quants`` and of the processes it starts, with an empty cache, on the largest vocabulary:

    python bench/memory.py --quants > bench/results/quants_memory.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from origin import ORIGIN

from gguf_fusion import hub
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.experts.settings import Settings, cache_bytes
from gguf_fusion.gguf_info import read
from gguf_fusion.measure.speed import TEXT
from gguf_fusion.members import members_of
from gguf_fusion.plan.memory import shape_of

POCKET = ("smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct")

CHILD = """
import gc, json, os, sys
import numpy as np, psutil
from gguf_fusion import hub
from gguf_fusion.experts import native
from gguf_fusion.experts.llama import LlamaExpert
name, n_ctx = sys.argv[1], int(sys.argv[2])
path = hub.locate(name)
native.start()
gc.collect()
me = psutil.Process()
before = me.memory_info().rss
expert = LlamaExpert.load(path, name=name, n_ctx=n_ctx, n_threads=1)
ids = expert.tokenize(b"The quick brown fox jumps over the lazy dog. " * 40)
ids = np.resize(ids, n_ctx - 8).astype(np.int32)
expert.evaluate(ids)
for extra in range(4):
    expert.evaluate(np.append(ids, np.full(extra + 1, ids[0], np.int32)))
print(me.memory_info().rss - before)
"""

RUN = """
import json, resource, sys
from gguf_fusion.cli import main
main.main(sys.argv[1:], standalone_mode=False)
unit = 1 if sys.platform == "darwin" else 1024
peaks = [resource.getrusage(who).ru_maxrss * unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps(peaks), file=sys.stderr)
"""
"""Prints the peak of the process and of the largest one it started."""


MARGIN_BYTES = 300_000_000
"""What ``run`` may take beside files and caches."""

PROMPTS = {
    "a question": ["Write a function that reverses a string.", "-n", "64"],
    "a long text": ["--raw", "-n", "16", (TEXT * 100)[:9000]],
}


def run_peaks() -> None:
    """Print one JSON line per prompt: peak resident bytes of the command, and what they are made of."""
    members = members_of(Registry.load().ensemble(DEFAULT_ENSEMBLE), Registry.load())
    infos = [read(hub.locate(member.ref)) for member in members]
    files = sum(info.size_bytes for info in infos)
    contexts = [Settings() if member.spec.n_ctx is None else Settings(n_ctx=member.spec.n_ctx) for member in members]
    caches = sum(cache_bytes(info, settings) for info, settings in zip(infos, contexts, strict=True))
    for prompt, words in PROMPTS.items():
        peak, _ = peaks_of("run", "--seed", "1", *words)
        record = {
            "prompt": prompt, "files_bytes": files, "kv_bytes": caches, "peak_bytes": peak,
            "beside_bytes": peak - files - caches, "allowed_bytes": files + caches + MARGIN_BYTES, **ORIGIN,
        }  # fmt: skip
        print(json.dumps(record), flush=True)


def quants_peaks(name: str, levels: Sequence[str]) -> None:
    """Print one JSON line per level: the peak of making, timing or comparing it, whichever takes most."""
    reference = hub.locate(name)
    for level in levels:
        with tempfile.TemporaryDirectory() as cache:
            own, started = peaks_of(
                "quants", str(reference), "--quants", level, "--requantize", "--chunks", "1", "-p", "64", "-n", "4",
                "-r", "1", GGUF_FUSION_CACHE=cache,
            )  # fmt: skip
        record = {
            "expert": name, "level": level, "model_bytes": reference.stat().st_size, "peak_bytes": max(own, started),
            "above_model_bytes": max(own, started) - reference.stat().st_size, **ORIGIN,
        }  # fmt: skip
        print(json.dumps(record), flush=True)


def peaks_of(*words: str, **variables: str) -> list[int]:
    """Peak resident bytes of a command, and of the largest process that it started."""
    command = [sys.executable, "-c", RUN, *words, "--offline", "-t", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **variables})
    found: list[int] = json.loads(done.stderr.splitlines()[-1])
    return found


def main() -> None:
    """Print one JSON line per expert and context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", nargs="+", default=POCKET)
    parser.add_argument("--n-ctx", nargs="+", type=int, default=[512, 4096, 8192])
    parser.add_argument("--run", action="store_true", help="Measure the whole command instead.")
    parser.add_argument("--quants", action="store_true", help="Measure gguf-fusion quants instead.")
    arguments = parser.parse_args()
    if arguments.run:
        run_peaks()
        return
    if arguments.quants:
        quants_peaks("gemma-3-270m", ["Q2_K", "Q8_0", "F16"])
        return
    for name in arguments.experts:
        shape = shape_of(name, read(hub.locate(name)))
        for n_ctx in arguments.n_ctx:
            done = subprocess.run(
                [sys.executable, "-c", CHILD, name, str(n_ctx)], capture_output=True, text=True, check=True
            )
            measured = int(done.stdout.split()[-1])
            need = shape.need(n_ctx=n_ctx)
            record = {
                "expert": name, "n_ctx": n_ctx, "measured_bytes": measured, "predicted_bytes": need.total,
                "weights_bytes": need.weights, "kv_bytes": need.kv, "buffers_bytes": need.buffers,
                "error": need.total / measured - 1.0, **ORIGIN,
            }  # fmt: skip
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
