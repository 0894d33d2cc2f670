"""Pulling from the Hugging Face Hub, against a server of our own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gguf_fusion import hub
from gguf_fusion.config import Registry
from gguf_fusion.errors import HubError, ModelFileError, NoSpaceError, NotCachedError
from gguf_fusion.hub import huggingface

Hub = Any  # tests/hub/conftest.py: FakeHub
Notes = Any  # tests/hub/conftest.py: Notes


@pytest.fixture
def registry() -> Registry:
    """No names at all."""
    return Registry({}, {})


def test_pull_by_quant(hub_server: Hub, registry: Registry, notes: Notes, big_gguf: bytes) -> None:
    """A quant is resolved, the file follows the redirect into the hub's own cache, progress counts its bytes."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf, "m-Q8_0": b"other"})
    (path,) = hub.pull("u/r:q4_k_m", registry, progress=notes)
    assert path.read_bytes() == big_gguf
    assert path.is_relative_to(Path(os.environ["HF_HOME"]))
    assert notes.started == [("m-Q4_K_M.gguf", len(big_gguf))]
    assert notes.done == len(big_gguf)


def test_second_pull_asks_nobody(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """What is here causes no request, by tag and by the default quant alike; offline too."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    first = hub.pull("u/r", registry)
    n_requests = len(hub_server.requests)
    assert hub.pull("u/r", registry) == first
    assert hub.pull("u/r", registry, offline=True) == first
    assert (hub.locate("u/r", registry),) == first
    assert hub.pull("u/r:Q4_K_M", registry) == first
    assert len(hub_server.requests) == n_requests


def test_files_of_other_tools_count(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """A file that another tool put into the hub's cache is found, if the reference says which one."""
    from huggingface_hub import hf_hub_download

    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    path = hf_hub_download("u/r", "m-Q4_K_M.gguf", cache_dir=huggingface.cache_dir(), endpoint=hub_server.address)
    assert hub.locate("u/r:Q4_K_M", registry) == Path(path)


def test_offline_says_what_to_do(registry: Registry) -> None:
    """Without the file, offline mode names the command and the variable."""
    with pytest.raises(NotCachedError, match=r"gguf-fusion pull u/r:Q8_0.*HF_HUB_OFFLINE"):
        hub.pull("u/r:Q8_0", registry)


def test_split_files_are_one_model(hub_server: Hub, registry: Registry, gguf_bytes: Callable[..., bytes]) -> None:
    """By tag and by any shard, all shards come; the first one's path is returned."""
    shards = {
        f"m-Q8_0-{index:05d}-of-00003": gguf_bytes(fields={"split.count": 3}, tensors=index) for index in (1, 2, 3)
    }
    hub_server.add("u/r", **shards)
    (path,) = hub.pull("u/r:Q8_0", registry)
    assert path.name == "m-Q8_0-00001-of-00003.gguf"
    assert len(list(path.parent.glob("*.gguf"))) == 3
    assert hub.pull("u/r:m-Q8_0-00002-of-00003.gguf", registry) == (path,)


def test_incomplete_split_is_named(hub_server: Hub, registry: Registry) -> None:
    """A repository that lacks a shard says which."""
    hub_server.add("u/r", **{"m-00001-of-00002": b"x"})
    with pytest.raises(HubError, match=r"m-00002-of-00002\.gguf"):
        hub.pull("u/r", registry)


class Refusal(NamedTuple):
    """How the server refuses, and what we say."""

    status: int
    token: str | None
    said: str


@pytest.mark.parametrize(
    "case",
    [
        Refusal(401, None, "no token is set.*hf auth login"),
        Refusal(401, "hf_secret", "gated and your account has no access"),
        Refusal(403, "hf_secret", "gated and your account has no access yet; accept its terms"),
    ],
)
def test_gated_repositories(
    hub_server: Hub, registry: Registry, monkeypatch: pytest.MonkeyPatch, case: Refusal, big_gguf: bytes
) -> None:
    """A gated repository says whether a token or an acceptance is missing, and which page to visit."""
    if case.token:
        monkeypatch.setenv("HF_TOKEN", case.token)
    hub_server.add("u/gated", **{"m-Q4_K_M": big_gguf})
    hub_server.gated["u/gated"] = case.status
    with pytest.raises(HubError, match=case.said) as caught:
        hub.pull("u/gated", registry)
    assert f"{hub_server.address}/u/gated" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("token", "said"), [(None, "does not exist or is private"), ("hf_secret", "does not exist, or your account")]
)
def test_missing_repository(
    hub_server: Hub, registry: Registry, monkeypatch: pytest.MonkeyPatch, token: str | None, said: str
) -> None:
    """A missing repository is not called gated, with and without a token."""
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=said) as caught:
        hub.pull("u/absent", registry)
    assert "secret" not in str(caught.value)


def test_stale_token_still_opens_public_files(
    hub_server: Hub, registry: Registry, monkeypatch: pytest.MonkeyPatch, big_gguf: bytes
) -> None:
    """A token that the server refuses does not lock the user out of a public repository."""
    monkeypatch.setenv("HF_TOKEN", "hf_stale")
    hub_server.refuse_tokens = True
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    (path,) = hub.pull("u/r", registry)
    assert path.read_bytes() == big_gguf


def test_missing_quant_lists_what_there_is(hub_server: Hub, registry: Registry) -> None:
    """An absent quant lists the candidates with their sizes."""
    hub_server.add("u/r", **{"m-Q4_K_M": b"x" * 2000, "m-Q8_0": b"x" * 4000})
    with pytest.raises(HubError, match=r"no file of the quant 'Q6_K'") as caught:
        hub.pull("u/r:Q6_K", registry)
    assert "2 kB" in str(caught.value)
    assert "m-Q8_0.gguf" in str(caught.value)


def test_missing_revision_and_missing_file(hub_server: Hub, registry: Registry) -> None:
    """A revision or a file that is not there is said to be that."""
    hub_server.add("u/r", **{"m-Q4_K_M": b"x"})
    with pytest.raises(HubError, match="no revision 'nowhere'"):
        hub.pull("u/r@nowhere:Q4_K_M", registry)
    with pytest.raises(HubError, match=r"no file 'n\.gguf'"):
        hub.pull("u/r:n.gguf", registry)


def test_broken_connection_is_resumed(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """A connection that breaks at 40 % goes on from there; the file is exact and no byte is sent twice."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    hub_server.break_at, hub_server.breaks_left = 0.4, 1
    (path,) = hub.pull("u/r", registry)
    assert path.read_bytes() == big_gguf
    assert hub_server.sent_bytes <= len(big_gguf) + 2 * 65536


def test_server_without_ranges(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """Where a server cannot resume, the file starts over and is still exact."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    hub_server.break_at, hub_server.breaks_left, hub_server.ranges = 0.4, 1, False
    (path,) = hub.pull("u/r", registry)
    assert path.read_bytes() == big_gguf


def test_slow_connection_succeeds(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """A slow server is waited for as long as bytes arrive."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    hub_server.chunk_delay_s = 0.02
    (path,) = hub.pull("u/r", registry)
    assert path.read_bytes() == big_gguf


def test_silent_server_is_left_within_seconds(
    hub_server: Hub, registry: Registry, monkeypatch: pytest.MonkeyPatch, big_gguf: bytes
) -> None:
    """A server that accepts the connection and says nothing counts as unreachable after a few seconds."""
    monkeypatch.setattr(huggingface, "LISTING_S", 0.3)
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    hub_server.listing_delay_s = 3
    begin = time.monotonic()
    with pytest.raises(HubError, match="cannot be reached"):
        hub.pull("u/r", registry)
    assert time.monotonic() - begin < 2.9


def test_unreachable_hub_is_left_at_once(hub_server: Hub, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing listens, the error comes at once and names the address."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    begin = time.monotonic()
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        hub.pull("u/r", registry)
    assert time.monotonic() - begin < 5


def test_full_disk_is_noticed_before(
    hub_server: Hub, registry: Registry, monkeypatch: pytest.MonkeyPatch, big_gguf: bytes
) -> None:
    """A disk without room stops the pull before a byte of the file is asked for."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(NoSpaceError, match="not enough disk space") as caught:
        hub.pull("u/r", registry)
    assert caught.value.free_bytes == 1_000_000
    assert hub_server.asked("/resolve/") == 0


def test_file_that_changed_in_between(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """A file that no longer is what the listing promised is refused and not kept."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    hub_server.changed_after_listing = big_gguf[:-1] + b"!"
    with pytest.raises(HubError, match="not the expected file: its SHA-256"):
        hub.pull("u/r", registry)
    assert list(huggingface.cache_dir().rglob("*.gguf")) == []
    with pytest.raises(NotCachedError):
        hub.locate("u/r:Q4_K_M", registry)


def test_hash_of_the_registry_is_checked(hub_server: Hub, tmp_path: Path, big_gguf: bytes) -> None:
    """A repository that serves another file than the registry knows is refused."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    path = tmp_path / "r.toml"
    path.write_text(f"[experts.a]\nsources = [{{ hub = 'u/r', quant = 'Q4_K_M', sha256 = '{'0' * 64}' }}]\n")
    with pytest.raises(HubError, match="expected 000000000000"):
        hub.pull("a", Registry.load([path]))


def test_page_instead_of_a_file(hub_server: Hub, registry: Registry) -> None:
    """A repository whose file is no GGUF is explained like any other."""
    hub_server.add("u/r", **{"m-Q4_K_M": b"<!doctype html><html></html>"})
    with pytest.raises(ModelFileError, match="HTML page"):
        hub.pull("u/r", registry)


def test_next_source_is_tried(hub_server: Hub, tmp_path: Path, notes: Notes, big_gguf: bytes) -> None:
    """An expert's second source serves when the first is gone, and the output says so."""
    hub_server.add("u/second", **{"m-Q4_K_M": big_gguf})
    path = tmp_path / "r.toml"
    path.write_text("[experts.a]\nsources = [{ hub = 'u/first' }, { hub = 'u/second' }]\n")
    (found,) = hub.pull("a", Registry.load([path]), progress=notes)
    assert found.read_bytes() == big_gguf
    assert "u/first does not exist" in notes.lines[0]
    assert notes.lines[0].endswith("trying u/second")


def test_all_sources_fail(hub_server: Hub, tmp_path: Path) -> None:
    """When no source works, every reason is given."""
    path = tmp_path / "r.toml"
    path.write_text("[experts.a]\nsources = [{ hub = 'u/first' }, { url = 'http://127.0.0.1:9/m.gguf' }]\n")
    with pytest.raises(HubError, match=r"none of its 2 sources worked") as caught:
        hub.pull("a", Registry.load([path]))
    assert "u/first does not exist" in str(caught.value)
    assert "127.0.0.1:9/m.gguf cannot be reached" in str(caught.value)


def test_revision_can_be_chosen(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """``revision`` replaces the one of the reference."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    hub.pull("u/r", registry, revision="v2")
    assert hub_server.asked("/revision/v2") == 1


def test_remove_frees_the_content(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """Deleting removes link and content, and the reference is forgotten."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    (path,) = hub.pull("u/r", registry)
    content = path.resolve()
    (found,) = hub.fetched(hub.resolve_one("u/r", registry))
    assert hub.fetched_outside(registry)[0].paths == (path,)
    assert hub.remove(found) == len(big_gguf)
    assert not content.exists()
    assert not path.is_symlink()
    assert hub.fetched_outside(registry) == []


def test_kill_leaves_no_file_that_looks_complete(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """A process killed in the middle leaves a partial file at most, which a later pull removes."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    hub_server.chunk_delay_s = 0.1
    child = subprocess.Popen([sys.executable, "-m", "gguf_fusion", "pull", "u/r"], stderr=subprocess.DEVNULL)
    while hub_server.sent_bytes < 0.4 * len(big_gguf):
        time.sleep(0.05)
    child.kill()
    child.wait()
    with pytest.raises(NotCachedError):
        hub.locate("u/r:Q4_K_M", registry)
    partials = list(huggingface.cache_dir().rglob("*.incomplete"))
    assert len(partials) == 1
    os.utime(partials[0], (0, 0))
    hub_server.chunk_delay_s = 0
    (path,) = hub.pull("u/r", registry)
    assert path.read_bytes() == big_gguf
    assert not partials[0].exists()


def test_concurrent_pulls_share_one_download(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """Two processes at once both succeed, and the content is sent once."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    hub_server.chunk_delay_s = 0.02
    command = [sys.executable, "-m", "gguf_fusion", "pull", "u/r"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert hub_server.sent_bytes == len(big_gguf)
    assert hub.locate("u/r", registry).read_bytes() == big_gguf


def test_cached_file_of_another_version_is_not_taken(hub_server: Hub, tmp_path: Path, big_gguf: bytes) -> None:
    """A file in the hub's cache whose hash is not the registry's does not count as present."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    hub.pull("u/r:Q4_K_M", Registry({}, {}))
    path = tmp_path / "r.toml"
    for digest, fits in ((hashlib.sha256(big_gguf).hexdigest(), True), ("0" * 64, False)):
        path.write_text(f"[experts.a]\nsources = [{{ hub = 'u/r', file = 'm-Q4_K_M.gguf', sha256 = '{digest}' }}]\n")
        target = hub.resolve_one("a", Registry.load([path]))
        assert (hub.find_local(target) is not None) == fits


def test_plan_knows_sizes(hub_server: Hub, registry: Registry, big_gguf: bytes) -> None:
    """A dry run asks for the size and fetches nothing."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    (step,) = hub.plan("u/r", registry)
    assert (step.size_bytes, step.present) == (len(big_gguf), False)
    assert hub_server.asked("/resolve/") == 0


def test_command_line_in_a_fresh_process(hub_server: Hub, tmp_path: Path, big_gguf: bytes) -> None:
    """The whole way: endpoint, cache and proxies from the environment, then offline with dead proxies at once."""
    hub_server.add("u/r", **{"m-Q4_K_M": big_gguf})
    command = [sys.executable, "-m", "gguf_fusion"]
    pulled = subprocess.run([*command, "pull", "u/r:Q4_K_M"], capture_output=True, text=True, check=True)
    assert pulled.stdout.startswith("u/r:Q4_K_M  ")
    assert "fetching m-Q4_K_M.gguf (3.1 MB)" in pulled.stderr
    dead = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    begin = time.monotonic()
    shown = subprocess.run([*command, "show", "u/r:Q4_K_M", "--json"], capture_output=True, check=True, env=dead)
    assert time.monotonic() - begin < 3
    assert Path(json.loads(shown.stdout)["path"]).read_bytes() == big_gguf
