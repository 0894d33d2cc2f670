"""gguf-fusion: several small GGUF experts, one text.

The public names below are imported when they are first used, so that ``import gguf_fusion`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf_fusion.chat import Message as Message
    from gguf_fusion.ensemble import Completion as Completion
    from gguf_fusion.ensemble import Ensemble as Ensemble
    from gguf_fusion.errors import ClosedError as ClosedError
    from gguf_fusion.errors import ConfigError as ConfigError
    from gguf_fusion.errors import ContextOverflowError as ContextOverflowError
    from gguf_fusion.errors import ExpertFailedError as ExpertFailedError
    from gguf_fusion.errors import GgufFusionError as GgufFusionError
    from gguf_fusion.errors import HubError as HubError
    from gguf_fusion.errors import LoadError as LoadError
    from gguf_fusion.errors import MissingExtraError as MissingExtraError
    from gguf_fusion.errors import ModelFileError as ModelFileError
    from gguf_fusion.errors import NoSpaceError as NoSpaceError
    from gguf_fusion.errors import NotCachedError as NotCachedError
    from gguf_fusion.errors import SamplingError as SamplingError
    from gguf_fusion.errors import StrategyError as StrategyError
    from gguf_fusion.errors import UsageError as UsageError
    from gguf_fusion.measure.bench import bench as bench
    from gguf_fusion.measure.quants import ensemble_quants as ensemble_quants
    from gguf_fusion.measure.quants import quants as quants
    from gguf_fusion.pieces import PieceView as PieceView
    from gguf_fusion.records import END as END
    from gguf_fusion.records import Piece as Piece
    from gguf_fusion.records import Step as Step
    from gguf_fusion.records import Timings as Timings
    from gguf_fusion.records import Usage as Usage
    from gguf_fusion.reply import Reply as Reply
    from gguf_fusion.sampling import SamplingParams as SamplingParams
    from gguf_fusion.trace import TraceHeader as TraceHeader
    from gguf_fusion.trace import TraceWriter as TraceWriter
    from gguf_fusion.trace import read_trace as read_trace

__version__ = "0.1.0"

_HOMES = {
    "chat": ("Message",),
    "ensemble": ("Completion", "Ensemble"),
    "errors": (
        "ClosedError",
        "ConfigError",
        "ContextOverflowError",
        "ExpertFailedError",
        "GgufFusionError",
        "HubError",
        "LoadError",
        "MissingExtraError",
        "ModelFileError",
        "NoSpaceError",
        "NotCachedError",
        "SamplingError",
        "StrategyError",
        "UsageError",
    ),
    "measure.bench": ("bench",),
    "measure.quants": ("ensemble_quants", "quants"),
    "pieces": ("PieceView",),
    "records": ("END", "Piece", "Step", "Timings", "Usage"),
    "reply": ("Reply",),
    "sampling": ("SamplingParams",),
    "trace": ("TraceHeader", "TraceWriter", "read_trace"),
}

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 (all of them are names)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, imported yet or not."""
    return sorted({*globals(), *__all__})
