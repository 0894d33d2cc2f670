"""Levels for an ensemble of real (tiny) models: files made, text read once per level, gains reported."""

import itertools
import json

import numpy as np
import pytest

from gguf_fusion.config import Registry
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.gguf_info import read
from gguf_fusion.measure.ladder import Plan
from gguf_fusion.measure.quants import ensemble_quants

TEXT = b"the other thing that they thought about was the weather of the north. " * 4


@pytest.fixture
def registry(tiny_model, tmp_path):
    files = tiny_model("a.gguf"), tiny_model("b.gguf", seed=1, extra="he"), tiny_model("c.gguf", seed=2)
    config = tmp_path / "models.toml"
    config.write_text(
        "".join(f"[experts.{file.stem}]\nref = '{file}'\ntemplate = 'none'\n" for file in files)
        + "[ensembles.two]\nexperts = { a = 1, b = 1 }\nstrategy = 'linear'\n"
    )
    return Registry.load([config])


def chosen(registry, budget, **more):
    plan = Plan(n_threads=1)
    return ensemble_quants("two", budget, ["Q8_0", "Q2_K"], text=TEXT, plan=plan, registry=registry, **more)


def test_the_best_combination_is_that_of_brute_force(registry, same_process):
    """Among all levels within the budget none is better, and the comparisons keep the budget too."""
    budget = 5_000_000
    found = chosen(registry, budget, rivals=["c"])
    assert found.problems == []
    assert len(found.chosen.tried) == sum(size <= budget for size in sizes(registry))
    assert found.chosen.best.bpb == min(one.bpb for one in found.chosen.tried)
    assert found.chosen.best.size_bytes <= budget
    assert found.chosen.single.name in {"a", "b", "c"}
    assert found.chosen.single.size_bytes <= budget
    facts = found.as_json()
    assert facts["gain_over_single"] == pytest.approx(1 - facts["best"]["bpb"] / facts["single"]["bpb"])
    assert facts["gain_over_even"] >= 0
    assert json.loads(json.dumps(facts))["experts"] == ["a", "b"]


def sizes(registry):
    from gguf_fusion.measure.making import made

    each = []
    for name in ("a", "b"):
        own = registry.expert(name).sources[0].path
        files = [own, *(made(own, level, requantize=False, n_threads=1, tell=print)[0] for level in ("Q8_0", "Q2_K"))]
        each.append([read(file).size_bytes for file in files])
    return [sum(pair) for pair in itertools.product(*each)]


def test_every_level_reads_the_text_once(registry, same_process, monkeypatch):
    """A second search over the same levels takes all it needs from the traces: no token is decoded."""
    first = chosen(registry, 9_000_000)
    monkeypatch.setattr(LlamaExpert, "evaluate", lambda *_, **__: pytest.fail("decoded"))
    again = chosen(registry, 5_000_000)
    assert again.chosen.best in first.chosen.tried


def test_a_single_model_scores_as_by_its_own_law(registry, same_process):
    """Bits per byte of a model alone are those of its bridged law on the bytes that all score."""
    found = chosen(registry, 9_000_000)
    ratio = found.chosen.single.bpb / np.log2(257)
    assert 0.5 < ratio < 3.0


def test_budgets_and_levels_are_checked(registry, tiny_model, same_process):
    """A budget below the smallest levels, and quantized files without leave, are refused."""
    with pytest.raises(UsageError, match="the smallest levels together take"):
        chosen(registry, 1_000)
    with pytest.raises(UsageError, match="unknown level"):
        ensemble_quants("two", 10**9, ["Q9"], registry=registry)


def test_levels_that_cannot_be_made_are_left_out(registry, same_process):
    """The others are still compared, and the reason is told."""
    found = ensemble_quants(
        "two", 10**9, ["Q2_K_S", "Q8_0"], text=TEXT, plan=Plan(n_threads=1), registry=registry
    )  # fmt: skip
    assert [problem.partition(":")[0] for problem in found.problems] == ["a Q2_K_S", "b Q2_K_S"]
    assert len(found.chosen.tried) == 4
