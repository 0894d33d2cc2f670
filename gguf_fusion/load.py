"""Composition root: from specifications to experts, predictors, lanes and one engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from gguf_fusion import calibration, gguf_info, hub, smaller
from gguf_fusion.ahead import AheadExpert, Draft
from gguf_fusion.batches import batch_facts
from gguf_fusion.bridge.store import cached_byte_tables
from gguf_fusion.bridge.tables import ByteTables, byte_tables
from gguf_fusion.chat import NO_TEMPLATE, Reader, special_texts
from gguf_fusion.chat_template import ChatTemplate
from gguf_fusion.config import ExpertSpec, Registry, check_known
from gguf_fusion.cover.base import Predictor, Prompt
from gguf_fusion.cover.direct import TokenCursor
from gguf_fusion.cover.tree import DEFAULT_EPSILON, CoverTree
from gguf_fusion.devices import usable_cores
from gguf_fusion.engine import Engine, SymbolSpace
from gguf_fusion.errors import ConfigError, LoadError, ModelFileError, UsageError
from gguf_fusion.experts.base import Expert
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.prompt_cache import PromptCache
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.expressions import DEFAULT as DEFAULT_STRATEGY
from gguf_fusion.expressions import parse
from gguf_fusion.lanes import Lanes, ThreadedExpert, choose
from gguf_fusion.mapped import give_back_code, give_back_lookups
from gguf_fusion.members import Member, check_router, checked_weights, with_router, with_templates
from gguf_fusion.options import Options
from gguf_fusion.placement import Placement
from gguf_fusion.plan.planner import GPU_MARGIN
from gguf_fusion.router.fuser import Routed
from gguf_fusion.router.head import Head
from gguf_fusion.strategy import Strategy
from gguf_fusion.vocabulary import Kind, Vocabulary

_log = logging.getLogger(__name__)

_NAMED_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the key's own spelling
    "pad_token": "padding",
}
"""What templates call a token -> the middle of its key in a GGUF file."""

_COMPILER = "libllvmlite"
"""Its library maps more than 100 MB of code, none of which runs once all kernels are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load brought: experts, the engine over those with positive weight, and their templates.

    templates : chat template of each expert in the engine's order, see ``chat.chat_prompt``
    """

    experts: tuple[ThreadedExpert, ...]
    engine: Engine
    lanes: Lanes
    templates: tuple[str | None, ...]
    load_s: float

    def close(self) -> None:
        """End the lanes, then free the experts."""
        self.lanes.close()
        for expert in self.experts:
            expert.close()


def load(
    members: Sequence[Member],
    options: Options | None = None,
    *,
    registry: Registry | None = None,
    progress: hub.Progress | None = None,
    offline: bool = False,
) -> Loaded:
    """Fetch what is missing, load every member with a positive weight, or nothing at all.

    Raises what ``hub.pull`` and ``LlamaExpert.load`` raise, naming the broken member; earlier ones are closed then.
    """
    options = options or Options()
    active = with_templates([member for member in members if member.weight > 0.0], options.chat_templates)
    head = None if options.router is None else Head.load(Path(options.router))
    if head is not None:
        if options.strategy is not None:
            raise UsageError("a router takes the place of a strategy; give one of the two")
        active = with_router(active, head, registry)
    active = with_options(active, options)
    parse(options.strategy or DEFAULT_STRATEGY)  # a misspelt strategy must not cost a download first
    margin = GPU_MARGIN if options.vram_margin is None else options.vram_margin
    if options.smaller_quants:
        active, registry = smaller.choose(active, registry, margin=margin, calibrated=options.calibrate)
    paths = [hub.pull(member.ref, registry, progress=progress, offline=offline)[0] for member in active]
    began = time.perf_counter()
    experts: list[LlamaExpert] = []
    placement = Placement.decide(
        [member.spec for member in active], paths, fewer_layers=bool(options.fewer_layers), margin=margin,
        calibrated=options.calibrate,
    )  # fmt: skip
    try:
        for member, path in zip(active, paths, strict=True):
            is_router = head is not None and member.spec.name == head.router
            if is_router and head is not None:
                check_router(head, path)
            experts.append(_placed(member.spec, path, options, placement, hidden=is_router))
        if placement is not None:
            placement.look_back()
        if options.calibrate:
            _calibrate(active, experts, paths, placement)
        triples = zip(active, experts, paths, strict=True)
        templates = [template_of(member.spec, expert, path) for member, expert, path in triples]
        loaded = assemble(
            experts, [m.weight for m in active], options, templates, [m.spec.role for m in active],
            None if head is None else Routed(head), _identity(paths, options),
        )  # fmt: skip
        return replace(loaded, load_s=time.perf_counter() - began)
    except BaseException:
        for expert in experts:
            expert.close()
        raise


def with_options(members: Sequence[Member], options: Options) -> list[Member]:
    """The members, their specifications changed by what the options say. Raises UsageError for unknown experts."""
    names = {member.spec.name: None for member in members}
    check_known("rpc: expert", {name: None for name in options.rpc if name}, names)
    changes = {key: getattr(options, key) for key in ("n_ctx", "n_threads", "n_gpu_layers", "type_k", "type_v")}
    given = {key: value for key, value in changes.items() if value is not None}
    found = []
    for member in members:
        rpc = options.rpc.get(member.spec.name, options.rpc.get("", member.spec.rpc))
        found.append(replace(member, spec=replace(member.spec, rpc=tuple(rpc), **given)))
    return found


def _placed(
    spec: ExpertSpec, path: Path, options: Options, placement: Placement | None, *, hidden: bool
) -> LlamaExpert:
    """Load one expert where it was planned to lie."""
    if placement is None:
        return load_expert(spec, path, options, hidden=hidden)
    return placement.load(spec.name, lambda n: load_expert(spec, path, replace(options, n_gpu_layers=n), hidden=hidden))


def _calibrate(
    members: Sequence[Member], experts: Sequence[LlamaExpert], paths: Sequence[Path], placement: Placement | None
) -> None:
    """Measure speeds of the experts that lie on one device as a whole, where that was not done before."""
    for member, expert, path in zip(members, experts, paths, strict=True):
        device = calibration.CPU if placement is None else placement.only_device(member.spec.name)
        if device is not None:
            calibration.measure(expert, path, device, member.spec.n_threads or usable_cores())


def _identity(paths: Sequence[Path], options: Options) -> str:
    """What decides about speeds: files by size and time of change, settings, the native library."""
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    settings = f"{options.n_gpu_layers} {options.n_ctx} {options.n_threads} {options.flash_attn}"
    return f"{files} {settings} {version('llama-cpp-python')}"


def load_expert(
    spec: ExpertSpec, path: Path, options: Options, *, max_rows: int | None = None, hidden: bool = False
) -> LlamaExpert:
    """Load one expert's file, for up to ``max_rows`` rows at a time; its name stands in every error.

    ``hidden``: it keeps the hidden states that a router reads.
    """
    settings: dict[str, Any] = {
        "n_ctx": spec.n_ctx if options.n_ctx is None else options.n_ctx,
        "n_threads": spec.n_threads if options.n_threads is None else options.n_threads,
        "n_gpu_layers": spec.n_gpu_layers if options.n_gpu_layers is None else options.n_gpu_layers,
        "type_k": spec.type_k if options.type_k is None else options.type_k,
        "type_v": spec.type_v if options.type_v is None else options.type_v,
        "rpc": spec.rpc or None,
        "max_rows": max_rows,
        "flash_attn": options.flash_attn,
        "hidden": hidden,
        "lora": None if spec.lora is None else str(spec.lora),
    }
    if spec.rpc and settings["n_gpu_layers"] is None:
        settings["n_gpu_layers"] = -1
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        expert = LlamaExpert.load(path, name=spec.name, add_end=spec.add_end, remove_end=spec.remove_end, **given)
    except (LoadError, ModelFileError) as error:
        if spec.name in str(error):
            raise
        raise type(error)(f"expert {spec.name!r}: {error}") from error
    give_back_lookups(gguf_info.read(path))
    return expert


class TemplateHolder(Reader, Protocol):
    """An expert, or no more of it than its vocabulary."""

    def chat_template(self) -> str | None: ...


def template_of(spec: ExpertSpec, expert: TemplateHolder, path: Path) -> str | None:
    """The expert's chat template: from the registry, else from its file; None where neither has one.

    It comes with the texts of the special tokens that the file at ``path`` names.
    """
    if spec.template == NO_TEMPLATE:
        return NO_TEMPLATE
    text = expert.chat_template()
    if isinstance(spec.template, Path):
        try:
            text = spec.template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"expert {spec.name!r}: its template {spec.template} cannot be read: {error}") from error
    if text is None:
        return None
    metadata = gguf_info.read(path).metadata
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED_TOKENS.items()}
    named = {name: token for name, token in ids.items() if isinstance(token, int)}
    fallback = {
        "bos_token": expert.vocabulary.bos_id,
        "eos_token": next(iter(expert.vocabulary.end_ids.tolist()), None),
    }
    return ChatTemplate(text, special_texts(expert, {**fallback, **named}))


def assemble(
    experts: Sequence[ThreadedExpert],
    weights: Sequence[float],
    options: Options | None = None,
    templates: Sequence[str | None] | None = None,
    roles: Sequence[str] = (),
    strategy: Strategy | None = None,
    identity: str | None = None,
) -> Loaded:
    """Predictors, lanes and the engine over experts that are loaded already. Zero weights take no part."""
    options = options or Options()
    began = time.perf_counter()
    chosen = np.array(checked_weights(weights, len(experts)))
    strategy = strategy or parse(options.strategy or DEFAULT_STRATEGY)
    active = [i for i, weight in enumerate(chosen) if weight > 0.0]
    taking_part = [experts[i] for i in active]
    draft = Draft()
    # The layer in between costs time at every decode; without it rows are those of whatever batch a text needs.
    ahead = options.lazy or options.prefetch != "off"
    readers = [AheadExpert(expert, draft) for expert in taking_part] if ahead else []
    predictors, space = make_predictors(cast("Sequence[Expert]", readers or taking_part), options)
    plan = choose(taking_part, options.lanes, options.n_threads, identity=identity, calibrate=options.calibrate)
    lanes = Lanes(plan)
    for reader in readers:
        name = identity and f"{identity} {plan.threads}"
        reader.facts = batch_facts(reader.inside, name, calibrate=options.calibrate, level=options.prefetch)
    mine = [roles[i] for i in active] if roles else ()
    shares = chosen[active] / chosen[active].sum()
    engine = Engine(predictors, strategy, shares, lanes, space=space, roles=mine, draft=draft)
    engine.lazy, engine.prefetch = options.lazy, options.prefetch
    cache = PromptCache(options.prompt_cache) if options.prompt_cache else None
    for expert in taking_part:
        expert.prompt_cache = cache
    return Loaded(
        experts=tuple(experts),
        engine=engine,
        lanes=lanes,
        templates=tuple(None if templates is None else templates[i] for i in active),
        load_s=time.perf_counter() - began,
    )


def make_predictors(experts: Sequence[Expert], options: Options) -> tuple[list[Predictor], SymbolSpace]:
    """Predictors over one symbol space: token ids where all vocabularies are the same, else bytes."""
    vocabularies = [expert.vocabulary for expert in experts]
    one_vocabulary = len({vocabulary.fingerprint for vocabulary in vocabularies}) == 1
    if options.space == "token" and not one_vocabulary:
        names = ", ".join(expert.name for expert in experts)
        raise UsageError(f"space: 'token' needs identical vocabularies, but those of {names} differ; use 'byte'")
    if one_vocabulary and options.space != "byte":
        cursors = [TokenCursor(expert) for expert in experts]
        # Siblings may differ in padding ids at the end: the shorter row has all that can be chosen.
        shared = min(vocabularies, key=lambda vocabulary: vocabulary.n_vocab)
        return list(cursors), SymbolSpace(shared.n_vocab, cursors[0].end_symbol, shared)
    tables: dict[str, ByteTables] = {}
    for vocabulary in vocabularies:
        if vocabulary.fingerprint not in tables:
            tables[vocabulary.fingerprint] = cached_byte_tables(vocabulary)
    epsilon = DEFAULT_EPSILON if options.epsilon is None else options.epsilon
    _compile_kernels()
    return [CoverTree(e, tables[e.vocabulary.fingerprint], epsilon=epsilon) for e in experts], SymbolSpace()


def _compile_kernels() -> None:
    """Run every bridge kernel once on a toy: the first call compiles it or fetches it from a cache on disk.

    Done here, so that it counts as loading and the first text is as fast as the next.
    """
    vocabulary = Vocabulary.from_pieces([b"a", b"ab", b"</s>"], [Kind.TEXT, Kind.TEXT, Kind.END])
    tree = CoverTree(TableExpert(vocabulary, lambda _: np.ones(3)), byte_tables(vocabulary))
    tree.start(Prompt(ids=np.zeros(1, np.int32), observed=np.ones(1, np.bool_)))
    for byte in b"aba":
        tree.push(byte, 0.5)
    give_back_code(_COMPILER)
