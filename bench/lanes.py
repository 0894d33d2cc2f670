"""Do experts decode faster side by side? One token of each expert of the default ensemble, in lanes and in turn.

The two ways alternate in one run, so that whatever else the machine does hits both. Seconds are medians.

    python bench/lanes.py > bench/results/lanes.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial

import numpy as np
from origin import ORIGIN

from gguf_fusion import hub
from gguf_fusion.devices import usable_cores
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.lanes import LanePlan, Lanes, apply_threads, lane_plan, serial_plan

POCKET = ("smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct")
TEXT = b"A bench is a long seat for several people. It may stand in a park, in a hall, or at a table in a workshop. "


def step(experts: list[LlamaExpert], plan: LanePlan, n: int) -> float:
    """Seconds for one more token of every expert, the text being ``n`` tokens long."""
    apply_threads(plan, experts)
    paths = [np.resize(expert.tokenize(TEXT), n).astype(np.int32) for expert in experts]
    with Lanes(plan) as running:
        running.run({e.name: partial(e.evaluate, path[:-1]) for e, path in zip(experts, paths, strict=True)})
        began = time.perf_counter()
        running.run({e.name: partial(e.evaluate, path) for e, path in zip(experts, paths, strict=True)})
        return time.perf_counter() - began


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    experts = [LlamaExpert.load(hub.locate(name), name=name, n_ctx=512, n_threads=1) for name in POCKET]
    alone = {e.name: step([e], serial_plan([e.name], 1), arguments.tokens) for e in experts}
    plans = {"serial": serial_plan(POCKET, usable_cores()), "lanes": lane_plan(alone, usable_cores())}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(arguments.repetitions):
        for name, plan in plans.items():
            seconds[name].append(step(experts, plan, arguments.tokens))
    ratios = np.array(seconds["serial"]) / np.array(seconds["lanes"])
    low, median, high = np.quantile(ratios, (0.05, 0.5, 0.95))
    print(
        json.dumps(
            {
                "serial_ms": 1e3 * float(np.median(seconds["serial"])),
                "lanes_ms": 1e3 * float(np.median(seconds["lanes"])),
                "times_faster": float(median), "from": float(low), "to": float(high), "plan": str(plans["lanes"]),
                "repetitions": arguments.repetitions, **ORIGIN,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
