"""What fusion costs beside one expert alone and beside fusion as it is usually written, in one run, in turn.

    alone   each expert by itself through llama-cpp-python's ``Llama.generate``
    naive   three ``Llama`` objects: softmax of each, every token mapped to the first piece of its text in the first
            expert's vocabulary, laws mixed, one token drawn, its text fed to every other expert in its own tokens
    fused   the engine, once per setting of ``SETTINGS``

Every repetition runs all ways one after the other on the same prompt and seed, so that whatever else the machine does
hits all of them; a ratio is the geometric mean over the repetitions with a 95 % interval (Student's t on logarithms).
Contexts: a short prompt, or 2,000 tokens of Python code that are read once before the clock starts. The clock of a
prefill is its own record. END is banned, so that every text has the wanted length.

    python bench/decoding.py --threads 1 --context short >> bench/results/decoding.jsonl
    python bench/decoding.py --threads 1 --context prefill >> bench/results/prefill.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
from origin import ORIGIN

from gguf_fusion import Ensemble, hub
from gguf_fusion.records import END

POCKET = ("smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct")
TEXTS = (
    "A bench is a long seat for several people. It may stand in a park, in a hall, or at a table in a workshop, where",
    'def word_counts(path: str) -> dict[str, int]:\n    """Count the words of a text file, in lower case."""\n',
    "# Installation\n\nThe package needs Python 3.11 or later. Create a virtual environment first, then install",
    "Der Fluss entspringt in den Bergen und fließt durch drei Länder, bevor er",
    "The committee met on Tuesday to discuss the budget for the coming year. The chair said that",
)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "fused": {},
    "fused, default strategy": {"strategy": None},
    "fused, flash": {"flash": True},
    "fused, flash, lazy": {"flash": True, "lazy": True},
    "fused, flash, prefetch exact": {"flash": True, "prefetch": "exact"},
    "fused, flash, lazy and prefetch exact": {"flash": True, "lazy": True, "prefetch": "exact"},
    "fused, prefetch law": {"prefetch": "law"},
}
"""What is measured of the engine; ``linear`` is what the naive way computes, so all are linear unless they say so."""

T_95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t, 97.5 %, by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Took:
    """One text: seconds, its bytes, its tokens (of the expert that counts them), tokens decoded by all experts."""

    seconds: float
    n_bytes: int
    n_tokens: int
    n_decodes: int
    split: Mapping[str, float]
    facts: Mapping[str, float] = field(default_factory=dict)
    text: bytes = b""


def plain_llama(name: str, threads: int, n_ctx: int) -> llama_cpp.Llama:
    """The high-level object, loaded as our experts are: weights not repacked, which it has no argument for.

    On CPUs with AMX the kernels behind repacked weights end the process at the first batch.
    """
    native = llama_cpp.llama_cpp
    defaults = native.llama_model_default_params

    def without_repacking() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    native.llama_model_default_params = without_repacking
    try:
        return llama_cpp.Llama(
            str(hub.locate(name)), n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, verbose=False
        )
    finally:
        native.llama_model_default_params = defaults


class Alone:
    """One expert through ``Llama.generate``."""

    def __init__(self, llama: llama_cpp.Llama) -> None:
        self.llama = llama

    def prefill(self, text: str) -> float:
        """Seconds to read a prompt from nothing."""
        tokens = self.llama.tokenize(text.encode(), special=True)
        self.llama.reset()
        began = time.perf_counter()
        self.llama.eval(tokens)
        return time.perf_counter() - began

    def write(self, text: str, n_bytes: int, temperature: float, seed: int) -> Took:
        """About ``n_bytes`` after a prompt that is resident already."""
        llama = self.llama
        prompt = llama.tokenize(text.encode(), special=True)
        llama.set_seed(seed)
        steps = llama.generate(prompt, top_k=0, top_p=1.0, min_p=0.05, temp=temperature, repeat_penalty=1.0)
        tokens = [next(steps)]  # the prompt's last token is evaluated here
        began = time.perf_counter()
        written = 0
        while written < n_bytes:
            tokens.append(next(steps))
            written += max(1, len(llama.detokenize([tokens[-1]])))
        seconds = time.perf_counter() - began
        return Took(seconds, written, len(tokens) - 1, len(tokens) - 1, {})


class Naive:
    """Three ``Llama`` objects, laws mixed in the first one's vocabulary."""

    def __init__(self, llamas: list[llama_cpp.Llama]) -> None:
        self.llamas = llamas
        first = llamas[0]
        self.maps = []
        for llama in llamas[1:]:
            pieces = [llama.detokenize([i]) for i in range(llama.n_vocab())]
            heads = [first.tokenize(piece, add_bos=False)[:1] if piece else [] for piece in pieces]
            self.maps.append(np.array([head[0] if head else first.token_eos() for head in heads]))
        self.banned = [i for i in range(first.n_vocab()) if not first.detokenize([i])]

    def write(self, text: str, n_bytes: int, temperature: float, seed: int) -> Took:
        """About ``n_bytes`` after a prompt."""
        rng = np.random.default_rng(seed)
        for llama in self.llamas:
            tokens = llama.tokenize(text.encode(), special=True)
            same = llama.n_tokens >= len(tokens) and list(llama.input_ids[: len(tokens)]) == tokens
            llama.n_tokens = len(tokens) - 1 if same else 0
            llama.eval(tokens[llama.n_tokens :])
        written = n_tokens = n_decodes = 0
        spent = 0.0
        began = time.perf_counter()
        while written < n_bytes:
            token = self.draw(temperature, rng)
            piece = self.llamas[0].detokenize([token])
            written += len(piece)
            n_tokens += 1
            for llama in self.llamas:
                ids = [token] if llama is self.llamas[0] else llama.tokenize(piece, add_bos=False)
                asked = time.perf_counter()
                llama.eval(ids)
                np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (1,))  # waits for the row
                spent += time.perf_counter() - asked
                n_decodes += len(ids)
        seconds = time.perf_counter() - began
        return Took(seconds, written, n_tokens, n_decodes, {"experts": spent / seconds, "other": 1 - spent / seconds})

    def draw(self, temperature: float, rng: np.random.Generator) -> int:
        """One token of the first vocabulary."""
        mixed = np.zeros(self.llamas[0].n_vocab())
        for i, llama in enumerate(self.llamas):
            pointer = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
            logits = np.ctypeslib.as_array(pointer, (llama.n_vocab(),))
            law = np.exp(logits - logits.max())
            law /= law.sum()
            mixed += law if i == 0 else np.bincount(self.maps[i - 1], weights=law, minlength=len(mixed))
        mixed[self.banned] = 0.0
        if temperature == 0.0:
            return int(mixed.argmax())
        mixed = (mixed / mixed.max()) ** (1.0 / temperature)
        mixed[mixed < 0.05] = 0.0
        return int(rng.choice(len(mixed), p=mixed / mixed.sum()))


class FusedWay:
    """The engine in one setting."""

    def __init__(self, ensemble: Ensemble, setting: Mapping[str, Any], reuse: bool) -> None:
        self.ensemble, self.reuse = ensemble, reuse
        self.ahead = {"lazy": setting.get("lazy", False), "prefetch": setting.get("prefetch", "off")}
        self.strategy = setting.get("strategy", "linear")

    def prefill(self, text: str) -> float:
        """Seconds to read a prompt from nothing."""
        return self.ensemble.complete(text, max_bytes=1, temperature=0.0, seed=1).timings.prefill_s

    def write(self, text: str, n_bytes: int, temperature: float, seed: int) -> Took:
        """``n_bytes`` after a prompt."""
        self.ensemble.read_ahead(**self.ahead)
        reply = self.ensemble.generate(
            text, max_bytes=n_bytes, temperature=temperature, min_p=0.05, seed=seed, logit_bias={END: -100.0},
            reuse=self.reuse, strategy=self.strategy,
        )  # fmt: skip
        steps = list(reply)
        spent, n_tokens = reply.timings, reply.usage.generated_tokens
        seconds = spent.total_s - spent.prefill_s
        parts = {"experts": spent.decode_s, "bridge": spent.bridge_s, "fusion": spent.fusion_s,
                 "sampling": spent.sampling_s}  # fmt: skip
        parts["other"] = max(0.0, seconds - sum(parts.values()))
        whole = sum(parts.values())
        text = b"".join(step.data for step in steps)
        split = {key: s / whole for key, s in parts.items()}
        facts = {"lazy": spent.lazy_steps / len(text), "ahead": spent.rows_ahead / spent.decodes,
                 "saved": spent.rows_saved / spent.decodes}  # fmt: skip
        return Took(seconds, spent.bytes, n_tokens, spent.decodes, split, facts, text)


def long_text(n_bytes: int) -> str:
    """Python code of the standard library."""
    return (inspect.getsource(textwrap) + inspect.getsource(argparse))[:n_bytes]


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(geometric mean, from, to) of at least five paired ratios."""
    logs = np.log(ratios)
    half = T_95[len(logs) - 1] * float(logs.std(ddof=1)) / len(logs) ** 0.5
    mean = float(logs.mean())
    return tuple(float(np.exp(x)) for x in (mean, mean - half, mean + half))  # type: ignore[return-value]


Way = Alone | Naive | FusedWay


def records(
    ways: Mapping[str, Way], slowest: str, options: argparse.Namespace, sampled: bool
) -> Iterator[dict[str, Any]]:
    """One record per way: medians, and ratios of bytes per second to the naive way and to the slowest expert."""
    took: dict[str, list[Took]] = {name: [] for name in ways}
    for i in range(-1, options.repetitions):
        text = long_text(options.long_bytes) if options.context == "long" else TEXTS[i % len(TEXTS)]
        for name, way in ways.items():
            found = way.write(text, 16 if i < 0 else options.bytes, 0.8 if sampled else 0.0, 100 + i)
            if i >= 0:
                took[name].append(found)
    rates = {name: [t.n_bytes / t.seconds for t in found] for name, found in took.items()}
    for name, found in took.items():
        n_tokens, n_experts = sum(t.n_tokens for t in found), 1 if isinstance(ways[name], Alone) else len(POCKET)
        record: dict[str, Any] = {
            "what": "write", "way": name, "threads": options.threads, "context": options.context,
            "draw": "sampled" if sampled else "greedy", "repetitions": len(found),
            "bytes_per_s": statistics.median(rates[name]),
            "tokens_per_s": statistics.median(t.n_tokens / t.seconds for t in found),
            "decodes_per_token": sum(t.n_decodes for t in found) / n_tokens / n_experts,
            "facts": {key: statistics.mean(t.facts[key] for t in found) for key in found[0].facts},
            "split": {key: statistics.mean(t.split[key] for t in found) for key in found[0].split},
        }  # fmt: skip
        for key, other in (("to_naive", "naive"), ("to_slowest", slowest)):
            mean, low, high = interval([a / b for a, b in zip(rates[name], rates[other], strict=True)])
            record |= {key: mean, f"{key}_from": low, f"{key}_to": high}
        plain = took.get("fused, flash")
        if plain and name.startswith("fused, flash, "):
            record["same_text"] = all(a.text == b.text for a, b in zip(found, plain, strict=True))
        yield record | ORIGIN | {"date": time.strftime("%Y-%m-%d")}


def prefills(ways: Mapping[str, Way], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds to read a prompt: each expert alone, their sum (which is the naive way's), and the engine."""
    text = long_text(options.prefill_bytes)
    took: dict[str, list[float]] = {}
    for _ in range(options.repetitions):
        alone = {name: way.prefill(text) for name, way in ways.items() if isinstance(way, Alone)}
        fused = next(way for way in ways.values() if isinstance(way, FusedWay)).prefill(text)
        for name, seconds in {**alone, "naive": sum(alone.values()), "fused": fused}.items():
            took.setdefault(name, []).append(seconds)
    for name, seconds_of in took.items():
        mean, low, high = interval([b / a for a, b in zip(seconds_of, took["naive"], strict=True)])
        yield {"what": "prefill", "way": name, "threads": options.threads, "context": "prefill", "draw": "none",
               "repetitions": len(seconds_of), "bytes_per_s": len(text) / statistics.median(seconds_of),
               "to_naive": mean, "to_naive_from": low, "to_naive_to": high, **ORIGIN}  # fmt: skip


def main() -> None:
    """Print one JSON line per way and condition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", choices=("short", "long", "prefill"), default="short")
    parser.add_argument("--draws", nargs="+", choices=("greedy", "sampled"), default=["greedy", "sampled"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=160)
    parser.add_argument("--long-bytes", type=int, default=7200)
    parser.add_argument("--prefill-bytes", type=int, default=1800)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--lanes", choices=("auto", "serial", "lanes"), default="auto")
    options = parser.parse_args()
    if not 5 <= options.repetitions <= 10:
        parser.error("--repetitions: expected 5 to 10")
    n_ctx = 4096 if options.context == "long" else 1024
    llamas = [plain_llama(name, options.threads, n_ctx) for name in POCKET]
    with contextlib.ExitStack() as stack:
        loaded: dict[bool, Ensemble] = {}
        for flash in sorted({bool(SETTINGS[name].get("flash")) for name in options.settings}):
            loaded[flash] = stack.enter_context(
                Ensemble.from_registry(
                    "pocket", n_threads=options.threads, n_ctx=n_ctx, lanes=options.lanes, offline=True,
                    flash_attn=True if flash else None, prefetch="law",
                )
            )  # fmt: skip
        ways: dict[str, Way] = {name: Alone(llama) for name, llama in zip(POCKET, llamas, strict=True)}
        ways["naive"] = Naive(llamas)
        reuse = options.context == "long"
        ways |= {
            name: FusedWay(loaded[bool(SETTINGS[name].get("flash"))], SETTINGS[name], reuse)
            for name in options.settings
        }
        parts: list[Callable[[], Iterator[dict[str, Any]]]] = (
            [lambda: prefills(ways, options)]
            if options.context == "prefill"
            else [lambda draw=draw: records(ways, POCKET[-1], options, draw == "sampled") for draw in options.draws]
        )
        for part in parts:
            for record in part():
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
