"""Records of ``gguf-fusion bench`` and ``quants`` as they are kept in bench/results: one per line, without local paths.

gguf-fusion bench pocket -t 1 -o jsonl | python bench/records.py > bench/results/bench.jsonl
gguf-fusion quants NAME --requantize -t 1 --json | python bench/records.py > bench/results/quants_NAME.jsonl
gguf-fusion quants --ensemble NAME … --json | python bench/records.py > bench/results/quants_ensemble.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from origin import ORIGIN


def records(text: str) -> Iterator[dict[str, Any]]:
    """Objects of a JSON document (one, or a list of them) or of JSON lines."""
    try:
        found = json.loads(text)
    except ValueError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    yield from found if isinstance(found, list) else [found]


def kept(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with files named instead of located, a label for its line in a table, and where it comes from."""
    kept = {**record, **ORIGIN}
    if "quant" in record:
        kept["file"] = record["file"].rsplit("/", 1)[-1]
        kept["level"] = record["quant"] + (" (reference)" if record["is_reference"] else "")
        kept["made"] = "from a quantized file" if record["requantized"] else ""
    elif "test" in record:
        kept["model_filename"] = ", ".join(path.rsplit("/", 1)[-1] for path in record["model_filename"].split(", "))
        kept["model"] = record.get("ensemble") or record["expert"]
        kept |= {f"{part}_ms": ms for part, ms in record.get("ms_per_token", {}).items()}
    elif "tried" in record:
        kept["lines"] = list(compared(record))
    return kept


def compared(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the search for an ensemble's levels compares, a line each."""
    for what, key in (("best", "best"), ("the same bytes for each", "even")):
        if record[key] is not None:
            yield {"what": what, "choice": " + ".join(record[key]["levels"]), **_figures(record, key)}
    if record["single"] is not None:
        choice = f"{record['single']['name']} {record['single']['level']}"
        yield {"what": "the best model alone", "choice": choice, **_figures(record, "single")}


def _figures(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    one = record[key]
    gain = 1.0 - record["best"]["bpb"] / one["bpb"]
    return {"size_bytes": one["size_bytes"], "bpb": one["bpb"], "gain_of_best": gain}


def main() -> None:
    """Read stdin, write stdout."""
    for record in records(sys.stdin.read()):
        print(json.dumps(kept(record), ensure_ascii=False))


if __name__ == "__main__":
    main()
