"""What all routes share: the owner of the ensemble, the settings, and what the model is called."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from gguf_fusion.ensemble import Ensemble, Weights
from gguf_fusion.expressions import parse
from gguf_fusion.server.errors import RefusedError
from gguf_fusion.server.owner import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a server answers.

    max_tokens : pieces of a chat reply, where the request names no limit
    max_body   : most bytes of a request
    """

    host: str = "127.0.0.1"
    keys: tuple[str, ...] = ()
    alias: str | None = None
    max_tokens: int = 1024
    max_body: int = 8 * 1024 * 1024
    metrics: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """The ensemble as it is served."""

    owner: Owner
    settings: Settings
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def ensemble(self) -> Ensemble:
        """Raises RefusedError (503) while it is being loaded."""
        return self.owner.ensemble

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.settings.alias or self.ensemble.name

    def check_model(self, name: str | None) -> None:
        """Raise RefusedError (404) for a model that is not here."""
        if name is not None and name not in (self.name, self.ensemble.name):
            raise RefusedError(
                404,
                f"model {name[:200]!r} is not served here; there is {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def facts(self, strategy: str | None = None, weights: Weights | None = None) -> dict[str, Any]:
        """How a text is fused: experts, strategy and weights, those of the ensemble unless others are given."""
        ensemble = self.ensemble
        return {
            "experts": list(ensemble.names),
            "strategy": ensemble.strategy if strategy is None else str(parse(strategy)),
            "weights": dict(zip(ensemble.names, ensemble.shares(weights).tolist(), strict=True)),
        }
