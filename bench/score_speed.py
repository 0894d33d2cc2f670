"""Seconds to score a megabyte of traced text, for every strategy that ``gguf-fusion strategies`` lists.

The trace is made up: laws of experts that agree to a degree, with a ghosts' share, in the files that ``score`` keeps.
Scoring is everything from the mapped file to bits, calibration and weights; recording a trace is not part of it. One
pass warms up; then all strategies take their turn in each of the rounds, and the median of a strategy counts. Two
threads share the work; processor seconds of both are told too, since other programs on a machine do not change them.

    python bench/score_speed.py > bench/results/score_speed.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from origin import ORIGIN

from gguf_fusion.evaluate.score import Document, score_trace
from gguf_fusion.evaluate.trace import Trace, open_trace, writable
from gguf_fusion.expressions import DEFAULT, PRESETS, parse
from gguf_fusion.fusion import POOLS
from gguf_fusion.records import N_SYMBOLS
from gguf_fusion.weights import RULES

NAMES = ("a", "b", "c")
EPSILON = 0.15
PART = 8192


def made_up(path: Path, n_bytes: int, seed: int = 0) -> Trace:
    """A trace of ``n_bytes`` in files under ``path``."""
    rng = np.random.default_rng(seed)
    text = rng.integers(97, 123, n_bytes).astype(np.uint8)
    text[rng.random(n_bytes) < 0.17] = 32
    laws, columns = writable(path, n_bytes, len(NAMES), 1)
    for first in range(0, n_bytes, PART):
        came = text[first : first + PART]
        m = len(came)
        common = rng.normal(0.0, 2.5, (m, 1, N_SYMBOLS))
        logits = common + rng.normal(0.0, 1.0, (m, len(NAMES), N_SYMBOLS))
        logits[np.arange(m), :, came] += rng.gamma(2.0, 3.0, (m, 1))
        shares = rng.beta(0.5, 40.0, (m, len(NAMES)))
        logs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True)) + np.log1p(-shares)[:, :, None]
        laws[first : first + m] = logs
        part = columns[first : first + m]
        part["joint_logprob"] = logs[np.arange(m), :, came]
        part["joint_share"], part["logprob"] = shares, part["joint_logprob"][:, :, None]
        part["own_bits"] = -part["joint_logprob"] / np.log(2.0)
    about = {
        "names": NAMES, "epsilons": [EPSILON], "joint_epsilon": EPSILON, "seconds": 0.0,
        "windows": [[0, 32, n_bytes, n_bytes]],
    }  # fmt: skip
    trace = open_trace(path, about, text.tobytes())
    assert trace is not None
    return trace


def listed() -> dict[str, tuple[str, str]]:
    """Name -> (kind, expression): the default, presets, other pools by themselves, weight rules with a linear pool."""
    found = {DEFAULT: ("default", DEFAULT)}
    found |= {name: ("preset", preset.expression) for name, preset in PRESETS.items()}
    found |= {name: ("pool", name) for name in POOLS if name not in found}
    return found | {f"linear({name})": ("weight rule", f"linear(w={name})") for name in RULES}


def main() -> None:
    """Print one JSON line per strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="These strategies.")
    arguments = parser.parse_args()
    wanted = {name: both for name, both in listed().items() if not arguments.only or name in arguments.only}
    seconds: dict[str, list[float]] = {name: [] for name in wanted}
    cpu: dict[str, list[float]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        for name, n_bytes in (("warm", PART), ("timed", arguments.bytes)):
            path = Path(folder) / name
            path.mkdir()
            trace = made_up(path, n_bytes)
            document = Document(name, trace.text)
            for _ in range(arguments.rounds):
                for strategy, (_, expression) in wanted.items():
                    began, cpu_began = time.perf_counter(), time.process_time()
                    score_trace(document, trace, {strategy: parse(expression)}, np.ones(len(NAMES)))
                    if name == "timed":
                        seconds[strategy].append(time.perf_counter() - began)
                        cpu[strategy].append(time.process_time() - cpu_began)
                        print(f"{strategy}: {seconds[strategy][-1]:.1f} s", file=sys.stderr)
    for strategy, times in seconds.items():
        record = {
            "strategy": strategy, "kind": wanted[strategy][0], "expression": wanted[strategy][1],
            "seconds": float(np.median(times)),
            "cpu_seconds": float(np.median(cpu[strategy])),
            "rounds": len(times), "bytes": arguments.bytes, "experts": len(NAMES), **ORIGIN,
        }  # fmt: skip
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
