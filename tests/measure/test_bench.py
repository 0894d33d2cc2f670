"""Speed of experts and ensembles: records with llama-bench's names, memory of fake GPUs, combinations of settings."""

import json
from dataclasses import replace

import pytest

from gguf_fusion.config import Registry
from gguf_fusion.devices import DeviceInfo, DeviceKind
from gguf_fusion.errors import UsageError
from gguf_fusion.measure.bench import backends, bench
from gguf_fusion.measure.speed import Peak

QUICK = {"n_prompt": [8], "n_gen": [4], "n_threads": [1], "repetitions": 2}
CPU = DeviceInfo(name="CPU", description="", kind=DeviceKind.CPU, free_bytes=1, total_bytes=1)
CARD = DeviceInfo(name="CUDA0", description="", kind=DeviceKind.GPU, free_bytes=8_000, total_bytes=10_000)


class Cards:
    """Devices of which the first card loses 500 bytes at every look, down to 6,500."""

    def __init__(self):
        self.free = 8_500

    def __call__(self):
        self.free = max(6_500, self.free - 500)
        return [CPU, replace(CARD, free_bytes=self.free), replace(CARD, name="CUDA1")]


def test_peak_adds_up_what_the_cards_lost():
    """Memory of GPUs counts from the beginning of the block; the CPU's own entry does not."""
    with Peak(Cards()) as peak:
        for _ in range(10):
            peak.look()
    assert peak.vram_bytes == 1_000
    assert peak.bytes > 10_000_000


def test_peak_without_cards_is_of_ram_alone():
    """Without a GPU nothing is asked again, and nothing is used."""
    with Peak(lambda: [CPU]) as peak:
        peak.look()
    assert peak.vram_bytes == 0


def test_backends_are_named_like_llama_bench_does():
    """The kinds of the cards in use, each once; the CPU where no layer lies on one."""
    cards = [CPU, CARD, replace(CARD, name="CUDA1"), replace(CARD, name="Vulkan0")]
    assert backends(-1, cards) == "CUDA,Vulkan"
    assert backends(0, cards) == "CPU"
    assert backends(99, [CPU]) == "CPU"


@pytest.fixture
def registry(tiny_model, tmp_path):
    """Two tiny models with different vocabularies, and an ensemble of them."""
    files = tiny_model("a.gguf"), tiny_model("b.gguf", seed=1, extra="he")
    config = tmp_path / "models.toml"
    config.write_text(
        f"[experts.a]\nref = '{files[0]}'\ntemplate = 'none'\n[experts.b]\nref = '{files[1]}'\ntemplate = 'none'\n"
        "[ensembles.two]\nexperts = { a = 2, b = 1 }\nstrategy = 'linear'\n"
    )
    return Registry.load([config])


def test_an_ensemble_gives_rows_of_its_experts_and_one_of_its_own(registry):
    """pp and tg per expert, then the fused row with the time in each part, its own strategy, and memory."""
    rows = list(bench(["two"], registry=registry, devices=Cards(), **QUICK))
    assert [row["test"] for row in rows] == ["pp8", "tg4", "pp8", "tg4", "fused4"]
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        assert len(row["samples_ns"]) == 2 and row["avg_ts"] > 0 and row["stddev_ts"] >= 0
        assert row["peak_rss_bytes"] > 10_000_000
        assert row["n_threads"] == 1 and row["type_k"] == "f16" and row["n_ctx"] == 256
    fused = rows[-1]
    assert fused["ensemble"] == "two" and fused["strategy"] == "linear(w=static)"
    assert set(fused["ms_per_token"]) == {"experts", "bridge", "fusion", "sampling"}
    assert fused["bytes_per_s"] > 0 and fused["decodes_per_token"] > 0
    assert rows[0]["peak_vram_bytes"] > 0


def test_settings_are_multiplied(registry):
    """Every combination of cache types, contexts and threads is measured, for the ensemble too."""
    rows = list(
        bench(["two"], registry=registry, **{**QUICK, "n_prompt": [0], "type_k": ["f16", "q8_0"], "n_ctx": [256, 512]})
    )
    found = [(row["test"], row["n_ctx"], row["type_k"]) for row in rows]
    assert len(found) == 4 * 3
    assert {(n_ctx, kind) for test, n_ctx, kind in found if test == "fused4"} == {
        (256, "f16"), (256, "q8_0"), (512, "f16"), (512, "q8_0"),
    }  # fmt: skip


def test_experts_alone_have_no_fused_row(registry):
    """One expert is measured as such; without tokens to generate there is nothing to fuse."""
    assert [row["test"] for row in bench(["a"], registry=registry, **QUICK)] == ["pp8", "tg4"]
    assert [row["test"] for row in bench(["two"], registry=registry, **{**QUICK, "n_gen": [0]})] == ["pp8", "pp8"]
    assert len(list(bench(["two"], registry=registry, fused=False, **QUICK))) == 4


def test_nothing_to_measure_is_refused():
    """Both tests left out is a mistake."""
    with pytest.raises(UsageError, match="nothing to measure"):
        bench(["pocket"], n_prompt=[0], n_gen=[0])
