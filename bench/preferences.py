"""The router's two stages on this machine: training on five kinds of installed text, then preferences by checks.

The first stage learns from ``--documents`` documents of each kind (1,000 bytes each; the command splits them by
document). The second one lets every expert and the router answer the prompts of the battery, twice each, checks the
answers by programs, and moves lambda towards those that passed. Answers are kept in ``--answers``: about 40 minutes of
one core the first time, and an interrupted run goes on.

    python bench/preferences.py --answers answers.jsonl > bench/results/preferences.jsonl
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from origin import ORIGIN
from texts import digest, texts


def command(*arguments: str) -> dict[str, Any]:
    """What one ``gguf-fusion … --json`` says; progress goes to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "gguf_fusion", *arguments, "--offline", "--json"], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def about(found: dict[str, Any]) -> dict[str, Any]:
    """The record without the place of its file, and where it comes from."""
    return {key: value for key, value in found.items() if key != "out"} | ORIGIN


def main() -> None:
    """Print one JSON line per stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=6, help="Of each kind of text.")
    parser.add_argument("--samples", type=int, default=1, help="Answers beside the greedy one.")
    parser.add_argument("--max-bytes", type=int, default=100, help="Of an answer.")
    parser.add_argument("--answers", type=Path, required=True)
    options = parser.parse_args()
    chosen, seen = [], Counter[str]()
    for text in texts():
        if text.split == "dev" and seen[text.domain] < options.documents:
            seen[text.domain] += 1
            chosen.append(text)
    with tempfile.TemporaryDirectory() as place:
        files = []
        for i, text in enumerate(chosen):
            file = Path(place) / text.domain / f"{i}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(text.text)
            files.append(str(file))
        router, refined = str(Path(place) / "router.safetensors"), str(Path(place) / "refined.safetensors")
        trained = command("router", "train", *files, "--out", router, "--max-bytes", "1000", "--no-ablation")
        lines = [{"way": one["name"], "bpb": one["bpb"], **(one["gain"] or {})} for one in trained.pop("compared")]
        print(json.dumps({"stage": "train", "texts": digest(chosen), "ways": lines, **about(trained)}), flush=True)
        found = command(
            "router", "refine", router, "--out", refined, "-t", "1", "--samples", str(options.samples),
            "--max-bytes", str(options.max_bytes), "--answers", str(options.answers),
        )  # fmt: skip
        print(json.dumps({"stage": "refine", **about(found)}), flush=True)


if __name__ == "__main__":
    main()
