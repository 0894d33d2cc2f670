"""Registry files: ``models.toml`` to :class:`ExpertSpec` and :class:`EnsembleSpec`.

Files are read in this order, the first one that sets a key of an entry wins:

1. files given explicitly (``--config``), the first one first
2. the files in ``$GGUF_FUSION_MODELS`` (several are separated like ``PATH``)
3. ``./models.toml``
4. ``models.toml`` in the user's configuration directory
5. the registry that comes with the package

Entries are merged key by key, so a user file that says only ``[experts.NAME]`` and ``n_ctx = 8192`` keeps the rest.
Relative paths belong to the file they are written in. Strategies and sampling defaults are only carried here: the
modules that own them check them.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from gguf_fusion.config.entries import (
    ENSEMBLE_KEYS,
    EXPERT_KEYS,
    NAME,
    Entry,
    Located,
    ensemble_spec,
    expert_spec,
    nearest,
)
from gguf_fusion.config.specs import EnsembleSpec, ExpertSpec
from gguf_fusion.errors import ConfigError

DEFAULT_ENSEMBLE = "pocket"


def user_file() -> Path:
    """The user's own registry (it need not exist)."""
    return Path(platformdirs.user_config_dir("gguf-fusion", appauthor=False)) / "models.toml"


def packaged_file() -> Path:
    """The registry that comes with the package: inside it when installed, beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "models.toml"
    return inside if inside.is_file() else package.parent / "models.toml"


class Registry:
    """All experts and ensembles known by name."""

    def __init__(self, experts: Mapping[str, ExpertSpec], ensembles: Mapping[str, EnsembleSpec]) -> None:
        self.experts: Mapping[str, ExpertSpec] = MappingProxyType(dict(experts))
        self.ensembles: Mapping[str, EnsembleSpec] = MappingProxyType(dict(ensembles))

    @classmethod
    def load(cls, extra: Iterable[Path | str] = ()) -> Registry:
        """Read every registry file (see the module's text). Raises ConfigError."""
        required = [Path(item) for item in extra]
        required += [Path(item) for item in os.environ.get("GGUF_FUSION_MODELS", "").split(os.pathsep) if item]
        optional = [Path("models.toml"), user_file(), packaged_file()]
        files: dict[Path, None] = {}
        for path in required:
            if not path.expanduser().is_file():
                raise ConfigError(f"{path}: there is no such registry file (--config or $GGUF_FUSION_MODELS names it)")
            files[path.expanduser().resolve()] = None
        for path in optional:
            if path.is_file():
                files[path.resolve()] = None
        experts: dict[str, Entry] = {}
        ensembles: dict[str, Entry] = {}
        for path in reversed(files):
            _merge_file(path, experts, ensembles)
        return _build(experts, ensembles)

    def expert(self, name: str) -> ExpertSpec:
        """The expert of that name. Raises ConfigError with the nearest names."""
        if name not in self.experts:
            raise ConfigError(f"no expert is called {name!r}{nearest(name, self.experts)}")
        return self.experts[name]

    def ensemble(self, name: str) -> EnsembleSpec:
        """The ensemble of that name. Raises ConfigError with the nearest names."""
        if name not in self.ensembles:
            hint = "; that is an expert" if name in self.experts else nearest(name, self.ensembles)
            raise ConfigError(f"no ensemble is called {name!r}{hint}")
        return self.ensembles[name]


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Text and content of a TOML file; a byte order mark and CRLF are fine. Raises ConfigError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{path}: expected UTF-8, got UTF-16; save it again as UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: expected UTF-8, got byte 0x{raw[error.start]:02x}") from error
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        hint = ""
        if "escape" in message.lower() or "\\" in message or "hex" in message.lower():
            hint = "; write paths with backslashes in single quotes, or use /"
        elif "overwrite" in message or "twice" in message:
            hint = "; the same name or key appears twice in this file"
        raise ConfigError(f"{path}: {message}{hint}") from error


def _merge_file(path: Path, experts: dict[str, Entry], ensembles: dict[str, Entry]) -> None:
    text, content = read_toml(path)
    for section, table in content.items():
        if section not in ("experts", "ensembles"):
            raise ConfigError(
                f"{path}:{_line(text, section)}: unknown key {section!r}{nearest(section, ('experts', 'ensembles'))}"
            )
        valid = EXPERT_KEYS if section == "experts" else ENSEMBLE_KEYS
        target = experts if section == "experts" else ensembles
        if not isinstance(table, dict):
            raise ConfigError(f"{path}:{_line(text, section)}: expected [{section}.NAME] tables, got {table!r}")
        for name, entry in table.items():
            line = _line(text, section, name)
            if not isinstance(entry, dict):
                raise ConfigError(f"{path}:{line}: expected a table [{section}.{name}], got {entry!r}")
            if not NAME.match(name) or name.lower().endswith(".gguf"):
                raise ConfigError(
                    f"{path}:{line}: {name!r} cannot be a name, it reads like a file or a reference; "
                    f"use letters, digits, '.', '_', '-' and no .gguf at the end"
                )
            merged = target.setdefault(name, {})
            for key, value in entry.items():
                where = f"{path}:{_line(text, section, name, key)}: [{section}.{name}] {key}"
                if key not in valid:
                    raise ConfigError(f"{where}: unknown key{nearest(key, valid)}")
                merged[key] = Located(value, where, path.parent)


def _line(text: str, *keys: str) -> int:
    """Line (from 1) where ``keys`` is set, else where the deepest table around it begins (tomllib keeps none)."""
    wanted, table, best = ".".join(keys), "", 1
    for number, line in enumerate(text.splitlines(), 1):
        head = re.sub(r"[\"'\s]", "", line)
        if head.startswith("["):
            path = table = head.split("]")[0].lstrip("[")
            if wanted.startswith(f"{path}."):
                best = number
        elif "=" in head:
            path = f"{table}.{head.partition('=')[0]}".lstrip(".")
        else:
            continue
        if path == wanted or path.startswith(f"{wanted}."):
            return number
    return best


def _build(experts: Mapping[str, Entry], ensembles: Mapping[str, Entry]) -> Registry:
    specs = {name: expert_spec(name, entry) for name, entry in experts.items()}
    groups = {}
    for name, entry in ensembles.items():
        if name in specs:
            where = next(iter(entry.values())).where if entry else f"[ensembles.{name}]"
            raise ConfigError(f"{where}: {name!r} is also the name of an expert; every name must be unique")
        groups[name] = ensemble_spec(name, entry, specs)
    return Registry(specs, groups)
