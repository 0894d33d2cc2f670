"""What does the byte bridge cost one expert alone? Bits per byte of its own tokens against the bridge, same text.

Teacher-forced on text that is installed on this machine. Rows of the text's canonical tokens come from batches, as in
llama-perplexity; rows of other segmentations are evaluated beside them. A segmentation that left the canonical one and
came back is continued from there once 16 bytes agree, for both cost and context are then the same but for the far past.

    python bench/fidelity.py --bytes 2000 [--experts NAME ...] [--epsilon 0.15 ...] >> bench/results/fidelity.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
from origin import ORIGIN

from gguf_fusion import hub
from gguf_fusion.bridge.store import cached_byte_tables
from gguf_fusion.cover.prefill import token_logprob
from gguf_fusion.cover.tree import DEFAULT_EPSILON, EXACT_EPSILON, CoverTree
from gguf_fusion.experts.llama import LlamaExpert

POCKET = ("smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct")
ROWS = 32
KEEP_BYTES = 16
MEMO = 48


def manual(path: Path) -> bytes:
    """A manual page without its markup."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    text = re.sub(r"\\f[BIRP]|\\-|\\&", lambda m: "-" if m[0] == "\\-" else "", text)
    return re.sub(r"^[.'].*\n", "", text, flags=re.MULTILINE).encode()


def domains(n_bytes: int) -> dict[str, bytes]:
    """Installed text by domain; domains whose files are missing are left out."""
    lib = Path(sysconfig.get_path("stdlib"))
    share = Path("/usr/share")
    sources = {
        "code": lambda: (lib / "textwrap.py").read_bytes(),
        "technical": lambda: manual(share / "man/man7/signal.7.gz"),
        "legal prose": lambda: (share / "common-licenses/GPL-3").read_bytes()[4000:],
        "tables": lambda: (lib / "http/__init__.py").read_bytes()[600:] + (lib / "stat.py").read_bytes(),
        "German": lambda: manual(sorted((share / "man/de/man1").glob("*.gz"))[5]),
    }
    texts = {}
    for name, read in sources.items():
        try:
            texts[name] = read()[:n_bytes].decode("utf-8", "ignore").encode()
        except (OSError, IndexError) as error:
            print(f"{name}: left out ({error})", file=sys.stderr)
    return texts


class TeacherForced:
    """An expert that serves the rows of one known text from batches."""

    def __init__(self, expert: LlamaExpert, text: bytes) -> None:
        self.expert, self.name, self.vocabulary = expert, expert.name, expert.vocabulary
        self.tokenize = expert.tokenize
        bos = self.vocabulary.bos_id
        ids = expert.tokenize(text)
        self.ids = ids if bos is None else np.concatenate([[bos], ids]).astype(np.int32)
        self.ends = self._ends(self.ids)
        self.rows, self.first, self.memo = np.zeros((0, 0), np.float32), 0, {}

    def _ends(self, ids: np.ndarray) -> np.ndarray:
        starts = self.vocabulary.piece_start
        return np.cumsum(np.where(self.vocabulary.kinds[ids] == 0, starts[ids + 1] - starts[ids], 0))

    def _rejoined(self, path: np.ndarray) -> np.ndarray:
        n = min(len(path), len(self.ids))
        if not (differs := np.flatnonzero(path[:n] != self.ids[:n])).size:
            return path
        ends = self._ends(path)
        agreed = np.flatnonzero((ends <= ends[-1] - KEEP_BYTES) & np.isin(ends, self.ends))
        if not agreed.size or agreed[-1] < differs[0]:
            return path
        kept = int(np.searchsorted(self.ends, ends[agreed[-1]])) + 1
        return np.concatenate([self.ids[:kept], path[agreed[-1] + 1 :]]).astype(np.int32)

    def evaluate(self, path: np.ndarray, n_rows: int = 1, **_: object) -> np.ndarray:
        path = self._rejoined(np.asarray(path, np.int32))
        n = len(path)
        if np.array_equal(path, self.ids[:n]) and n > self.first:
            while n > self.first + len(self.rows):
                self.first += len(self.rows)
                stop = min(self.first + ROWS, len(self.ids))
                self.rows = self.expert.evaluate(self.ids[:stop], stop - self.first).copy()
            return self.rows[n - 1 - self.first : n - self.first]
        key = path.tobytes()
        if key not in self.memo:
            if len(self.memo) >= MEMO:
                self.memo.pop(next(iter(self.memo)))
            self.memo[key] = self.expert.evaluate(path, branch=True).copy()
        return self.memo[key]


def measure(expert: LlamaExpert, text: bytes, epsilons: list[float]) -> dict[str, object]:
    """One record: own bits per byte and, per epsilon, bridge bits per byte, decodes per token, ghost share."""
    teacher = TeacherForced(expert, text)
    n_context = 4 + (expert.vocabulary.bos_id is not None)
    context = teacher.ids[:n_context]
    rest = text[teacher.ends[n_context - 1] :]
    tables = cached_byte_tables(expert.vocabulary)
    trees = [CoverTree(teacher, tables, epsilon=epsilon) for epsilon in epsilons]
    for tree in trees:
        tree._begin(context)  # no prefill: the teacher serves it
        tree.law()
    bits, started = np.zeros(len(trees)), [tree.stats.n_decodes for tree in trees]
    for byte in rest:
        for i, tree in enumerate(trees):
            probs, ghost_share = tree.law()
            stand_in = float(tree.stand_in()[byte])
            bits[i] -= np.log2(probs[byte] + ghost_share * stand_in)
            tree.push(byte, stand_in)
    again = TeacherForced(expert, text)
    own = -sum(
        token_logprob(again.evaluate(again.ids[:i])[0], int(again.ids[i])) for i in range(n_context, len(again.ids))
    ) / np.log(2)
    n_tokens = len(teacher.ids) - n_context
    return {
        "bytes": len(rest),
        "tokens": n_tokens,
        "bpb_own": own / len(rest),
        "bridge": [
            {
                "epsilon": epsilon,
                "bpb": b / len(rest),
                "cost": b / own - 1.0,
                "decodes_per_token": (tree.stats.n_decodes - n0) / n_tokens,
                "ghost_share": tree.stats.ghost_share_sum / max(1, tree.stats.n_pushed),
                "reanchors": tree.stats.n_reanchors,
            }
            for epsilon, b, tree, n0 in zip(epsilons, bits, trees, started, strict=True)
        ],
    }


def main() -> None:
    """Print one JSON line per expert and domain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=2000)
    parser.add_argument("--experts", nargs="+", default=POCKET)
    parser.add_argument("--epsilon", nargs="+", type=float, default=[DEFAULT_EPSILON, EXACT_EPSILON])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    for name in arguments.experts:
        expert = LlamaExpert.load(hub.locate(name), name=name, n_ctx=4096, max_rows=ROWS, n_threads=arguments.threads)
        for domain, text in domains(arguments.bytes).items():
            began = time.time()
            record = measure(expert, text, arguments.epsilon)
            record |= {"expert": name, "domain": domain, "seconds": round(time.time() - began, 1)}
            record |= ORIGIN
            print(json.dumps(record), flush=True)
        expert.close()


if __name__ == "__main__":
    main()
