"""Says what a file is that should have been a GGUF."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from gguf_fusion.errors import ModelFileError


def diagnose(path: Path) -> None:
    """Raise ModelFileError if the first bytes show that this is no usable GGUF, saying what it is instead."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    if head.startswith(b"GGUF") and len(head) >= 24:
        little, big = struct.unpack_from("<I", head, 4)[0], struct.unpack_from(">I", head, 4)[0]
        if little in (2, 3):
            return
        if big in (1, 2, 3):
            raise ModelFileError(f"{path}: a big-endian GGUF, made for other machines; fetch the little-endian file")
        advice = (
            "it is older than any tool still reads; fetch a newer conversion" if little < 2 else "update gguf-fusion"
        )
        raise ModelFileError(f"{path}: GGUF version {little}, expected 2 or 3; {advice}")
    text = head.lstrip().lower()
    if not head.strip(b"\0"):
        found = "an empty file" if not head else "nothing but zero bytes, an interrupted download"
    elif text.startswith((b"<!doctype", b"<html", b"<?xml")):
        found = "an HTML page, not the file behind it; use the link of the download button (/resolve/, not /blob/)"
    elif head.startswith(b"version https://git-lfs"):
        found = "a Git LFS pointer, not the file it stands for; run 'git lfs pull' or fetch the file itself"
    elif text.startswith((b'{"error', b'{"message', b"not found", b"invalid", b"access to")):
        found = f"a server's error message: {head[:80].decode(errors='replace').strip()}"
    elif head[:4] in (b"lmgg", b"ggml", b"fmgg", b"tjgg", b"algg"):
        found = "a GGML file from before GGUF; fetch a GGUF of the model"
    elif head[:4] == b"PK\x03\x04":
        found = "a ZIP or PyTorch file; fetch a GGUF of the model"
    elif head[8:10] == b'{"':
        found = "a safetensors file; fetch a GGUF of the model"
    elif head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        found = "a compressed file; unpack it first"
    else:
        found = f"something else (it starts with {head[:8]!r})"
    raise ModelFileError(f"{path}: expected a GGUF file, got {found}{_piece_hint(path)}")


def truncated(path: Path, size: int, why: str) -> ModelFileError:
    """The error for a file that ends too early, to be raised by the caller."""
    hint = _piece_hint(path) or "; the download broke off, delete the file and fetch it again"
    return ModelFileError(f"{path}: truncated: {why}, the file has {size}{hint}")


def _piece_hint(path: Path) -> str:
    piece = re.search(
        r"(\.part[-_]?\d+(of\d+)?|[-.]split[-_][a-z0-9]+|\.gguf\.?[0-9]{2,3}|\.gguf[-.][a-z]{2})\Z",
        path.name,
        re.IGNORECASE,
    )
    if piece is None:
        return ""
    whole = path.name[: piece.start()]
    return (
        f"; '{piece[0]}' is one piece of a file that was cut by size: join all of them in order "
        f"(cat {whole}.part* > {whole}) and use the result"
    )
