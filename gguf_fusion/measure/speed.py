"""How fast experts and ensembles are, in llama-bench's terms and field names, with what fusing adds."""

from __future__ import annotations

import itertools
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np

from gguf_fusion.arrays import I32
from gguf_fusion.devices import resident_bytes
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.gguf_info import ModelInfo
from gguf_fusion.records import END

TEXT = (
    "A bench is a long seat for several people. It may stand in a park, in a hall, or at a table in a workshop, where "
    "things are made and tested on it. What is measured there should be measured again, by someone else, and agree. "
)
"""Text that fills a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination of settings to measure."""

    n_prompt: int
    n_gen: int
    n_threads: int
    n_ctx: int
    type_k: str
    type_v: str
    n_gpu_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. Times are in nanoseconds, rates per second; ``samples`` are single repetitions.

    test : "pp512", "tg128", or "fused128" for an ensemble;  extra : what only ensembles have
    """

    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    backends: str
    test: str
    case: Case
    samples_ns: tuple[int, ...]
    n_tokens: int
    peak_rss_bytes: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of every repetition."""
        return [1e9 * self.n_tokens / ns for ns in self.samples_ns]

    @property
    def avg_ts(self) -> float:
        """Mean tokens per second."""
        return float(np.mean(self.rates))

    @property
    def stddev_ts(self) -> float:
        """Sample standard deviation of the tokens per second; 0 for one repetition."""
        return float(np.std(self.rates, ddof=1)) if len(self.rates) > 1 else 0.0

    def as_json(self) -> dict[str, Any]:
        """llama-bench's field names, and ours."""
        is_prompt = self.test.startswith("pp")
        return {
            "build_commit": version("llama-cpp-python"), "cpu_info": platform.processor() or platform.machine(),
            "backends": self.backends, "model_filename": self.model_filename, "model_type": self.model_type,
            "model_size": self.model_size, "model_n_params": self.model_n_params, "n_batch": 512, "n_ubatch": 128,
            "n_threads": self.case.n_threads, "type_k": self.case.type_k, "type_v": self.case.type_v,
            "n_gpu_layers": self.case.n_gpu_layers, "n_ctx": self.case.n_ctx,
            "n_prompt": self.case.n_prompt if is_prompt else 0, "n_gen": 0 if is_prompt else self.case.n_gen,
            "n_depth": 0, "test": self.test, "test_time": datetime.now(tz=UTC).isoformat(timespec="seconds"),
            "avg_ns": round(float(np.mean(self.samples_ns))),
            "stddev_ns": round(float(np.std(self.samples_ns, ddof=1))) if len(self.samples_ns) > 1 else 0,
            "avg_ts": self.avg_ts, "stddev_ts": self.stddev_ts, "samples_ns": list(self.samples_ns),
            "samples_ts": self.rates, "peak_rss_bytes": self.peak_rss_bytes, **self.extra,
        }  # fmt: skip


class Peak:
    """The largest resident memory of this process while a block runs, sampled every 20 ms."""

    def __enter__(self) -> Peak:
        self.bytes = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.bytes = max(self.bytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, resident_bytes())


def prompt_ids(expert: LlamaExpert, n: int) -> I32:
    """int32[n]: tokens of running text, with BOS where the model wants one."""
    bos = expert.vocabulary.bos_id
    ids = expert.tokenize((TEXT * (2 + n // 40)).encode())
    ids = np.resize(ids, n) if bos is None else np.concatenate([[bos], np.resize(ids, n - 1)])
    return ids.astype(np.int32)


def expert_rows(
    expert: LlamaExpert, info: ModelInfo, case: Case, repetitions: int, tell: Callable[[str], None], backends: str
) -> Iterator[Row]:
    """Yield the prompt and the generation row of one expert, each after a warm-up of the same shape."""
    with Peak() as peak:
        for test, n, run in (("pp", case.n_prompt, _read), ("tg", case.n_gen, _write)):
            if not n:
                continue
            samples = []
            for i in range(repetitions + 1):
                tell(f"{expert.name} {test}{n}: {'warm-up' if not i else f'{i} of {repetitions}'}")
                samples.append(run(expert, n))
            yield Row(
                model_filename=str(info.path), model_type=f"{info.architecture} {info.quant}",
                model_size=info.size_bytes, model_n_params=info.n_params, backends=backends, test=f"{test}{n}",
                case=case, samples_ns=tuple(samples[1:]), n_tokens=n,
                peak_rss_bytes=max(peak.bytes, resident_bytes()), extra={"expert": expert.name},
            )  # fmt: skip


def _read(expert: LlamaExpert, n: int) -> int:
    ids = prompt_ids(expert, n)
    expert.forget()
    began = time.perf_counter_ns()
    expert.evaluate(ids)
    return time.perf_counter_ns() - began


def _write(expert: LlamaExpert, n: int) -> int:
    ids = prompt_ids(expert, n + 1)
    expert.forget()
    expert.evaluate(ids[:1])
    began = time.perf_counter_ns()
    for i in range(1, n + 1):
        expert.evaluate(ids[: i + 1])
    return time.perf_counter_ns() - began


def ensemble_row(
    ensemble: Ensemble,
    infos: Sequence[ModelInfo],
    case: Case,
    repetitions: int,
    tell: Callable[[str], None],
    backends: str,
) -> Row:
    """Fused generation of ``n_gen`` pieces after a short prompt, fusing and sampling included; END is not drawn."""
    samples, timings = [], []
    with Peak() as peak:
        for i in range(repetitions + 1):
            tell(f"{' + '.join(ensemble.names)}: {'warm-up' if not i else f'{i} of {repetitions}'}")
            done = ensemble.complete(
                TEXT,
                temperature=0.0,
                max_tokens=case.n_gen,
                max_bytes=16 * case.n_gen,
                logit_bias={END: -100.0},
                seed=0,
            )
            spent = done.timings
            samples.append(round(1e9 * (spent.total_s - spent.prefill_s)))
            timings.append(spent)
    kept = timings[1:]
    n_tokens, n_bytes = kept[0].tokens, kept[0].bytes
    seconds = [ns / 1e9 for ns in samples[1:]]
    parts = {
        part: 1e3 * float(np.mean([getattr(one, part) / max(1, one.tokens) for one in kept]))
        for part in ("decode_s", "bridge_s", "fusion_s", "sampling_s")
    }
    extra = {
        "experts": list(ensemble.names), "strategy": ensemble.strategy,
        "bytes_per_s": float(np.mean([n_bytes / s for s in seconds])),
        "ms_per_token": {"experts": parts["decode_s"], "bridge": parts["bridge_s"], "fusion": parts["fusion_s"],
                         "sampling": parts["sampling_s"]},
        "decodes_per_token": float(np.mean([one.decodes / max(1, one.tokens) for one in kept])),
        "ttft_s": float(np.mean([one.prefill_s for one in kept])),
    }  # fmt: skip
    return Row(
        model_filename=", ".join(str(info.path) for info in infos), model_type="fused",
        model_size=sum(info.size_bytes for info in infos), model_n_params=sum(info.n_params for info in infos),
        backends=backends, test=f"fused{case.n_gen}", case=case, samples_ns=tuple(samples[1:]), n_tokens=n_tokens,
        peak_rss_bytes=peak.bytes, extra=extra,
    )  # fmt: skip


def cases(**ranges: Sequence[Any]) -> list[Case]:
    """Every combination of the given values, the last setting fastest."""
    return [Case(**dict(zip(ranges, values, strict=True))) for values in itertools.product(*ranges.values())]
