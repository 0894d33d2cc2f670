"""What a registry holds: experts, ensembles and where model files come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

N_CTX_DEFAULT = 4096
"""Never the full training context: that would cost gigabytes of cache by default."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a Hugging Face repository, named exactly (``file``, globs allowed) or by its quant."""

    repo: str
    file: str | None = None
    quant: str | None = None
    revision: str = "main"
    sha256: str | None = None
    size_bytes: int | None = None

    def __str__(self) -> str:
        tail = self.file or self.quant
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{at}" + (f":{tail}" if tail else "")


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One member of one wheel of a package index."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file carried by wheels: the members, joined in order, are the file. Nothing is installed or imported."""

    parts: tuple[WheelPart, ...]
    file: str
    sha256: str
    size_bytes: int

    def __str__(self) -> str:
        first, *rest = (f"{part.package}=={part.version}" for part in self.parts)
        return first + (f" and {len(rest)} more" if rest else "")


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A file behind an http(s) address."""

    url: str
    sha256: str | None = None
    size_bytes: int | None = None

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class PathSource:
    """A file that is already here."""

    path: Path
    sha256: str | None = None
    size_bytes: int | None = None

    def __str__(self) -> str:
        return str(self.path)


Source = HubSource | WheelSource | UrlSource | PathSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """One model: where its file comes from and how it is loaded.

    ``template``: None = the one inside the GGUF, "none" = the model is never prompted by a template, else a file.
    ``add_end``/``remove_end``: token ids or pieces that are (not) to count as the end of a reply.
    ``lora``: a LoRA adapter for this model, a GGUF file.
    ``smaller``: smaller quants of the same model, largest first, for machines that the usual one does not fit.
    ``n_gpu_layers``: 0 = processor only, -1 = all, None = as many as fit, chosen for all experts together.
    ``rpc``: workers (``host:port``) on other machines that the layers go to instead of cards of this one.
    ``type_k``/``type_v``: cache types such as "q8_0"; None = f16.
    """

    name: str
    sources: tuple[Source, ...]
    role: str = ""
    description: str = ""
    licence: str = ""
    licence_url: str = ""
    needs_acceptance: str | None = None
    template: str | Path | None = None
    n_ctx: int = N_CTX_DEFAULT
    n_gpu_layers: int | None = None
    rpc: tuple[str, ...] = ()
    n_threads: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    add_end: tuple[int | str, ...] = ()
    remove_end: tuple[int | str, ...] = ()
    lora: Path | None = None
    smaller: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleSpec:
    """Experts that speak together. ``weights`` are positive or zero and as many as ``experts``; not normalised.

    ``fewer_layers``: where a card has become too small, load with fewer layers instead of failing.
    ``smaller_quants``: where the experts do not fit, take smaller quants that the registry lists for them.
    ``vram_margin``: share of a card's free memory that plans leave free.
    """

    name: str
    experts: tuple[str, ...]
    weights: tuple[float, ...]
    description: str = ""
    strategy: str | None = None
    epsilon: float | None = None
    bridge: str = "byte"
    plain_chat: str | None = None
    fewer_layers: bool = False
    smaller_quants: bool = False
    vram_margin: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
