"""Reads a written reference: ``user/repo:QUANT``, a web address or a path."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gguf_fusion.config.specs import HubSource, PathSource, Source, UrlSource

_HUB_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
_HUB_REF = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@(?P<revision>[\w./-]+?))?(?::(?P<tail>[^:]+))?\Z"
)


def parse_source(text: str, folder: Path | None = None) -> Source | None:
    """The source that ``text`` names, or None where it can only be a name of the registry.

    ``user/repo``, ``user/repo:QUANT``, ``user/repo:file.gguf`` and ``user/repo@revision:QUANT`` are Hugging Face
    repositories, also behind ``hf.co/`` or as a page's address (``/blob/`` links mean the file itself). Whatever
    exists as a file, ends in ``.gguf`` or starts like a path is a path, relative to ``folder``.
    """
    text = text.strip()
    if re.match(r"https?://", text, re.IGNORECASE):
        return _from_url(text)
    for host in _HUB_HOSTS:
        if text.lower().startswith(f"{host}/"):
            return _from_url(f"https://{text}")
    path = (folder or Path()) / Path(text).expanduser()
    if _is_file(path) or _reads_like_a_path(text):
        return PathSource(path)
    repo_file = re.match(r"([\w.-]+/[\w.-]+)/(.+\.gguf)\Z", text, re.IGNORECASE)
    if repo_file:
        return HubSource(repo_file[1], file=repo_file[2])
    match = _HUB_REF.match(text)
    if match is None:
        return PathSource(path) if text.lower().endswith(".gguf") else None
    if text.lower().endswith(".gguf") and match["tail"] is None:
        return PathSource(path)
    return _hub(match["repo"], match["tail"], match["revision"] or "main")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a NUL: no file can have that name
        return False


def _reads_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~", "\\")) or "\\" in text or re.match(r"[A-Za-z]:[\\/]", text) is not None


def _hub(repo: str, tail: str | None, revision: str) -> HubSource:
    if tail is not None and tail.lower().endswith(".gguf"):
        return HubSource(repo, file=tail, revision=revision)
    return HubSource(repo, quant=tail, revision=revision)


def _from_url(text: str) -> Source:
    """Pages and links of the Hugging Face Hub become repositories, so that its cache and access rules apply."""
    parts = urlsplit(text)
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", ""))
    if parts.netloc.lower() not in _HUB_HOSTS and not (endpoint.netloc and parts.netloc == endpoint.netloc):
        return UrlSource(text)
    pieces = [unquote(piece) for piece in parts.path.split("/") if piece]
    if len(pieces) >= 5 and pieces[2] in ("blob", "resolve", "raw"):
        return HubSource("/".join(pieces[:2]), file="/".join(pieces[4:]), revision=pieces[3])
    if len(pieces) >= 2 and pieces[0] not in ("datasets", "spaces"):
        match = _HUB_REF.match("/".join(pieces[:2]))
        if match is not None:
            revision = pieces[3] if len(pieces) >= 4 and pieces[2] == "tree" else match["revision"] or "main"
            return _hub(match["repo"], match["tail"], revision)
    return UrlSource(text)
