"""What the byte bridge costs one expert alone, on the first test documents of every kind in ``texts``.

Prints the lines that ``bench/fidelity.py`` prints, of more text; traces are kept, so that a second run takes seconds.

    python bench/fidelity_texts.py --documents 6 > bench/results/fidelity.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys

from domains import scored
from origin import ORIGIN
from texts import digest, texts

from gguf_fusion.cover.tree import DEFAULT_EPSILON, EXACT_EPSILON
from gguf_fusion.evaluate.score import DocumentScore

EPSILONS = (DEFAULT_EPSILON, EXACT_EPSILON)


def record(name: str, scores: list[DocumentScore]) -> dict[str, object]:
    """One expert on the documents of one kind."""
    mine = [score.experts[name] for score in scores]
    n_bytes, n_tokens = sum(score.n_bytes for score in scores), sum(one.n_tokens for one in mine)
    own = sum(one.own_bits for one in mine)
    bridge = []
    for k, epsilon in enumerate(EPSILONS):
        through = [one.bridge[k] for one in mine]
        bits = sum(one.bits for one in through)
        bridge.append(
            {
                "epsilon": epsilon,
                "bpb": bits / n_bytes,
                "cost": bits / own - 1.0,
                "decodes_per_token": sum(one.n_decodes for one in through) / n_tokens,
                "ghost_share": sum(one.share_sum for one in through) / n_bytes,
                "reanchors": sum(one.n_reanchors for one in through),
            }
        )
    return {"bytes": n_bytes, "tokens": n_tokens, "bpb_own": own / n_bytes, "bridge": bridge, "expert": name}


def main() -> None:
    """Print one JSON line per kind of text and expert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=6, help="of each kind")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    found = texts()
    for domain in dict.fromkeys(text.domain for text in found):
        some = [t for t in found if (t.domain, t.split) == (domain, "test")][: arguments.documents]
        scores, _ = scored(some, EPSILONS, arguments.threads, names=())
        about = {"domain": domain, "documents": len(some), "texts": digest(found), **ORIGIN}
        for name in scores[0].experts:
            print(json.dumps({**record(name, scores), **about}), flush=True)
        print(f"{domain}: {len(some)} documents", file=sys.stderr)


if __name__ == "__main__":
    main()
