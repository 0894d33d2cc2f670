"""Quantization levels of one model, and which level for which expert of an ensemble: files found or made, measured."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_fusion import hub
from gguf_fusion.config import EnsembleSpec, HubSource, Registry
from gguf_fusion.errors import GgufFusionError, HubError, UsageError
from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.scorer import Scorer
from gguf_fusion.evaluate.scorer import Settings as ScorerSettings
from gguf_fusion.experts import native
from gguf_fusion.experts.native_vocabulary import read_vocabulary
from gguf_fusion.expressions import DEFAULT, parse
from gguf_fusion.gguf_info import read
from gguf_fusion.measure.combinations import Chosen, Laws, choose
from gguf_fusion.measure.ladder import Ladder, Plan, Tell, ladder
from gguf_fusion.measure.making import check_levels, made, needs_leave
from gguf_fusion.members import Member, members_from, members_of
from gguf_fusion.options import Options
from gguf_fusion.weights import LOWEST

LEVELS = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")


def default_text() -> bytes:
    """Sources of Python's own library, which are there on every machine."""
    lib = Path(sysconfig.get_path("stdlib"))
    return b"\n".join((lib / name).read_bytes() for name in ("textwrap.py", "calendar.py", "argparse.py"))


def quants(
    ref: str, levels: Sequence[str] = LEVELS, *, reference: str | None = None, text: bytes | None = None,
    plan: Plan | None = None, registry: Registry | None = None, offline: bool = False,
    progress: hub.Progress | None = None, tell: Tell = lambda text: None,
) -> Ladder:  # fmt: skip
    """Measure levels of a model: size, speed, memory, and distance from the reference.

    ref       : a name of the registry, ``user/repo:QUANT`` or a file
    reference : a level of its repository, or a file; None = the file of ``ref`` itself
    Levels come from the repository where it has them, else they are made from the reference. What was measured once is
    remembered by the hash of the files: a second call goes on where the first one was stopped.
    Raises UsageError for unknown levels, another vocabulary, a text shorter than one chunk, or where levels would be
    made from a quantized file and ``plan.requantize`` is not set.
    """
    levels, plan, registry = check_levels(levels), plan or Plan(), registry or Registry.load()
    repository = _Repository(ref, registry, offline=offline, progress=progress, tell=tell)
    base, others = _files(ref, reference, repository, registry, offline=offline, progress=progress)
    needs_leave(read(base), repository.without(levels), requantize=plan.requantize)
    name = hub.default_name(ref, registry)
    return ladder(name, base, levels, default_text() if text is None else text, plan, tell, repository.level, others)


def _files(
    ref: str, reference: str | None, repository: _Repository, registry: Registry, *, offline: bool,
    progress: hub.Progress | None,
) -> tuple[Path, list[Path]]:  # fmt: skip
    """(the reference, the file of ``ref`` where that is another one). Raises UsageError for other vocabularies."""

    def pull(wanted: str) -> Path:
        return hub.pull(wanted, registry, progress=progress, offline=offline)[0]

    if reference is None:
        return pull(ref), []
    if Path(reference).exists() or reference.lower().endswith(".gguf"):
        base = pull(reference)
    else:
        (level,) = check_levels([reference])
        if not repository.name:
            raise UsageError(f"--reference {level}: {ref} comes from no repository that may have it; give a file")
        base = pull(f"{repository.name}:{level}")
    if ref == repository.name:  # a repository as a whole, no file of it
        return base, []
    own = pull(ref)
    if own.resolve() == base.resolve():
        return base, []
    if _fingerprint(own) != _fingerprint(base):
        raise UsageError(
            f"--reference: {base.name} and {own.name} have different vocabularies, so that perplexities and "
            f"divergences cannot be compared; give a reference of the same model, or compare bits per byte "
            f"(gguf-fusion score)"
        )
    return base, [own]


def _fingerprint(path: Path) -> str:
    model = native.Model(path, vocab_only=True)
    try:
        return read_vocabulary(model).fingerprint
    finally:
        model.close()


class _Repository:
    """The Hugging Face repository that a reference belongs to, if any, and its levels."""

    def __init__(
        self, ref: str, registry: Registry, *, offline: bool, progress: hub.Progress | None, tell: Tell
    ) -> None:
        sources = hub.resolve_one(ref, registry).sources
        self.name = next((source.repo for source in sources if isinstance(source, HubSource)), "")
        self._registry = registry
        self._offline = hub.is_offline(offline)
        self._progress = progress
        if self.name and not self._offline and (silence := hub.reachable()):
            tell(f"levels are made here: {silence}")
            self._offline = True

    def without(self, levels: Sequence[str]) -> list[str]:
        """Levels that it certainly does not give; one that can be asked may have them all."""
        if self.name and not self._offline:
            return []
        return [level for level in levels if self.level(level) is None]

    def level(self, level: str) -> Path | None:
        """The file of a level; None where the repository does not have it or cannot be asked."""
        if not self.name:
            return None
        try:
            return hub.pull(
                f"{self.name}:{level}", self._registry, progress=self._progress, offline=self._offline
            )[0]  # fmt: skip
        except HubError:
            return None


@dataclass(frozen=True, slots=True)
class EnsembleChoice:
    """Which level for which expert. problems : levels that could not be had, and why."""

    ensemble: str
    experts: list[str]
    strategy: str
    budget_bytes: int
    bytes: int
    chosen: Chosen
    problems: list[str]

    def as_json(self) -> dict[str, Any]:
        """Plain data: the search's results beside the rest, and its gains as shares."""
        flat = asdict(self)
        best, even, single = self.chosen.best, self.chosen.even, self.chosen.single
        gains = {
            "gain_over_even": None if even is None else 1.0 - best.bpb / even.bpb,
            "gain_over_single": None if single is None else 1.0 - best.bpb / single.bpb,
        }
        return {**{key: value for key, value in flat.items() if key != "chosen"}, **flat["chosen"], **gains}


def ensemble_quants(
    ensemble: str, budget: int, levels: Sequence[str] = LEVELS, *, text: bytes | None = None, max_bytes: int = 2048,
    strategy: str | None = None, rivals: Sequence[str] = (), plan: Plan | None = None,
    registry: Registry | None = None, offline: bool = False, progress: hub.Progress | None = None,
    tell: Tell = lambda text: None,
) -> EnsembleChoice:  # fmt: skip
    """Choose the level of every expert for the fewest fused bits per byte within ``budget`` bytes of files.

    Every expert reads the text once per level; the combinations are then compared without further decodes.
    rivals : models that are compared alone, such as a larger one
    Raises UsageError for unknown levels, a budget that nothing fits, or levels of quantized files nobody asked for.
    """
    levels, plan, registry = check_levels(levels), plan or Plan(), registry or Registry.load()
    spec: EnsembleSpec = registry.ensemble(ensemble)
    rule = parse(strategy or spec.strategy or DEFAULT)
    members = [member for member in members_of(spec, registry) if member.weight > 0.0]
    text = (default_text() if text is None else text)[:max_bytes]
    files = {
        member.spec.name: hub.pull(member.ref, registry, progress=progress, offline=offline)[0] for member in members
    }
    for file in files.values():
        needs_leave(read(file), levels, requantize=plan.requantize)
    reading = _Reading(text, plan, tell)
    laws = {member.spec.name: reading.laws(member, files[member.spec.name], levels) for member in members}
    alone = {}
    for member in members_from(rivals, registry) if rivals else ():
        file = hub.pull(member.ref, registry, progress=progress, offline=offline)[0]
        alone[member.spec.name] = reading.laws(member, file, [])
    came = np.frombuffer(text, np.uint8).astype(np.int64)
    names, weights = list(laws), np.array([member.weight for member in members])
    chosen = choose(names, laws, came, reading.scored, rule, weights, budget, alone)
    return EnsembleChoice(
        ensemble, names, strategy or spec.strategy or DEFAULT, budget, int(reading.scored.sum()), chosen,
        reading.problems,
    )  # fmt: skip


class _Reading:
    """Laws of experts and their levels on one text; which of its bytes all of them score."""

    def __init__(self, text: bytes, plan: Plan, tell: Tell) -> None:
        self.scored = np.ones(len(text), np.bool_)
        self.problems: list[str] = []
        self._text, self._plan, self._tell = text, plan, tell

    def laws(self, member: Member, own: Path, levels: Sequence[str]) -> list[Laws]:
        """Of the expert's own file, and of every level that can be made from it."""
        first = read(own).quant
        found = [self._one(member, first, own)]
        for level in levels:
            if level != first:
                try:
                    file, _ = made(
                        own, level, requantize=self._plan.requantize, n_threads=self._plan.n_threads, tell=self._tell
                    )
                    found.append(self._one(member, level, file))
                except GgufFusionError as error:
                    self.problems.append(f"{member.spec.name} {level}: {error}")
        return found

    def _one(self, member: Member, level: str, file: Path) -> Laws:
        self._tell(f"{member.spec.name} {level}: reading {len(self._text)} bytes")
        options = Options(lanes="serial", n_threads=self._plan.n_threads or None)
        with (
            Scorer.of_members([replace(member, weight=1.0)], [file], options, ScorerSettings()) as scorer,
            scorer.trace(Document(level, self._text)) as trace,
        ):
            logs = np.concatenate([np.maximum(laws[0], LOWEST) for _, laws in trace.blocks(np.ones(1))])
            self.scored &= np.array(trace.scored)
        return Laws(level, read(file).size_bytes, logs)
