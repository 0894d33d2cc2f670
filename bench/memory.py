"""Predicted against measured memory of one expert on the CPU: a child process loads it, reads a prompt and decodes.

Measured is what the child's resident memory grows by, weights mapped from the file included; predicted is what
``gguf-fusion plan`` says: weights, cache and buffers.

    python bench/memory.py > bench/results/memory.jsonl

Or the peak of ``gguf-fusion run`` on the default ensemble, Python and all, against its files, its caches and 300 MB:

    python bench/memory.py --run > bench/results/run_memory.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys

from gguf_fusion import __version__, hub
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
import resource, sys
from gguf_fusion.cli import main
main.main(sys.argv[1:], standalone_mode=False)
unit = 1 if sys.platform == "darwin" else 1024
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, file=sys.stderr)
"""

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
        command = [sys.executable, "-c", RUN, "run", "--offline", "--seed", "1", "-t", "1", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak = int(done.stderr.split()[-1])
        record = {
            "prompt": prompt, "files_bytes": files, "kv_bytes": caches, "peak_bytes": peak,
            "beside_bytes": peak - files - caches, "allowed_bytes": files + caches + MARGIN_BYTES,
            "version": __version__, "machine": platform.machine(), "cores": os.cpu_count(),
        }  # fmt: skip
        print(json.dumps(record), flush=True)


def main() -> None:
    """Print one JSON line per expert and context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", nargs="+", default=POCKET)
    parser.add_argument("--n-ctx", nargs="+", type=int, default=[512, 4096, 8192])
    parser.add_argument("--run", action="store_true", help="Measure the whole command instead.")
    arguments = parser.parse_args()
    if arguments.run:
        run_peaks()
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
                "error": need.total / measured - 1.0, "version": __version__, "machine": platform.machine(),
                "cores": os.cpu_count(),
            }  # fmt: skip
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
