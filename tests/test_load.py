"""Loading: which members, with which settings, all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_fusion import hub, load
from gguf_fusion.config import Registry
from gguf_fusion.cover.direct import TokenCursor
from gguf_fusion.cover.tree import DEFAULT_EPSILON, CoverTree
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import (
    ConfigError,
    GgufFusionError,
    LoadError,
    ModelFileError,
    NotCachedError,
    StrategyError,
    UsageError,
)
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.load import assemble
from gguf_fusion.members import members_from, members_of
from gguf_fusion.options import Options, load_options
from gguf_fusion.testing import byte_vocabulary, nested_vocabulary
from gguf_fusion.vocabulary import Kind, Vocabulary

VOCABULARIES = {"a": nested_vocabulary(), "b": byte_vocabulary(), "c": nested_vocabulary()}


class Fake(TableExpert):
    """Stands in for a GGUF file; remembers how it was loaded."""

    loaded: dict[str, Fake] = {}  # noqa: RUF012

    def __init__(self, path: Path, *, name: str, **settings: Any) -> None:
        vocabulary = VOCABULARIES[path.stem]
        super().__init__(vocabulary, lambda _: np.ones(vocabulary.n_vocab), name=name)
        self.path, self.settings, self.closed = path, settings, False
        Fake.loaded[name] = self

    def chat_template(self) -> str | None:
        return f"template of {self.path.stem}"

    def close(self) -> None:
        super().close()
        self.closed = True


@pytest.fixture
def registry(tmp_path: Path, write_gguf: Any, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Experts a, b, c and broken; loading a file makes a fake."""
    for name in ("a", "b", "c", "broken"):
        write_gguf(f"{name}.gguf")
    (tmp_path / "t.jinja").write_text("own template")
    path = tmp_path / "r.toml"
    path.write_text(
        '[experts.a]\nref = "./a.gguf"\nn_ctx = 64\nadd_end = [3]\ntype_k = "q8_0"\n'
        '[experts.b]\nref = "./b.gguf"\ntemplate = "none"\nn_gpu_layers = 5\n'
        '[experts.c]\nref = "./c.gguf"\ntemplate = "t.jinja"\n'
        '[experts.gone]\nref = "./gone.gguf"\n'
        '[experts.broken]\nref = "./broken.gguf"\n'
        '[ensembles.abc]\nexperts = ["a", "b", "c"]\nweights = [2, 1, 1]\nstrategy = "linear"\nepsilon = 0.02\n'
        "sampling = { temperature = 0.3 }\n"
        '[ensembles.odd]\nexperts = ["a", "broken"]\n'
        '[ensembles.half]\nexperts = ["a", "gone"]\nweights = [1, 0]\n'
        '[ensembles.wrong]\nexperts = ["a"]\nsampling = { temprature = 0.3 }\n'
    )
    Fake.loaded.clear()

    def fake_load(file: Path, *, name: str, **settings: Any) -> Fake:
        if file.stem == "broken":
            raise LoadError("not enough memory")
        return Fake(file, name=name, **settings)

    monkeypatch.setattr(LlamaExpert, "load", fake_load)
    return Registry.load([path])


def test_registry_values_reach_the_experts(registry: Registry) -> None:
    """Context, cache types, GPU layers and END edits of the registry are those of the loaded experts."""
    with Ensemble.from_registry("abc", registry=registry) as ensemble:
        assert ensemble.names == ("a", "b", "c")
        assert Fake.loaded["a"].settings["n_ctx"] == 64
        assert Fake.loaded["a"].settings["type_k"] == "q8_0"
        assert Fake.loaded["a"].settings["add_end"] == (3,)
        assert Fake.loaded["b"].settings["n_gpu_layers"] == 5
        assert ensemble._loaded.templates == ("template of a", "none", "own template")
        assert str(ensemble._loaded.engine.strategy) == "linear(w=static)"
        assert [p.epsilon for p in ensemble._loaded.engine.predictors] == [0.02] * 3  # type: ignore[attr-defined]
        np.testing.assert_allclose(ensemble._loaded.engine.weights, [0.5, 0.25, 0.25])
    assert all(fake.closed for fake in Fake.loaded.values())


def test_keywords_win_over_the_registry(registry: Registry) -> None:
    """What the caller says replaces what the registry says, for every expert."""
    options: dict[str, Any] = {"n_ctx": 99, "n_gpu_layers": -1, "n_threads": 1, "strategy": "loglinear", "epsilon": 0.3}
    with Ensemble.from_registry("abc", registry=registry, weights=[1, 1, 2], **options) as ensemble:
        for fake in Fake.loaded.values():
            assert {key: fake.settings[key] for key in ("n_ctx", "n_gpu_layers", "n_threads")} == {
                "n_ctx": 99,
                "n_gpu_layers": -1,
                "n_threads": 1,
            }
        assert str(ensemble._loaded.engine.strategy) == "loglinear(w=static)"
        assert [p.epsilon for p in ensemble._loaded.engine.predictors] == [0.3] * 3  # type: ignore[attr-defined]


def test_a_broken_member_is_named_and_the_others_are_freed(registry: Registry) -> None:
    """All or nothing: the error names the broken expert, what was loaded before is closed."""
    with pytest.raises(LoadError, match="expert 'broken': not enough memory"):
        Ensemble.from_registry("odd", registry=registry)
    assert Fake.loaded["a"].closed


def test_a_failure_after_loading_frees_all(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the last step fails nothing stays loaded."""

    def fail(*_: Any) -> None:
        raise ModelFileError("no tables")

    monkeypatch.setattr(load, "make_predictors", fail)
    with pytest.raises(ModelFileError):
        Ensemble.from_registry("abc", registry=registry)
    assert all(fake.closed for fake in Fake.loaded.values())
    assert len(Fake.loaded) == 3


def test_members_of_weight_zero_are_not_even_looked_for(registry: Registry) -> None:
    """A static weight of 0 means no file, no load, no evaluation."""
    with Ensemble.from_registry("half", registry=registry) as ensemble:
        assert ensemble.names == ("a",)
    with pytest.raises(GgufFusionError, match=r"gone\.gguf"):
        Ensemble.from_registry("half", registry=registry, weights=[1, 1])


def test_files_and_names_can_be_mixed_and_repeated(registry: Registry, tmp_path: Path) -> None:
    """The same file twice makes two experts with two names and two contexts."""
    refs = ["b", tmp_path / "a.gguf", str(tmp_path / "a.gguf")]
    with Ensemble.from_files(refs, registry=registry, weights=[1, 2, 3]) as ensemble:
        assert ensemble.names == ("b", "a", "a#2")
        assert Fake.loaded["a"] is not Fake.loaded["a#2"]


def test_vocabularies_decide_the_space(registry: Registry) -> None:
    """Different vocabularies are bridged, one vocabulary is not, unless the caller wants the bridge."""
    with Ensemble.from_files(["a", "b"], registry=registry) as ensemble:
        assert all(isinstance(p, CoverTree) for p in ensemble._loaded.engine.predictors)
        assert ensemble._loaded.engine.predictors[0].epsilon == DEFAULT_EPSILON  # type: ignore[attr-defined]
    with Ensemble.from_files(["a", "c"], registry=registry) as ensemble:
        assert all(isinstance(p, TokenCursor) for p in ensemble._loaded.engine.predictors)
        assert ensemble._loaded.engine.space.vocabulary is not None
    with Ensemble.from_files(["a", "c"], registry=registry, space="byte") as ensemble:
        assert all(isinstance(p, CoverTree) for p in ensemble._loaded.engine.predictors)
    with pytest.raises(UsageError, match="those of a, b differ"):
        Ensemble.from_files(["a", "b"], registry=registry, space="token")


def test_bad_requests_cost_no_load(registry: Registry) -> None:
    """Misspelt names, strategies and settings are found before anything is loaded or fetched."""
    for call, error, message in (
        (lambda: Ensemble.from_registry("abd", registry=registry), ConfigError, "'abc'"),
        (lambda: Ensemble.from_registry("a", registry=registry), ConfigError, "that is an expert"),
        (lambda: Ensemble.from_registry("abc", registry=registry, strategy="linar"), StrategyError, "linear"),
        (lambda: Ensemble.from_registry("abc", registry=registry, weights=[1, 1]), UsageError, "expected 3"),
        (lambda: Ensemble.from_registry("wrong", registry=registry), UsageError, "'temprature' is unknown"),
        (lambda: Ensemble.from_files(["abc"], registry=registry), UsageError, "ensemble"),
        (lambda: Ensemble.from_files(["nothing-like-this"], registry=registry), UsageError, "nothing-like-this"),
        (lambda: Ensemble.from_files([], registry=registry), UsageError, "at least one"),
    ):
        with pytest.raises(error, match=message):
            call()  # type: ignore[no-untyped-call]
    assert not Fake.loaded


def test_offline_and_absent_says_so() -> None:
    """Without network and without files the error tells what to do."""
    with pytest.raises(NotCachedError, match="smollm2"):
        Ensemble.from_registry("pocket", offline=True)


def test_exact_is_an_epsilon() -> None:
    """``exact`` sets a small epsilon and excludes another one."""
    assert 0.0 < (load_options({"exact": True}).epsilon or 0.0) < DEFAULT_EPSILON
    with pytest.raises(UsageError, match="one of the two"):
        load_options({"exact": True, "epsilon": 0.1})


def test_padding_at_the_end_is_no_difference() -> None:
    """Siblings whose vocabularies differ in padding only are fused token by token."""
    pieces = [b"a", b"b", b"</s>"]
    kinds = [Kind.TEXT, Kind.TEXT, Kind.END]
    short = Vocabulary.from_pieces(pieces, kinds)
    long = Vocabulary.from_pieces([*pieces, b"", b""], [*kinds, Kind.UNUSED, Kind.UNUSED])
    experts = [
        TableExpert(vocabulary, lambda path, n=vocabulary.n_vocab: np.ones(n), name=str(vocabulary.n_vocab))
        for vocabulary in (long, short)
    ]
    loaded = assemble(experts, [1, 1])
    assert loaded.engine.space.n_symbols == 3
    with Ensemble(loaded) as ensemble:
        assert set(ensemble.complete("a", seed=1, max_tokens=20).text) <= set("ab")


def test_member_lists(registry: Registry) -> None:
    """Members carry specification, reference and weight."""
    members = members_of(registry.ensemble("abc"), registry)
    assert [(m.ref, m.weight) for m in members] == [("a", 2.0), ("b", 1.0), ("c", 1.0)]
    assert members_from(["a"], registry)[0].spec is registry.expert("a")
    assert hub.default_name("a", registry) == "a"
    with pytest.raises(UsageError, match="space"):
        Options(space="bytes")


@pytest.mark.parametrize("option", ["n_ctx", "n_threads"])
def test_zero_is_passed_on_not_replaced(registry: Registry, option: str) -> None:
    """A 0 reaches the expert, which refuses it, instead of silently becoming the default."""
    with Ensemble.from_files(["a"], registry=registry, **{option: 0}):  # type: ignore[arg-type]
        assert Fake.loaded["a"].settings[option] == 0
