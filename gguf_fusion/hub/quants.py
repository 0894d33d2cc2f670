"""Which file of a repository ``user/repo:Q4_K_M`` means.

A quant is a whole token of the file's name, in any case: ``Q4_K_M`` matches neither ``UD-Q4_K_M`` nor ``Q4_K``. The
exact file name wins. Without a quant the first of ``DEFAULT_ORDER`` that the repository holds is taken, a repository
with one model file needs none of this. Whatever is absent or ambiguous lists the candidates with their sizes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gguf_fusion.errors import HubError
from gguf_fusion.gguf_info import SHARD

DEFAULT_ORDER = [
    "Q4_K_M",
    "Q4_K_S",
    "Q5_K_M",
    "Q5_K_S",
    "Q4_0",
    "IQ4_XS",
    "IQ4_NL",
    "Q4_1",
    "Q6_K",
    "Q8_0",
    "Q3_K_M",
    "MXFP4",
    "BF16",
    "F16",
    "F32",
]
"""Best quality per byte first, around 4 to 5 bits; then whatever is larger."""

_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:(?:I|T)?Q\d\w*|MXFP\d\w*|NVFP\d\w*|BF16|FP?16|FP?32))(?![A-Za-z0-9])", re.IGNORECASE
)
_COMPANIONS = re.compile(r"(^|[-._/])(mmproj|imatrix|lora|adapter)([-._]|\Z)", re.IGNORECASE)
"""Files beside the model that cannot generate text on their own."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository; size and hash are None where the server does not say."""

    name: str
    size_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model of a repository: a file, or all shards of a split one."""

    files: tuple[RemoteFile, ...]

    @property
    def name(self) -> str:
        """The first file's name."""
        return self.files[0].name

    @property
    def size_bytes(self) -> int | None:
        """Sum over the shards, None if any is unknown."""
        sizes = [file.size_bytes for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def quant(self) -> str | None:
        """The last quant token of the file's own name, in upper case."""
        match = SHARD.match(self.name)
        base = (match["base"] if match else self.name[: -len(".gguf")]).rsplit("/", 1)[-1]
        found = _QUANT.findall(base)
        return _normal(found[-1]) if found else None


def choose(repo: str, files: Iterable[RemoteFile], *, file: str | None, quant: str | None) -> Candidate:
    """The model meant by a file name (or pattern) or a quant. Raises HubError with the candidates."""
    models = _group(repo, files)
    if not models:
        raise HubError(f"{repo} holds no GGUF file; look for a repository whose name ends in -GGUF")
    wanted = file or quant
    if wanted is not None:
        exact = _exact(models, wanted)
        if len(exact) == 1:
            return exact[0]
        if exact:
            raise HubError(f"{repo}: {wanted!r} matches {len(exact)} files, name one of them:{_listing(exact)}")
        if file is not None:
            raise HubError(f"{repo} has no file {file!r}; it has:{_listing(models)}")
    main = [model for model in models if not _COMPANIONS.search(model.name)] or models
    if quant is not None:
        fitting = [model for model in main if model.quant == _normal(quant)]
        if len(fitting) == 1:
            return fitting[0]
        problem = f"has no file of the quant {quant!r}" if not fitting else f"has several files of the quant {quant!r}"
        raise HubError(f"{repo} {problem}; ask for one of:{_listing(fitting or models)}")
    if len(main) == 1:
        return main[0]
    for preferred in DEFAULT_ORDER:
        fitting = [model for model in main if model.quant == preferred]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            break
    raise HubError(f"{repo} holds several models; ask for one of:{_listing(main)}")


def human_size(n_bytes: int | None) -> str:
    """A size as people read it, in powers of ten like the sizes on web pages."""
    if n_bytes is None:
        return "?"
    value, unit = float(n_bytes), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit in ("B", "kB") or value >= 100 else f"{value:.1f} {unit}"


def _group(repo: str, files: Iterable[RemoteFile]) -> list[Candidate]:
    shards: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    models = []
    for item in files:
        if not item.name.lower().endswith(".gguf"):
            continue
        match = SHARD.match(item.name)
        if match is None:
            models.append(Candidate((item,)))
        else:
            shards.setdefault((match["base"], int(match["count"])), {})[int(match["index"])] = item
    for (base, count), found in shards.items():
        missing = [index for index in range(1, count + 1) if index not in found]
        if missing:
            names = ", ".join(f"{base}-{index:05d}-of-{count:05d}.gguf" for index in missing)
            raise HubError(f"{repo} is incomplete: it lacks {names}")
        models.append(Candidate(tuple(found[index] for index in range(1, count + 1))))
    return sorted(models, key=lambda model: (model.size_bytes or 0, model.name))


def _exact(models: list[Candidate], wanted: str) -> list[Candidate]:
    """Models with a file of that name: as written, then in any case, then without folders; patterns last."""

    def having(fits: Callable[[str], bool]) -> list[Candidate]:
        return [model for model in models if any(fits(file.name) for file in model.files)]

    low = wanted.lower()
    full = low if low.endswith(".gguf") else f"{low}.gguf"
    if any(sign in wanted for sign in "*?["):
        return having(
            lambda name: fnmatch.fnmatch(name.lower(), low) or fnmatch.fnmatch(name.rsplit("/", 1)[-1].lower(), low)
        )
    return (
        having(lambda name: name == wanted)
        or having(lambda name: name.lower() == full)
        or having(lambda name: name.rsplit("/", 1)[-1].lower() == full)
    )


def _listing(models: list[Candidate]) -> str:
    lines = [f"\n  {model.quant or '-':<12} {human_size(model.size_bytes):>8}  {model.name}" for model in models]
    return "".join(lines[:40]) + (f"\n  and {len(lines) - 40} more" if len(lines) > 40 else "")


def _normal(quant: str) -> str:
    upper = quant.upper()
    return {"FP16": "F16", "FP32": "F32"}.get(upper, upper)
