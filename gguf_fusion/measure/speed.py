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
from pathlib import Path
from typing import Any

import numpy as np

from gguf_fusion.arrays import I32
from gguf_fusion.config import ExpertSpec
from gguf_fusion.devices import DeviceInfo, DeviceKind, resident_bytes, usable_cores
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.experts import native_devices
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.settings import Settings
from gguf_fusion.gguf_info import ModelInfo, read
from gguf_fusion.load import load_expert
from gguf_fusion.options import Options
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
    peak_vram_bytes: int
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
            "model_size": self.model_size, "model_n_params": self.model_n_params, "n_batch": Settings().n_batch,
            "n_ubatch": Settings().n_ubatch,
            "n_threads": self.case.n_threads, "type_k": self.case.type_k, "type_v": self.case.type_v,
            "n_gpu_layers": self.case.n_gpu_layers, "n_ctx": self.case.n_ctx,
            "n_prompt": self.case.n_prompt if is_prompt else 0, "n_gen": 0 if is_prompt else self.case.n_gen,
            "n_depth": 0, "test": self.test, "test_time": datetime.now(tz=UTC).isoformat(timespec="seconds"),
            "avg_ns": round(float(np.mean(self.samples_ns))),
            "stddev_ns": round(float(np.std(self.samples_ns, ddof=1))) if len(self.samples_ns) > 1 else 0,
            "avg_ts": self.avg_ts, "stddev_ts": self.stddev_ts, "samples_ns": list(self.samples_ns),
            "samples_ts": self.rates, "peak_rss_bytes": self.peak_rss_bytes,
            "peak_vram_bytes": self.peak_vram_bytes, **self.extra,
        }  # fmt: skip


class Peak:
    """The largest memory while a block runs: of this process (every 20 ms), and of the GPUs.

    bytes : resident, mapped files included;  vram_bytes : what the GPUs' free memory fell by since the block began, 0
    where there is none. Load inside the block.
    """

    def __init__(self, devices: Callable[[], Sequence[DeviceInfo]] = native_devices.devices) -> None:
        self._devices = devices
        self._has_gpu = any(device.kind is DeviceKind.GPU for device in devices())

    def __enter__(self) -> Peak:
        self.bytes = resident_bytes()
        self._free_before = self._least_free = self._free()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    @property
    def vram_bytes(self) -> int:
        """See the class."""
        return self._free_before - self._least_free

    def look(self) -> Peak:
        """Take the present into account."""
        self.bytes = max(self.bytes, resident_bytes())
        self._least_free = min(self._least_free, self._free())
        return self

    def _free(self) -> int:
        if not self._has_gpu:
            return 0
        return sum(device.free_bytes for device in self._devices() if device.kind is DeviceKind.GPU)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.look()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.look()


def prompt_ids(expert: LlamaExpert, n: int) -> I32:
    """int32[n]: tokens of running text, with BOS where the model wants one."""
    bos = expert.vocabulary.bos_id
    ids = expert.tokenize((TEXT * (2 + n // 40)).encode())
    ids = np.resize(ids, n) if bos is None else np.concatenate([[bos], np.resize(ids, n - 1)])
    return ids.astype(np.int32)


def expert_rows(
    expert: LlamaExpert, info: ModelInfo, case: Case, repetitions: int, tell: Callable[[str], None], backends: str,
    peak: Peak,
) -> Iterator[Row]:  # fmt: skip
    """Yield the prompt and the generation row of one expert, each after a warm-up of the same shape.

    ``peak`` is open since before the expert was loaded.
    """
    for test, n, run in (("pp", case.n_prompt, _read), ("tg", case.n_gen, _write)):
        if not n:
            continue
        samples = []
        for i in range(repetitions + 1):
            tell(f"{expert.name} {test}{n}: {'warm-up' if not i else f'{i} of {repetitions}'}")
            samples.append(run(expert, n))
        peak.look()
        yield Row(
            model_filename=str(info.path), model_type=f"{info.architecture} {info.quant}",
            model_size=info.size_bytes, model_n_params=info.n_params, backends=backends, test=f"{test}{n}",
            case=case, samples_ns=tuple(samples[1:]), n_tokens=n, peak_rss_bytes=peak.bytes,
            peak_vram_bytes=peak.vram_bytes, extra={"expert": expert.name},
        )  # fmt: skip


def speed_of(file: str, n_ctx: int, n_threads: int, n_prompt: int, n_gen: int, repetitions: int) -> dict[str, float]:
    """Speed and peak memory of one model file, for a process of its own. ``n_threads``: 0 = the usable cores."""
    case = Case(
        n_prompt=n_prompt, n_gen=n_gen, n_threads=n_threads or usable_cores(), n_ctx=n_ctx, type_k="f16",
        type_v="f16", n_gpu_layers=0,
    )  # fmt: skip
    path = Path(file)
    spec = ExpertSpec(name=path.stem, sources=())
    with Peak() as peak, load_expert(spec, path, Options(n_ctx=n_ctx, n_threads=case.n_threads)) as expert:
        prompt, generation = expert_rows(expert, read(path), case, repetitions, lambda text: None, "CPU", peak)
    return {
        "pp_ts": prompt.avg_ts, "pp_sd": prompt.stddev_ts, "tg_ts": generation.avg_ts, "tg_sd": generation.stddev_ts,
        "peak_bytes": generation.peak_rss_bytes,
    }  # fmt: skip


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
    ensemble: Ensemble, infos: Sequence[ModelInfo], case: Case, repetitions: int, tell: Callable[[str], None],
    backends: str, peak: Peak,
) -> Row:  # fmt: skip
    """Fused generation of ``n_gen`` pieces after a short prompt, fusing and sampling included; END is not drawn."""
    samples, timings = [], []
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
    peak.look()
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
        peak_rss_bytes=peak.bytes, peak_vram_bytes=peak.vram_bytes, extra=extra,
    )  # fmt: skip


def cases(**ranges: Sequence[Any]) -> list[Case]:
    """Every combination of the given values, the last setting fastest."""
    return [Case(**dict(zip(ranges, values, strict=True))) for values in itertools.product(*ranges.values())]
