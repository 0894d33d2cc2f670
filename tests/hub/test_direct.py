"""Files behind plain web addresses, and files that are simply there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_fusion import hub
from gguf_fusion.config import Registry
from gguf_fusion.errors import HubError, ModelFileError, NoSpaceError, NotCachedError, UsageError
from gguf_fusion.hub import direct, store

Server = Any  # tests/hub/conftest.py: FakeHub
Notes = Any  # tests/hub/conftest.py: Notes


@pytest.fixture
def registry() -> Registry:
    """No names at all."""
    return Registry({}, {})


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch, big_gguf: bytes) -> str:
    """The address of a good file."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(direct.time, "sleep", lambda seconds: None)
    server.add("u/r", **{"m-Q4_0": big_gguf, "page": b"<html>no</html>"})
    return f"{server.address}/plain/u/r/m-Q4_0.gguf"


def test_pull_and_find_again(server: Server, url: str, registry: Registry, notes: Notes, big_gguf: bytes) -> None:
    """A file is fetched once and found afterwards without a request, listed, and removable."""
    (path,) = hub.pull(url, registry, progress=notes)
    assert path.read_bytes() == big_gguf
    assert notes.started == [("m-Q4_0.gguf", len(big_gguf))]
    n_requests = len(server.requests)
    assert hub.pull(url, registry, offline=True) == (path,)
    assert len(server.requests) == n_requests
    (found,) = hub.fetched_outside(registry)
    assert found.target.label == url
    assert hub.remove(found) == len(big_gguf)
    assert hub.fetched_outside(registry) == []


def test_broken_connection_is_resumed(server: Server, url: str, registry: Registry, big_gguf: bytes) -> None:
    """A connection that breaks at 40 % goes on from there."""
    server.break_at, server.breaks_left = 0.4, 1
    (path,) = hub.pull(url, registry)
    assert path.read_bytes() == big_gguf
    assert server.sent_bytes == len(big_gguf)


def test_server_without_ranges_starts_over(server: Server, url: str, registry: Registry, big_gguf: bytes) -> None:
    """Where resuming is impossible, the file starts over instead of growing too long."""
    server.break_at, server.breaks_left, server.ranges = 0.4, 1, False
    (path,) = hub.pull(url, registry)
    assert path.read_bytes() == big_gguf


def test_file_that_changes_in_between_starts_over(
    server: Server, url: str, registry: Registry, big_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file is another one after a break, its new version comes as a whole, never a mixture."""
    changed = big_gguf[:-1] + b"!"
    server.break_at, server.breaks_left = 0.4, 1
    monkeypatch.setattr(
        direct.time, "sleep", lambda seconds: server.repositories["u/r"].update({"m-Q4_0.gguf": changed})
    )
    (path,) = hub.pull(url, registry)
    assert path.read_bytes() == changed


def test_connection_that_never_holds(server: Server, url: str, registry: Registry) -> None:
    """A server that always breaks at the same place is given up, and nothing stays."""
    server.break_at, server.breaks_left = 0.0, 100
    with pytest.raises(HubError, match="keeps breaking"):
        hub.pull(url, registry)
    assert list(store.cache_dir().rglob("*.gguf")) == []


def test_page_instead_of_a_file(server: Server, url: str, registry: Registry) -> None:
    """An HTML page is called one and not kept."""
    with pytest.raises(ModelFileError, match="HTML page"):
        hub.pull(url.replace("m-Q4_0", "page"), registry)
    assert list(store.cache_dir().rglob("*.gguf")) == []


def test_hash_is_checked(server: Server, url: str, tmp_path: Path, big_gguf: bytes) -> None:
    """A registry's hash decides whether a download is kept."""
    path = tmp_path / "r.toml"
    for digest, fits in ((hashlib.sha256(big_gguf).hexdigest(), True), ("0" * 64, False)):
        path.write_text(f"[experts.a]\nsources = [{{ url = '{url}', sha256 = '{digest}' }}]\n")
        if fits:
            assert hub.pull("a", Registry.load([path]))[0].read_bytes() == big_gguf
        else:
            with pytest.raises(HubError, match="SHA-256"):
                hub.pull("a", Registry.load([path]))


def test_refusals(server: Server, url: str, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file, a dead server and a full disk each have their message."""
    with pytest.raises(HubError, match="answered 404"):
        hub.pull(url.replace("m-Q4_0", "absent"), registry)
    with pytest.raises(HubError, match="cannot be reached"):
        hub.pull("http://127.0.0.1:9/m.gguf", registry)
    usage = store.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(NoSpaceError):
        hub.pull(url, registry)


def test_offline(url: str, registry: Registry) -> None:
    """Offline names what is missing."""
    with pytest.raises(NotCachedError, match="not on this machine"):
        hub.pull(url, registry, offline=True)


def test_paths(registry: Registry, write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    """A file that is there needs nothing; one that is not says so; any shard means the first."""
    path = write_gguf("sub/m.gguf")
    assert hub.pull(str(path), registry) == (path,)
    assert hub.locate(str(path), registry) == path
    with pytest.raises(ModelFileError, match="no such file"):
        hub.locate(str(tmp_path / "absent.gguf"), registry)
    shards = [write_gguf(f"m-{index:05d}-of-00002.gguf", fields={"split.count": 2}) for index in (1, 2)]
    assert hub.locate(str(shards[1]), registry) == shards[0]
    shards[0].unlink()
    with pytest.raises(ModelFileError, match="m-00001-of-00002"):
        hub.locate(str(shards[1]), registry)


def test_encoders_are_refused_when_pulled(registry: Registry, write_gguf: Callable[..., Path]) -> None:
    """A model that writes no text is refused at the pull already."""
    with pytest.raises(ModelFileError, match="encoder"):
        hub.pull(str(write_gguf(architecture="bert")), registry)


def test_unknown_names(registry: Registry) -> None:
    """A plain word that is no name suggests the nearest; an ensemble is no single model."""
    with pytest.raises(UsageError, match="no expert, ensemble or file"):
        hub.pull("word", registry)
    packaged = Registry.load()
    with pytest.raises(UsageError, match="did you mean 'pocket'"):
        hub.pull("pockt", packaged)
    with pytest.raises(UsageError, match="is an ensemble; name one of its experts"):
        hub.locate("pocket", packaged)
    with pytest.raises(UsageError, match="no source of the kind 'url'"):
        hub.pull("pocket", packaged, source="url")


def test_names_win_over_files(tmp_path: Path, write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert called like a file in this directory is the expert; ``./NAME`` is the file."""
    target = write_gguf("real.gguf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same").write_bytes(target.read_bytes())
    path = tmp_path / "r.toml"
    path.write_text("[experts.same]\nref = './real.gguf'\n")
    registry = Registry.load([path])
    assert hub.locate("same", registry) == target
    assert hub.locate("./same", registry).name == "same"


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        ("gemma-3-270m", "gemma-3-270m"),
        ("u/r:Q4_K_M", "r:Q4_K_M"),
        ("u/r/sub/m-Q4.gguf", "m-Q4"),
        ("/x/y/m.Q8_0.gguf", "m.Q8_0"),
        ("https://example.org/a/m.gguf", "m"),
    ],
)
def test_models_are_named_in_outputs(ref: str, name: str) -> None:
    """A model goes by its registry name, else by its file's or repository's."""
    assert hub.default_name(ref, Registry.load()) == name
