"""What may be said about how an ensemble is put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from gguf_fusion.ahead import LEVELS
from gguf_fusion.config import check_known, nearest
from gguf_fusion.cover.tree import EXACT_EPSILON
from gguf_fusion.errors import UsageError

SPACES = ("auto", "byte", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an ensemble is put together. None keeps what the registry says.

    strategy : ``pool(weight rule)``
    epsilon  : how much of an expert's law may be left unevaluated, see ``cover.tree``; 0 evaluates everything
    space    : ``byte`` bridges always, ``token`` demands one vocabulary, ``auto`` bridges where vocabularies differ
    lanes    : ``auto``, ``serial`` or ``lanes``
    chat_templates : Jinja files by expert, or "none" for a base model that reads plain text
    router   : a trained router (``gguf-fusion router train``); it takes the place of a strategy
    calibrate: whether speeds, ``auto`` lanes and batches may be measured at the first load of these files
    rpc      : workers (``host:port``) that hold the layers, by expert; under "" those of all others
    prompt_cache : bytes of earlier texts that are kept in RAM, so that a conversation goes on where it was; 0 = none
    fewer_layers : load with fewer layers on a card where there is less memory than planned, or loading fails
    smaller_quants : where the experts do not fit, take smaller quants that the registry lists for them
    vram_margin  : share of a card's free memory that is left free
    lazy     : draw a symbol without the slowest expert where it cannot change it, see ``lazy``
    prefetch : read guessed text in batches: ``exact`` where rows stay the same bit for bit, ``law`` in larger ones
    flash_attn : None leaves it to ``experts.settings.flash``; True makes rows of batches exact on more CPUs
    """

    strategy: str | None = None
    epsilon: float | None = None
    n_ctx: int | None = None
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    rpc: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prompt_cache: int = 0
    fewer_layers: bool | None = None
    smaller_quants: bool | None = None
    vram_margin: float | None = None
    lanes: str = "auto"
    space: str = "auto"
    chat_templates: Mapping[str, str | Path] = field(default_factory=dict)
    router: str | Path | None = None
    calibrate: bool = True
    lazy: bool = False
    prefetch: str = "off"
    flash_attn: bool | None = None

    def __post_init__(self) -> None:
        if self.prefetch not in LEVELS:
            hint = nearest(self.prefetch, LEVELS)
            raise UsageError(f"prefetch: expected {', '.join(LEVELS)}, got {self.prefetch!r}{hint}")
        if self.epsilon is not None and not 0.0 <= self.epsilon < 1.0:
            raise UsageError(f"epsilon: expected a number from 0 up to (not including) 1, got {self.epsilon}")
        if self.prompt_cache < 0:
            raise UsageError(f"prompt_cache: expected a number of bytes, 0 for none, got {self.prompt_cache}")
        if self.vram_margin is not None and not 0.0 <= self.vram_margin < 1.0:
            raise UsageError(f"vram_margin: expected a share from 0 up to (not including) 1, got {self.vram_margin}")
        if self.space not in SPACES:
            raise UsageError(f"space: expected {', '.join(SPACES)}, got {self.space!r}{nearest(self.space, SPACES)}")


class LoadKeywords(TypedDict, total=False):
    """How an ensemble is put together; what is left out keeps the registry's value."""

    strategy: str | None
    epsilon: float | None
    exact: bool
    """Evaluate nearly everything: slower, and each expert's law is its own to within 0.5 % of its bits."""
    n_ctx: int | None
    n_threads: int | None
    n_gpu_layers: int | None
    """-1 = all; None = as many as fit."""
    type_k: str | None
    type_v: str | None
    rpc: Mapping[str, Sequence[str]]
    """Workers (``host:port``) by expert; "" = all others."""
    prompt_cache: int
    """Bytes of earlier texts that are kept, for requests with ``reuse``."""
    fewer_layers: bool | None
    smaller_quants: bool | None
    vram_margin: float | None
    lanes: str
    space: str
    chat_templates: Mapping[str, str | Path]
    """Jinja files by expert, or "none"; they replace the experts' own."""
    router: str | Path | None
    """A trained router; it takes the place of a strategy."""
    calibrate: bool
    lazy: bool
    prefetch: str
    flash_attn: bool | None


def load_options(given: Mapping[str, Any]) -> Options:
    """Options from keywords. Raises UsageError for an unknown one, with the nearest."""
    check_known("load option", given, LoadKeywords.__annotations__)
    values = {key: value for key, value in given.items() if key != "exact"}
    if given.get("exact"):
        if values.get("epsilon") is not None:
            raise UsageError("exact=True sets epsilon; give one of the two")
        values["epsilon"] = EXACT_EPSILON
    return Options(**values)
