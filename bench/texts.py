"""Evaluation text: documents that are installed on this machine, by domain, split into dev and test.

Nothing here is committed text: every machine reads its own copy, and the digest of what was read is part of a result.
Documents are ordered by the digest of their names, so that neither the alphabet nor the size decides about the split.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import sys
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHARE = Path("/usr/share")
N_DEV, N_TEST = 10, 20
SIZE = 1100
"""Bytes per document: the first 32 are context, so that 20 documents score more than 20 kB."""

_SKIP = 0.25
"""Share of a document before its excerpt: headers and licences at the top are alike in all documents."""

_EVERY_LOCALE = 30
"""One in so many tables of locales is read."""

_SIGNS = {"ss": "ß", "Bq": "„", "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "aq": "'", "dq": '"', "em": "—", "en": "–",
          "bu": "•", "co": "©", "mu": "×", "+-": "±", "<=": "≤", ">=": "≥", "->": "→", "de": "°", "ha": "^",
          "ti": "~", "rs": "\\", "pi": "π", "if": "∞"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """One excerpt. ``domain``: kind of text; ``split``: dev or test; ``name``: file name."""

    name: str
    domain: str
    split: str
    text: bytes


def _file(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")


def _manual(path: Path) -> str:
    """What a manual page says, without its markup; next to nothing for a reference to another page."""
    text = re.sub(r"^\.(B|I|SM|SH|SS|[BIR]{2})[ \t]+(.*)$", _words, _file(path), flags=re.MULTILINE)
    text = re.sub(r"^[.'].*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\\(?:f(?:\(..|\[\w*\]|.)|s[-+]?\d|\((..)|\[(..)\]|(.))", _sign, text)
    return re.sub(r"\n{3,}", "\n\n", text)


def _words(line: re.Match[str]) -> str:
    """The arguments of a font macro: those of two letters join theirs without a blank."""
    words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', line[2])]
    return ("" if len(line[1]) == 2 and line[1] not in ("SM", "SH", "SS") else " ").join(words)


def _sign(escape: re.Match[str]) -> str:
    """The character of a roff escape; nothing for fonts and sizes."""
    name = escape[1] or escape[2]
    if name:
        return _SIGNS.get(name) or (name[1] + "\N{COMBINING DIAERESIS}" if name[0] == ":" else "")
    return {"-": "-", "e": "\\", " ": " ", "~": " "}.get(escape[3] or "", "")


def _manuals(*folders: str, having: str = "") -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((SHARE / "man" / folder).glob("*.gz")):
            if not path.is_symlink() and not path.name.startswith("iso_8859") and having in _file(path):
                yield path.name, _manual(path)


def _code() -> Iterator[tuple[str, str]]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.name, _file(path)


def _mathematics() -> Iterator[tuple[str, str]]:
    yield from _manuals("man3", having="math.h")
    for path in sorted((SHARE / "i18n/locales").glob("*_*"))[::_EVERY_LOCALE]:
        yield path.name, _file(path).partition("\nLC_CTYPE")[2]


def _prose() -> Iterator[tuple[str, str]]:
    for path in sorted((SHARE / "vim").glob("vim*/doc/usr_*.txt")):
        yield path.name, _file(path)


DOMAINS = {
    "code": _code,
    "technical": lambda: _manuals("man2", "man7"),
    "prose": _prose,
    "mathematics and tables": _mathematics,
    "German": lambda: _manuals("de/man1", "de/man8"),
}
"""Python's standard library, manual pages, the Vim user manual, pages on mathematical functions with some tables of
locales, German manual pages."""


def texts(domains: Iterable[str] = tuple(DOMAINS), n_dev: int = N_DEV, n_test: int = N_TEST) -> list[Text]:
    """Excerpts of every domain; a domain that is not installed is left out with a note on stderr."""
    found = []
    for domain in domains:
        usable: dict[str, bytes] = {}
        try:
            for name, text in DOMAINS[domain]():
                if excerpt := _excerpt(text):
                    usable[name] = excerpt
        except (OSError, UnicodeDecodeError) as error:
            print(f"{domain}: {error}", file=sys.stderr)
        order = sorted(usable, key=lambda name: hashlib.sha256(name.encode()).digest())
        if len(order) < n_dev + n_test:
            print(f"{domain}: left out, {len(order)} of {n_dev + n_test} documents are installed", file=sys.stderr)
            continue
        for i, name in enumerate(order[: n_dev + n_test]):
            found.append(Text(name, domain, "dev" if i < n_dev else "test", usable[name]))
    return found


def digest(found: Iterable[Text]) -> str:
    """Names what was read: the same digest means the same bytes."""
    return hashlib.sha256(b"\0".join(text.text for text in found)).hexdigest()[:16]


def _excerpt(text: str) -> bytes | None:
    """``SIZE`` bytes from the first line after the skipped part, or None for a document that is too short."""
    raw = unicodedata.normalize("NFC", text).encode()
    start = raw.find(b"\n", int(len(raw) * _SKIP)) + 1
    excerpt = raw[start : start + SIZE].decode("utf-8", "ignore").encode()
    return excerpt if start and len(excerpt) > SIZE - 4 else None
