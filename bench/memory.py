"""Predicted against measured memory of one expert on the CPU: a child process loads it, reads a prompt and decodes.

Measured is what the child's resident memory grows by, weights mapped from the file included; predicted is what
``gguf-fusion plan`` says: weights, cache and buffers.

    python bench/memory.py > bench/results/memory.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys

from gguf_fusion import __version__, hub
from gguf_fusion.gguf_info import read
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


def main() -> None:
    """Print one JSON line per expert and context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", nargs="+", default=POCKET)
    parser.add_argument("--n-ctx", nargs="+", type=int, default=[512, 4096, 8192])
    arguments = parser.parse_args()
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
