"""The registry of experts and ensembles (``models.toml``)."""

from gguf_fusion.config.entries import check_known, nearest
from gguf_fusion.config.references import parse_source
from gguf_fusion.config.registry import DEFAULT_ENSEMBLE, Registry, packaged_file, user_file
from gguf_fusion.config.specs import (
    N_CTX_DEFAULT,
    EnsembleSpec,
    ExpertSpec,
    HubSource,
    PathSource,
    Source,
    UrlSource,
    WheelPart,
    WheelSource,
)

__all__ = [
    "DEFAULT_ENSEMBLE",
    "N_CTX_DEFAULT",
    "EnsembleSpec",
    "ExpertSpec",
    "HubSource",
    "PathSource",
    "Registry",
    "Source",
    "UrlSource",
    "WheelPart",
    "WheelSource",
    "check_known",
    "nearest",
    "packaged_file",
    "parse_source",
    "user_file",
]
