"""Checks one entry of a registry file and makes its specification."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from gguf_fusion.config.references import parse_source
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
from gguf_fusion.errors import ConfigError, UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_ENDPOINT = re.compile(r"\S+:\d{1,5}\Z")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")


@dataclass(frozen=True, slots=True)
class Located:
    """A value of a registry file and where it stands."""

    value: Any
    where: str
    folder: Path

    def fail(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {message}")


Entry = dict[str, Located]


def nearest(word: str, valid: Iterable[str]) -> str:
    """Text to append to an error: the nearest valid word, or all of them when none is near."""
    known = sorted(valid)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid here: {', '.join(known)}" if known else ""


def check_known(what: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise UsageError for a key of ``given`` that is not ``known``, naming the nearest."""
    for key in given:
        if key not in known:
            raise UsageError(f"{what} {key!r} is unknown{nearest(key, known)}")


EXPERT_KEYS = [
    "ref",
    "sources",
    "role",
    "description",
    "licence",
    "licence_url",
    "needs_acceptance",
    "template",
    "n_ctx",
    "n_gpu_layers",
    "rpc",
    "n_threads",
    "type_k",
    "type_v",
    "add_end",
    "remove_end",
    "lora",
    "smaller",
]
ENSEMBLE_KEYS = [
    "experts",
    "weights",
    "description",
    "strategy",
    "epsilon",
    "bridge",
    "plain_chat",
    "sampling",
    "fewer_layers",
    "smaller_quants",
    "vram_margin",
]
_SOURCE_KEYS = ["hub", "file", "quant", "revision", "wheels", "url", "path", "sha256", "size"]


def expert_spec(name: str, entry: Entry) -> ExpertSpec:
    if ("sources" in entry) == ("ref" in entry):
        where = next(iter(entry.values())).where if entry else f"[experts.{name}]"
        both = (
            "has both 'sources' and 'ref'; keep one" if entry.get("ref") else "says nowhere where its file comes from"
        )
        raise ConfigError(f"{where}: expert {name!r} {both} ('sources' = a list, 'ref' = \"user/repo:Q4_K_M\")")
    if "ref" in entry:
        sources: tuple[Source, ...] = (_ref_source(entry["ref"]),)
    else:
        sources = _sources(entry["sources"])
    template: str | Path | None = _text(entry, "template", None)
    if template is not None and template != "none":
        template = _path(entry["template"])
    return ExpertSpec(
        name=name,
        sources=sources,
        role=_text(entry, "role", "") or "",
        description=_text(entry, "description", "") or "",
        licence=_text(entry, "licence", "") or "",
        licence_url=_text(entry, "licence_url", "") or "",
        needs_acceptance=_text(entry, "needs_acceptance", None),
        template=template,
        n_ctx=_integer(entry, "n_ctx", N_CTX_DEFAULT, low=1),
        n_gpu_layers=_integer(entry, "n_gpu_layers", 0, low=-1) if "n_gpu_layers" in entry else None,
        rpc=_endpoints(entry),
        n_threads=_integer(entry, "n_threads", 0, low=1) if "n_threads" in entry else None,
        type_k=_text(entry, "type_k", None),
        type_v=_text(entry, "type_v", None),
        add_end=_ends(entry, "add_end"),
        remove_end=_ends(entry, "remove_end"),
        lora=_path(entry["lora"]) if "lora" in entry else None,
        smaller=_sources(entry["smaller"]) if "smaller" in entry else (),
    )


def ensemble_spec(name: str, entry: Entry, experts: Mapping[str, ExpertSpec]) -> EnsembleSpec:
    if "experts" not in entry:
        where = next(iter(entry.values())).where if entry else f"[ensembles.{name}]"
        raise ConfigError(f"{where}: ensemble {name!r} has no 'experts'")
    members, weights = entry["experts"], entry.get("weights")
    names: Any
    values: Any
    if isinstance(members.value, dict):
        if weights is not None:
            weights.fail("the table 'experts' already holds the weights; drop this key")
        names, values = list(members.value), list(members.value.values())
        weights = members
    else:
        names = members.value
        equal = [1.0] * len(names) if isinstance(names, list) else []
        values = equal if weights is None else weights.value
    if not isinstance(names, list) or not names or not all(isinstance(item, str) for item in names):
        members.fail(f"expected a list of expert names or a table NAME = WEIGHT, got {members.value!r}")
    for member in names:
        if member not in experts:
            members.fail(f"no expert is called {member!r}{nearest(member, experts)}")
        if names.count(member) > 1:
            members.fail(f"{member!r} is listed twice; give the second one its own [experts.NAME]")
    return EnsembleSpec(
        name=name,
        experts=tuple(names),
        weights=_weights(weights or members, values, len(names)),
        description=_text(entry, "description", "") or "",
        strategy=_text(entry, "strategy", None),
        epsilon=_fraction(entry, "epsilon"),
        bridge=_choice(entry, "bridge", "byte", ("byte", "token")),
        plain_chat=_text(entry, "plain_chat", None),
        sampling=_sampling(entry),
        fewer_layers=_flag(entry, "fewer_layers"),
        smaller_quants=_flag(entry, "smaller_quants"),
        vram_margin=_fraction(entry, "vram_margin"),
    )


def _weights(at: Located, values: Any, n_experts: int) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(_is_number(item) for item in values):
        at.fail(f"expected {n_experts} numbers, got {values!r}")
    if len(values) != n_experts:
        at.fail(f"expected {n_experts} weights, one per expert, got {len(values)}")
    weights = tuple(float(item) for item in values)
    if not all(math.isfinite(item) and item >= 0 for item in weights):
        at.fail(f"weights must be finite and not negative, got {list(weights)}")
    if sum(weights) <= 0:
        at.fail("the weights sum to zero; at least one must be positive")
    return weights


def _sources(listed: Located) -> tuple[Source, ...]:
    if not isinstance(listed.value, list) or not listed.value:
        listed.fail("expected a list of tables, each with one of hub, wheels, url, path")
    return tuple(_source(Located(item, listed.where, listed.folder)) for item in listed.value)


def _source(at: Located) -> Source:
    item = at.value
    if not isinstance(item, dict):
        at.fail(f"expected a table with one of hub, wheels, url, path, got {item!r}")
    for key in item:
        if key not in _SOURCE_KEYS:
            at.fail(f"unknown key {key!r}{nearest(key, _SOURCE_KEYS)}")
    kinds = [key for key in ("hub", "wheels", "url", "path") if key in item]
    if len(kinds) != 1:
        at.fail(f"expected exactly one of hub, wheels, url, path in a source, got {', '.join(kinds) or 'none'}")
    for key in ("hub", "file", "quant", "revision", "url", "path", "sha256"):
        if key in item and (not isinstance(item[key], str) or not item[key]):
            at.fail(f"{key}: expected text, got {item[key]!r}")
    sha256, size = item.get("sha256"), item.get("size")
    if sha256 is not None and not _SHA256.match(sha256):
        at.fail(f"sha256: expected 64 lower-case hexadecimal digits, got {sha256!r}")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size <= 0):
        at.fail(f"size: expected the number of bytes, got {size!r}")
    if kinds == ["hub"]:
        if not _REPO.match(item["hub"]):
            at.fail(f"hub: expected user/repo, got {item['hub']!r}")
        if "file" in item and "quant" in item:
            at.fail("a source names its file or its quant, not both")
        revision = item.get("revision", "main")
        return HubSource(item["hub"], item.get("file"), item.get("quant"), revision, sha256, size)
    if kinds == ["url"]:
        return UrlSource(item["url"], sha256, size)
    if kinds == ["path"]:
        return PathSource(_path(Located(item["path"], f"{at.where} path", at.folder)), sha256, size)
    if sha256 is None or size is None:
        at.fail("a wheel source needs sha256 and size, since the joined parts carry no check of their own")
    return WheelSource(_parts(at, item["wheels"]), item.get("file") or _wheel_file(item["wheels"]), sha256, size)


def _parts(at: Located, value: Any) -> tuple[WheelPart, ...]:
    if not isinstance(value, list) or not value:
        at.fail(f"wheels: expected a list of tables with package, version, member, got {value!r}")
    for part in value:
        keys = {"package", "version", "member"}
        if not isinstance(part, dict) or set(part) != keys or not all(isinstance(part[key], str) for key in keys):
            at.fail(f"wheels: expected tables with exactly package, version and member, got {part!r}")
        if not NAME.match(part["package"]) or not re.match(r"[0-9][0-9A-Za-z.!+_-]*\Z", part["version"]):
            at.fail(f"wheels: {part['package']}=={part['version']} is no package name and version")
    return tuple(WheelPart(part["package"], part["version"], part["member"]) for part in value)


def _wheel_file(parts: list[dict[str, str]]) -> str:
    """The joined file's name: that of the first member, without a part's suffix."""
    name = re.sub(r"\.(part)?\d+\Z", "", parts[0]["member"].rsplit("/", 1)[-1])
    return name if name.endswith(".gguf") else f"{name}.gguf"


def _ref_source(at: Located) -> Source:
    if not isinstance(at.value, str) or not at.value:
        at.fail(f'expected text such as "user/repo:Q4_K_M", got {at.value!r}')
    source = parse_source(at.value, at.folder)
    if source is None:
        at.fail(f"expected user/repo[:QUANT], a URL or a path, got {at.value!r}")
    return source


def _path(at: Located) -> Path:
    if any(ord(character) < 32 for character in at.value):
        at.fail(f"{at.value!r} holds a control character; write paths with backslashes in single quotes, or use /")
    return at.folder / Path(at.value).expanduser()


def _text(entry: Entry, key: str, default: str | None) -> str | None:
    if key not in entry:
        return default
    at = entry[key]
    if not isinstance(at.value, str):
        at.fail(f"expected text, got {at.value!r}")
    return str(at.value)


def _choice(entry: Entry, key: str, default: str, valid: tuple[str, ...]) -> str:
    value = _text(entry, key, default)
    if value not in valid:
        entry[key].fail(f"expected {' or '.join(valid)}, got {value!r}")
    return value


def _integer(entry: Entry, key: str, default: int, low: int) -> int:
    if key not in entry:
        return default
    at = entry[key]
    if not isinstance(at.value, int) or isinstance(at.value, bool) or at.value < low:
        at.fail(f"expected a whole number of at least {low}, got {at.value!r}")
    return int(at.value)


def _fraction(entry: Entry, key: str) -> float | None:
    if key not in entry:
        return None
    at = entry[key]
    if not _is_number(at.value) or not 0 <= at.value < 1:
        at.fail(f"expected a number from 0 up to (not including) 1, got {at.value!r}")
    return float(at.value)


def _flag(entry: Entry, key: str) -> bool:
    if key not in entry:
        return False
    at = entry[key]
    if not isinstance(at.value, bool):
        at.fail(f"expected true or false, got {at.value!r}")
    return at.value


def _endpoints(entry: Entry) -> tuple[str, ...]:
    if "rpc" not in entry:
        return ()
    at = entry["rpc"]
    if not isinstance(at.value, list) or not all(isinstance(item, str) and _ENDPOINT.match(item) for item in at.value):
        at.fail(f'expected a list of workers such as ["192.168.1.7:50052"], got {at.value!r}')
    return tuple(at.value)


def _ends(entry: Entry, key: str) -> tuple[int | str, ...]:
    if key not in entry:
        return ()
    at = entry[key]
    if not isinstance(at.value, list) or not all(
        isinstance(item, (int, str)) and not isinstance(item, bool) and item != "" for item in at.value
    ):
        at.fail(f"expected a list of token ids or token texts, got {at.value!r}")
    return tuple(at.value)


def _sampling(entry: Entry) -> Mapping[str, Any]:
    if "sampling" not in entry:
        return MappingProxyType({})
    at = entry["sampling"]
    if not isinstance(at.value, dict):
        at.fail(f"expected a table of sampling settings, got {at.value!r}")
    return MappingProxyType(dict(at.value))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
