"""The Hugging Face Hub, the only module that knows huggingface_hub.

Files live in its cache, so other tools find them and it finds theirs. The library reads most environment variables
when it is imported; endpoint, cache directory and offline mode are therefore passed at each call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import tqdm as hub_tqdm

from gguf_fusion.config import HubSource
from gguf_fusion.errors import HubError
from gguf_fusion.hub import quants, store
from gguf_fusion.hub.progress import Progress

_DEAD_AFTER_S = 600.0
"""A partial file that nobody has written to for so long belongs to a killed process."""
LISTING_S = 10.0
"""Most seconds to wait for a repository's file list, all addresses of the host together."""

_Result = TypeVar("_Result")


def endpoint() -> str:
    """The hub's address."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def cache_dir() -> Path:
    """The hub's own cache directory, wherever its variables put it now."""
    if chosen := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(chosen).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(constants.HF_HUB_CACHE)


def list_files(source: HubSource) -> tuple[str, list[quants.RemoteFile]]:
    """Commit and files of the repository. Raises HubError."""

    def ask(token: bool | None) -> Any:
        api = HfApi(endpoint=endpoint(), token=token)
        return api.model_info(source.repo, revision=source.revision, files_metadata=True, timeout=LISTING_S)

    with _explained(source):
        info = _anonymous_if_refused(lambda token: _within(LISTING_S + 2, lambda: ask(token)))
    files = []
    for sibling in info.siblings or ():
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        files.append(quants.RemoteFile(sibling.rfilename, sibling.size, sha256))
    return str(info.sha), files


def download(source: HubSource, commit: str, file: quants.RemoteFile, progress: Progress) -> Path:
    """Fetch one file of that commit into the hub's cache and check it. Raises HubError, NoSpaceError."""
    folder = cache_dir()
    bar = _bar_class(progress)
    _drop_dead_partials(source)

    def ask(token: bool | None) -> str:
        return hf_hub_download(
            source.repo,
            file.name,
            revision=commit,
            cache_dir=folder,
            endpoint=endpoint(),
            token=token,
            tqdm_class=bar,
            etag_timeout=LISTING_S,
        )

    progress.start(file.name.rsplit("/", 1)[-1], file.size_bytes)
    try:
        with store.disk_errors(folder, file.size_bytes or 0), _explained(source), _quiet():
            path = Path(_anonymous_if_refused(ask))
    finally:
        progress.finish()
    _check(source, file, path)
    _note_revision(source, commit)
    return path


def find_cached(source: HubSource) -> tuple[Path, ...]:
    """The files if the hub's cache holds exactly what the source asks for, whoever fetched them; else empty."""
    folder = _repo_folder(source)
    try:
        commit = (folder / "refs" / source.revision).read_text(encoding="ascii").strip()
    except OSError:
        commit = source.revision
    snapshot = folder / "snapshots" / commit
    files = [
        quants.RemoteFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)
        for path in snapshot.rglob("*.gguf")
        if path.is_file()
    ]
    if not files:
        return ()
    try:
        model = quants.choose(source.repo, files, file=source.file, quant=source.quant)
    except HubError:
        return ()
    paths = tuple(snapshot / file.name for file in model.files)
    # The cache names large files by their SHA-256, so another version of the file is told apart for free.
    named = [path.resolve().name for path in paths if re.fullmatch(r"[0-9a-f]{64}", path.resolve().name)]
    return () if source.sha256 is not None and named not in ([], [source.sha256]) else paths


def _drop_dead_partials(source: HubSource) -> None:
    """Remove what killed downloads left; the library never takes such a file up again."""
    for path in (_repo_folder(source) / "blobs").glob("*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _DEAD_AFTER_S:
                path.unlink()


def _repo_folder(source: HubSource) -> Path:
    return cache_dir() / f"models--{source.repo.replace('/', '--')}"


def _note_revision(source: HubSource, commit: str) -> None:
    """Record which commit the revision meant, as the library does when it is asked for a branch."""
    note = _repo_folder(source) / "refs" / source.revision
    if source.revision != commit:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(commit, encoding="ascii")


def remove(path: Path) -> int:
    """Delete a file of the hub's cache with every link to its content; returns the bytes freed."""
    content = path.resolve()
    freed = content.stat().st_size if content.is_file() else 0
    snapshots = next((parent for parent in path.parents if parent.name == "snapshots"), path.parent)
    for link in [*snapshots.rglob("*"), path]:
        if not link.is_dir() and link.resolve() == content:
            link.unlink(missing_ok=True)
    content.unlink(missing_ok=True)
    return freed


def _check(source: HubSource, file: quants.RemoteFile, path: Path) -> None:
    """Compare size and hash with what the registry and the listing say; drop the file if they differ."""
    size, expected = path.stat().st_size, source.sha256 or file.sha256
    wrong = None
    if file.size_bytes is not None and size != file.size_bytes:
        wrong = f"it has {size} bytes instead of {file.size_bytes}"
    elif expected is not None and (found := store.sha256_of(path)) != expected:
        wrong = f"its SHA-256 is {found[:12]}…, expected {expected[:12]}…"
    if wrong:
        remove(path)
        raise HubError(f"{source.repo}/{file.name} is not the expected file: {wrong}; it was removed, pull again")


def _within(seconds: float, function: Callable[[], _Result]) -> _Result:
    """Run ``function`` for at most so long: a host with many dead addresses is tried one by one otherwise."""
    outcome: list[_Result] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise httpx2.ConnectTimeout(f"no answer within {seconds:.0f} s")
    return outcome[0]


def _anonymous_if_refused(ask: Callable[[bool | None], _Result]) -> _Result:
    """A token that has expired must not lock the user out of public files: then ask without one."""
    try:
        return ask(None)
    except HfHubHTTPError as error:
        if error.response.status_code != 401 or isinstance(error, GatedRepoError) or get_token() is None:
            raise
        try:
            return ask(False)
        except HfHubHTTPError:
            raise error from None


@contextlib.contextmanager
def _explained(source: HubSource) -> Iterator[None]:
    """Turn the library's exceptions into HubError with the next step to take. A token never gets into a message."""
    page = f"{endpoint()}/{source.repo}"
    try:
        yield
    except (
        HfHubHTTPError,
        httpx2.HTTPError,
        OfflineModeIsEnabled,
        FileMetadataError,
        HFValidationError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, HfHubHTTPError):
            raise  # a disk error: store.disk_errors explains those
        raise HubError(_explanation(source, page, _root_cause(error))) from None


def _root_cause(error: BaseException) -> BaseException:
    """The library wraps the answer of the server in 'not found locally'; the answer says more."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, (HfHubHTTPError, httpx2.HTTPError)):
            return current
        current = current.__cause__
    return error


def _explanation(source: HubSource, page: str, error: BaseException) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    has_token = get_token() is not None
    if isinstance(error, RemoteEntryNotFoundError):
        return f"{source.repo} has no such file at revision {source.revision}; see {page}/tree/main"
    if isinstance(error, RevisionNotFoundError):
        return f"{source.repo} has no revision {source.revision!r}; see {page}/tree/main"
    if status == 403 or (isinstance(error, GatedRepoError) and has_token):
        return f"{source.repo} is gated and your account has no access yet; accept its terms at {page}, then pull again"
    if isinstance(error, GatedRepoError) or (status == 401 and not isinstance(error, RepositoryNotFoundError)):
        what = "your token is not valid" if has_token else "no token is set"
        return (
            f"{source.repo} asks who you are and {what}; log in with 'hf auth login' or set HF_TOKEN, "
            f"and accept the terms at {page}"
        )
    if status == 401 and not has_token:
        return f"{source.repo} does not exist or is private; check the name at {page}; private ones need HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return f"{source.repo} does not exist, or your account cannot see it; check the name at {page}"
    if status is not None:
        return f"{endpoint()} answered {status} for {source.repo}; try again later"
    if isinstance(error, HFValidationError):
        return f"{source.repo!r} is no repository name; expected user/repo"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, httpx2.HTTPError):
        return f"{endpoint()} cannot be reached ({reason})"
    return f"{source.repo} could not be fetched from {endpoint()}: {reason}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's retry warnings off the terminal: they print signed addresses."""
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


def _bar_class(progress: Progress) -> type[hub_tqdm]:
    """A progress bar class for the library that hands its counts to ours and draws nothing."""

    class Forwarding(hub_tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._done = int(kwargs.get("initial") or 0)
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            progress.advance_to(self._done)
            return None

    return Forwarding
