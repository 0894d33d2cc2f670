"""Whether memory grows while texts are written: many requests to one ensemble, and its resident memory in between.

Requests have prompts of many lengths; every third continues the text of the one before (``reuse``), every tenth is left
unfinished, as by a client that goes away. After a warm-up, memory must not grow by more than a limit: exit status 1
otherwise.

    python bench/soak.py smollm2-135m-instruct >> bench/results/soak.jsonl
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Iterator

from origin import ORIGIN

from gguf_fusion import Ensemble
from gguf_fusion.devices import resident_bytes

WORDS = (
    "river",
    "stone",
    "house",
    "light",
    "under",
    "seven",
    "green",
    "walks",
    "function",
    "return",
    "value",
    "because",
)
WARM_UP = 20


def prompts() -> Iterator[str]:
    """Prompts of 3 to 60 words, none like the one before."""
    for i in itertools.count():
        yield " ".join(WORDS[(i * 7 + j * (1 + i % 5)) % len(WORDS)] for j in range(3 + (i * 13) % 58))


def main() -> int:
    """Print one JSON line; 1 if memory grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experts", nargs="+")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=10_000, dest="n_bytes", help="of all requests together, at least")
    parser.add_argument("--limit", type=float, default=10.0, help="MB that memory may grow by")
    parser.add_argument("-t", "--threads", type=int, default=1)
    arguments = parser.parse_args()
    options = {"n_ctx": 512, "n_threads": arguments.threads, "lanes": "serial", "calibrate": False, "space": "byte"}
    texts, per_text = prompts(), -(-arguments.n_bytes // arguments.requests)
    with Ensemble.from_files(arguments.experts, **options) as ensemble:
        for _ in range(WARM_UP):
            request(ensemble, next(texts), per_text, 0)
        sizes, total, began = [memory()], 0, time.perf_counter()
        for i in range(arguments.requests):
            total += request(ensemble, next(texts), per_text, i)
            if (i + 1) % max(1, arguments.requests // 10) == 0:
                sizes.append(memory())
                print(f"{i + 1} requests, {total} bytes, {sizes[-1] / 1e6:.1f} MB", file=sys.stderr)
        while total < arguments.n_bytes:  # what unfinished and short texts left over
            total += request(ensemble, next(texts), per_text, 1)
        sizes.append(memory())
        seconds = time.perf_counter() - began
    growth = sizes[-1] - sizes[0]
    record = {
        "experts": "+".join(arguments.experts), "requests": arguments.requests, "generated_bytes": total,
        "before_bytes": sizes[0], "after_bytes": sizes[-1], "growth_bytes": growth, "samples_bytes": sizes,
        "seconds": round(seconds, 1), **ORIGIN,
    }  # fmt: skip
    print(json.dumps(record), flush=True)
    return int(growth > 1e6 * arguments.limit)


def request(ensemble: Ensemble, prompt: str, n_bytes: int, i: int) -> int:
    """Write one text; returns its bytes."""
    n = 0
    # The end is made unlikely: a chat model may be done after a word.
    for step in ensemble.generate(prompt, max_bytes=n_bytes, seed=i, reuse=i % 3 == 2, logit_bias={256: -100.0}):
        n += len(step.data)
        if i % 10 == 9 and n > n_bytes // 2:
            break
    return n


def memory() -> int:
    """Resident bytes, garbage collected."""
    gc.collect()
    return resident_bytes()


if __name__ == "__main__":
    sys.exit(main())
