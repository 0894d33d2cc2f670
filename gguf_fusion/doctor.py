"""What this installation can do: versions, devices, caches, and a decode tried out in a process of its own.

Native code that this CPU or driver cannot run ends the process at once; a child that dies tells more than a traceback.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gguf_fusion.devices import free_ram_bytes, total_ram_bytes, usable_cores
from gguf_fusion.hub.store import cache_dir

PACKAGES = ("gguf-fusion", "llama-cpp-python", "numpy", "numba", "click", "huggingface-hub")

_PROBE_SECONDS = 120

_IMPORT = """
import json
from gguf_fusion.experts import native, native_devices
native.start()
print(json.dumps({
    "system_info": native.system_info(), "offload": native_devices.supports_gpu_offload(),
    "rpc": native_devices.supports_rpc(), "built_from": native_devices.commit(),
    "devices": [{"name": d.name, "description": d.description, "kind": d.kind.value, "free_bytes": d.free_bytes,
                 "total_bytes": d.total_bytes} for d in native_devices.devices()],
}))
"""

_DECODE = """
import json, sys
from gguf_fusion.experts.llama import LlamaExpert
with LlamaExpert.load(sys.argv[1], n_ctx=256, n_gpu_layers=int(sys.argv[2])) as expert:
    row = expert.evaluate(expert.tokenize(b"Hello"))
    print(json.dumps({"finite": bool((row == row).all()), "tokens": expert.n_decoded}))
"""

_KERNELS = """
import json
import numpy as np
from gguf_fusion.kernels.masses import range_sum
row = np.arange(200, dtype=np.float32)
sums = np.array([row[at : at + 64].sum(dtype=np.float64) for at in range(0, 200, 64)])
print(json.dumps({"right": range_sum(row, sums, 1, 200) == 19900.0}))
"""

_SIGNALS = {
    getattr(signal, "SIGILL", None): (
        "an illegal instruction: this wheel needs CPU features you lack (it was built for a newer CPU); rebuild it: "
        "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
    ),
    getattr(signal, "SIGSEGV", None): (
        "a crash in native code (segmentation fault): a driver, or kernels that this CPU cannot run after all; try "
        "n_gpu_layers = 0, a newer driver, or a rebuild with CMAKE_ARGS=-DGGML_NATIVE=off"
    ),
    getattr(signal, "SIGKILL", None): "it was killed, most likely for want of memory; close other programs",
    getattr(signal, "SIGABRT", None): "native code gave up (abort); the lines above it on stderr say why",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. status: "ok", "warn" or "fail";  detail: what was found, and what to do where it is not ok."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True, slots=True)
class Probe:
    """How a child process ended: its JSON answer, or why there is none."""

    answer: Mapping[str, Any] | None
    problem: str = ""


def run_probe(code: str, arguments: Sequence[str] = (), *, python: Sequence[str] = (sys.executable,)) -> Probe:
    """Run Python code in a child process and read its last line as JSON; a death by signal becomes a diagnosis."""
    try:
        done = subprocess.run(
            [*python, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Probe(None, f"no answer within {_PROBE_SECONDS} seconds")
    except OSError as error:
        return Probe(None, f"the child process could not be started: {error}")
    if done.returncode < 0:
        return Probe(None, _SIGNALS.get(signal.Signals(-done.returncode), f"ended by signal {-done.returncode}"))
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        answer = json.loads(last[0])
    except ValueError:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return Probe(None, lines[-1] if lines else f"exit status {done.returncode} without a word")
    return Probe(answer if isinstance(answer, dict) else None)


def examine(model: Path | None, *, offline: bool = False) -> tuple[list[Check], dict[str, Any]]:
    """(findings, facts as plain data). ``model``: a GGUF file for the decode; None leaves that out."""
    facts: dict[str, Any] = {
        "versions": _versions(),
        "cpu": {"machine": platform.machine(), "cores": usable_cores(), "features": _cpu_features()},
        "ram": {"free_bytes": free_ram_bytes(), "total_bytes": total_ram_bytes()},
        "caches": {str(path): _size(path) for path in _caches()},
    }
    checks = [Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")]
    missing = [name for name, found in facts["versions"].items() if found is None and name != "gguf-fusion"]
    checks.append(
        Check("packages", "fail" if missing else "ok", f"missing: {', '.join(missing)}; run: pip install gguf-fusion")
        if missing
        else Check("packages", "ok", ", ".join(f"{name} {found}" for name, found in facts["versions"].items()))
    )
    native = run_probe(_IMPORT)
    facts["native"] = native.answer
    if native.answer is None:
        checks.append(Check("llama.cpp", "fail", native.problem))
    else:
        checks.append(Check("llama.cpp", "ok", f"{native.answer['built_from']}; {native.answer['system_info']}"))
        checks.append(_offload(native.answer))
        checks.append(_rpc(native.answer))
        checks.append(_decode(model, facts))
    kernels = run_probe(_KERNELS)
    right = kernels.answer is not None and kernels.answer["right"]
    facts["kernels"] = right
    checks.append(
        Check("kernels", "ok" if right else "fail", "compiled" if right else kernels.problem or "wrong numbers")
    )
    free = facts["ram"]["free_bytes"]
    checks.append(
        Check(
            "memory",
            "ok" if free > 2 << 30 else "warn",
            f"{free / 1e9:.1f} of {facts['ram']['total_bytes'] / 1e9:.1f} GB free",
        )
    )
    checks.append(_writable())
    checks.append(_hub(offline=offline))
    return checks, facts


def _offload(answer: Mapping[str, Any]) -> Check:
    cards = [device for device in answer["devices"] if device["kind"] in ("gpu", "shared")]
    if cards:
        found = ", ".join(f"{d['name']} ({d['description']}, {d['free_bytes'] / 1e9:.1f} GB free)" for d in cards)
        return Check("offload", "ok", found)
    if answer["offload"]:
        return Check("offload", "warn", "built for a GPU, but no device answers; check the driver")
    return Check(
        "offload", "ok",
        "built for the CPU only, layers cannot go to a GPU; for NVIDIA cards: CMAKE_ARGS=-DGGML_CUDA=on pip install "
        "--force-reinstall --no-cache-dir llama-cpp-python",
    )  # fmt: skip


def _rpc(answer: Mapping[str, Any]) -> Check:
    if answer["rpc"]:
        return Check("rpc", "ok", "experts can lie on other machines (gguf-fusion worker there, --rpc HOST:PORT here)")
    return Check(
        "rpc", "ok",
        "built without: experts stay on this machine. To use others: CMAKE_ARGS=-DGGML_RPC=on pip install "
        "--force-reinstall --no-deps --no-cache-dir llama-cpp-python",
    )  # fmt: skip


def _decode(model: Path | None, facts: dict[str, Any]) -> Check:
    if model is None:
        return Check("decode", "warn", "no model on this machine to try; run: gguf-fusion pull pocket")
    probe = run_probe(_DECODE, (str(model), "0"))
    facts["decode"] = probe.answer
    if probe.answer is None:
        return Check("decode", "fail", probe.problem)
    good = bool(probe.answer["finite"])
    return Check(
        "decode", "ok" if good else "fail", f"{model.name}: {'finite numbers' if good else 'NaN in its output'}"
    )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _cpu_features() -> list[str]:
    """The instruction sets that matter here, where the system tells (Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    wanted = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "amx_tile", "neon", "asimd", "sve")
    flags = next(
        (line.partition(":")[2].split() for line in text.splitlines() if line.startswith(("flags", "Features"))), []
    )
    return [flag for flag in wanted if flag in flags]


def _caches() -> list[Path]:
    home = cache_dir()
    hub = Path(
        os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface") / "hub"
    )
    return [path for path in (home, hub) if path.is_dir()]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _writable() -> Check:
    home = cache_dir()
    try:
        home.mkdir(parents=True, exist_ok=True)
        probe = home / f".doctor-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return Check(
            "cache", "fail", f"{home} cannot be written: {error.strerror}; set GGUF_FUSION_CACHE to another folder"
        )
    return Check("cache", "ok", f"{home}, {_size(home) / 1e9:.2f} GB")


def _hub(*, offline: bool) -> Check:
    from gguf_fusion.hub import is_offline, reachable

    if is_offline(offline):
        return Check("hub", "ok", "not asked: offline")
    problem = reachable()
    return Check("hub", "warn" if problem else "ok", problem or "reachable")
