"""Every error gguf-fusion raises on purpose, drawn as a tree.

GgufFusionError
├── UsageError               the request itself is wrong (exit status 2)
│   ├── ConfigError          models.toml: unknown key, bad value, duplicate name
│   ├── StrategyError        a strategy expression cannot be parsed or has bad parameters
│   └── SamplingError        a sampling parameter lies outside its interval
├── HubError                 a model could not be fetched or found
│   ├── NotCachedError       offline, and nothing local fits
│   └── NoSpaceError         the disk cannot hold the download
├── ModelFileError           the file is no usable GGUF (truncated, HTML page, LFS pointer, …)
├── LoadError                the native library refused the model or its context
├── ContextOverflowError     a prompt does not fit the tightest expert's context
├── ExpertFailedError        an expert broke while running (NaN row, failed decode)
├── ClosedError              use after close()
└── MissingExtraError        an optional package is needed; names the extra

Messages say what was expected, what was got and how to mend it. Data is attached as attributes,
so that callers map classes and never parse text.
"""

from __future__ import annotations


class GgufFusionError(Exception):
    """Base of all errors raised on purpose; ``exit_status`` is what the command line returns."""

    exit_status = 1


class UsageError(GgufFusionError):
    """The request itself is wrong."""

    exit_status = 2


class ConfigError(UsageError):
    """A registry file (models.toml) is wrong: names the file, the key and the nearest valid key."""


class StrategyError(UsageError):
    """A strategy expression cannot be parsed, or a parameter is unknown or out of range."""


class SamplingError(UsageError):
    """A sampling parameter lies outside its interval."""


class HubError(GgufFusionError):
    """A model could not be fetched or found."""


class NotCachedError(HubError):
    """Nothing local fits and no source may be, or can be, asked."""


class NoSpaceError(HubError):
    """The disk cannot hold the download."""

    def __init__(self, path: str, needed_bytes: int, free_bytes: int) -> None:
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        super().__init__(
            f"not enough disk space at {path}: {needed_bytes / 1e6:.0f} MB needed, "
            f"{free_bytes / 1e6:.0f} MB free; free some space or point the cache elsewhere "
            f"(HF_HUB_CACHE, GGUF_FUSION_CACHE)"
        )


class ModelFileError(GgufFusionError):
    """The file is not a usable GGUF; the message holds the diagnosis."""


class LoadError(GgufFusionError):
    """The native library refused the model or its context; the message ends with its own words."""


class ContextOverflowError(GgufFusionError):
    """A prompt does not fit the context of the tightest expert."""

    def __init__(self, expert: str, n_prompt: int, n_ctx: int) -> None:
        self.expert = expert
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx
        super().__init__(
            f"expert {expert!r} counts {n_prompt} prompt tokens, but its context holds {n_ctx} and one "
            f"must stay free for the reply; shorten the prompt or raise the context (-c/--n-ctx)"
        )


class ExpertFailedError(GgufFusionError):
    """An expert broke while running."""

    def __init__(self, expert: str, reason: str) -> None:
        self.expert = expert
        self.reason = reason
        super().__init__(f"expert {expert!r}: {reason}")


class ClosedError(GgufFusionError):
    """The object was closed and cannot be used any more."""


class MissingExtraError(GgufFusionError):
    """An optional package is needed for this."""

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(f"this needs the package {package}; install it with: pip install 'gguf-fusion[{extra}]'")
