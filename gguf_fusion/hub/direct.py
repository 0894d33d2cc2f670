"""Model files behind plain http(s) addresses."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from gguf_fusion.config import UrlSource
from gguf_fusion.errors import HubError
from gguf_fusion.gguf_info import diagnose
from gguf_fusion.hub import store
from gguf_fusion.hub.progress import Progress

_TIMEOUT_S = 10.0
_ATTEMPTS = 5
"""In a row without a single new byte; each one goes on where the last one broke off."""


def local_path(source: UrlSource) -> Path:
    """Where the file lies (or would)."""
    name = unquote(urlsplit(source.url).path).rsplit("/", 1)[-1] or "model.gguf"
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    return store.model_path(store.key_of(source.url, source.sha256 or ""), safe)


def is_present(source: UrlSource) -> bool:
    """Whether the file is complete: it got its name only at the end."""
    return local_path(source).is_file()


def fetch(source: UrlSource, progress: Progress) -> Path:
    """The file, fetched if it is not here. Raises HubError, NoSpaceError, ModelFileError."""
    target = local_path(source)
    if is_present(source):
        return target
    with store.exclusive(target.parent.name, target.name, progress) as work:
        if is_present(source):
            return target
        partial = work / target.name
        with store.disk_errors(work, source.size_bytes or 0):
            with partial.open("wb") as out:
                _transfer(source, out, work, progress)
                out.flush()
                os.fsync(out.fileno())
            diagnose(partial)
            if source.sha256 and (found := store.sha256_of(partial)) != source.sha256:
                raise HubError(f"{source.url}: SHA-256 is {found[:12]}…, expected {source.sha256[:12]}…; not kept")
            store.publish(partial, target)
    return target


def _transfer(source: UrlSource, out: BinaryIO, work: Path, progress: Progress) -> None:
    """Copy the body, resuming where a connection breaks; an ETag makes sure that it is still the same file."""
    etag: str | None = None
    total = source.size_bytes
    failures = 0
    started = False
    while True:
        before = out.tell()
        try:
            with _open(source.url, before, etag) as response:
                if before and response.status != 206:
                    out.seek(0)
                    out.truncate()
                if not started or not before:
                    etag = response.headers.get("ETag")
                total = total or _total(response, out.tell())
                if not started:
                    store.require_space(work, total or 0)
                    progress.start(local_path(source).name, total)
                    started = True
                while chunk := response.read(store.CHUNK_BYTES):
                    out.write(chunk)
                    progress.advance_to(out.tell())
            if total is None or out.tell() == total:
                progress.finish()
                return
            problem = f"{out.tell()} of {total} bytes arrived"
        except urllib.error.HTTPError as error:
            raise HubError(f"{source.url}: the server answered {error.code} {error.reason}") from error
        except (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError) as error:
            problem = str(getattr(error, "reason", error))
            if not started:
                raise HubError(f"{source.url} cannot be reached ({problem})") from error
        if total is not None and out.tell() > total:
            raise HubError(f"{source.url}: expected {total} bytes, got more; the file changed at its source")
        failures = failures + 1 if out.tell() <= before else 1
        if failures >= _ATTEMPTS:
            progress.finish()
            raise HubError(f"{source.url}: the connection keeps breaking ({problem}); pull again later")
        time.sleep(0.5)


def _open(url: str, offset: int, etag: str | None) -> HTTPResponse:
    headers = {"User-Agent": "gguf-fusion"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if etag and not etag.startswith("W/"):
            headers["If-Range"] = etag
    try:
        request = urllib.request.Request(url, headers=headers)
        response: HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except ValueError as error:
        raise HubError(f"{url}: no valid address ({error})") from error
    return response


def _total(response: HTTPResponse, offset: int) -> int | None:
    length = response.headers.get("Content-Length")
    return offset + int(length) if length and length.isdigit() else None
