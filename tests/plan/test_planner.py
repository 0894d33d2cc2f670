"""The planner: equal to trying everything, within budgets, the same for every order of experts."""

import itertools

import numpy as np
import pytest

from gguf_fusion.plan.memory import CACHE_BITS, Shape, bits_per_weight, cells, guessed, scaled, size_by_name
from gguf_fusion.plan.planner import GPU_MARGIN, MARGIN_RAM, Budget, Request, place, plan, step_seconds


def shape(name, n_layers, layer, output=0, kv=128, n_vocab=1000):
    return Shape(
        name=name, layer_bytes=(layer,) * n_layers, other_bytes=2 * output, output_bytes=output,
        kv_values=((kv, kv),) * n_layers, n_vocab=n_vocab, n_merges=0, n_embd=64, n_ff=128, n_head=2,
    )  # fmt: skip


def brute_force(shapes, budget, request):
    """Least (over, short, step) of all combinations, one by one."""
    best = None
    for counts in itertools.product(*(range(s.n_layers + 2) for s in shapes)):
        placed = [place(s, n, request) for s, n in zip(shapes, counts, strict=True)]
        over = sum(
            max(0, sum(p.vram_bytes for p in placed if p.pool == pool) - budget.usable(pool))
            for pool in {p.pool for p in placed}
        )
        short = max(0, sum(p.ram_bytes for p in placed) + MARGIN_RAM - budget.ram)
        cost = over, short, round(step_seconds(placed), 9)
        best = cost if best is None or cost < best else best
    return best


@pytest.mark.parametrize("seed", range(220))
def test_equals_trying_everything(seed):
    """On random small instances the plan is as fast as the best of all combinations."""
    rng = np.random.default_rng(seed)
    shapes = [
        shape(f"e{i}", int(rng.integers(1, 5)), int(rng.integers(10, 400)) << 20, int(rng.integers(0, 200)) << 20,
              int(rng.integers(16, 512)))
        for i in range(int(rng.integers(1, 4)))
    ]  # fmt: skip
    speeds = {s.name: float(rng.uniform(2e9, 3e10)) for s in shapes}
    budget = Budget(
        vram=(int(rng.integers(0, 3000)) << 20,), ram=int(rng.integers(500, 8000)) << 20,
        workers={"w": (int(rng.integers(0, 2000)) << 20,)},
    )  # fmt: skip
    pools = {s.name: "w" for s in shapes if rng.random() < 0.3}
    request = Request(n_ctx=int(rng.choice([512, 2048])), speeds=speeds, pools=pools)
    made = plan(shapes, budget, request)
    over, short, step = brute_force(shapes, budget, request)
    assert sum(max(0, made.bytes_in(pool) - budget.usable(pool)) for pool in ("", "w")) == over
    assert max(0, made.ram_bytes + MARGIN_RAM - budget.ram) == short
    assert round(made.step_s, 9) == step
    assert made.fits == (over == 0 and short == 0)


TRIOS = {
    "1-4B": [guessed("a-1.5b", 1_117_320_768), guessed("b-1b", 806_058_240), guessed("c-3b", 1_915_305_312)],
    "7-9B": [guessed("a-7b", 4_683_073_536), guessed("b-9b", 5_761_057_728), guessed("c-8b", 4_920_739_232)],
}


@pytest.mark.parametrize("vram", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("trio", TRIOS)
def test_cards_are_filled_and_never_overfilled(vram, trio):
    """Plans stay within what a card has, and use nine tenths of it where more layers are left to place."""
    shapes = TRIOS[trio]
    budget = Budget(vram=(vram * 10**9,), ram=64 * 10**9, cores=8)
    made = plan(shapes, budget, Request())
    assert made.fits
    assert made.vram_bytes <= budget.usable_vram <= vram * 10**9 * (1.0 - GPU_MARGIN)
    if any(one.n_gpu_layers <= one.n_layers for one in made.experts):
        assert made.vram_bytes >= 0.9 * budget.usable_vram


def test_more_memory_is_never_slower():
    """A larger card never makes the plan slower."""
    steps = [plan(TRIOS["7-9B"], Budget((gb * 10**9,), 64 * 10**9), Request()).step_s for gb in (0, 2, 4, 8, 16, 24)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] / 5


def test_the_order_of_experts_does_not_matter():
    """Every order of the experts gives the same placement, twice."""
    budget = Budget((6 * 10**9,), 32 * 10**9)
    plans = [plan(order, budget, Request()) for order in itertools.permutations(TRIOS["7-9B"])]
    placed = [{one.name: one for one in made.experts} for made in plans]
    assert all(one == placed[0] for one in placed)


def test_many_experts_are_planned_in_reasonable_quality():
    """With five experts, where not all combinations are tried, the plan still fits and fills the card."""
    shapes = [guessed(f"e{i}-3b", 1_900_000_000 + 10_000_000 * i) for i in range(5)]
    budget = Budget((6 * 10**9,), 64 * 10**9)
    made = plan(shapes, budget, Request())
    assert made.fits
    assert made.vram_bytes >= 0.8 * budget.usable_vram


def test_what_does_not_fit_says_what_to_change():
    """Too little RAM gives remedies that are true: the context named does fit."""
    shapes = [shape("big", 4, 100 << 20, kv=4096)]
    short = plan(shapes, Budget((), 1 << 30), Request(n_ctx=65536))
    assert not short.fits
    assert any("RAM are missing" in text for text in short.remedies)
    offered = next(int(text.split()[3]) for text in short.remedies if text.startswith("a context of"))
    assert plan(shapes, Budget((), 1 << 30), Request(n_ctx=offered)).fits


def test_what_may_be_given_up_is_given_up_in_order():
    """Where it is allowed, the cache is quantized first, then the context shortened."""
    shapes = [shape("big", 4, 100 << 20, kv=2048)]
    request = Request(n_ctx=16384, allow_kv_quant=True, allow_short_ctx=True)
    f16 = plan(shapes, Budget((), 8 << 30), request)
    assert (f16.request.type_k, f16.request.n_ctx) == ("f16", 16384)
    need = sum(one.ram_bytes for one in f16.experts) + MARGIN_RAM
    q8 = plan(shapes, Budget((), need - (100 << 20)), request)
    assert (q8.fits, q8.request.type_k, q8.request.n_ctx) == (True, "q8_0", 16384)
    shorter = plan(shapes, Budget((), (400 << 20) + MARGIN_RAM + (300 << 20)), request)
    assert shorter.fits
    assert shorter.request.n_ctx < 16384


@pytest.fixture(scope="module")
def quants():
    """Two experts with smaller quants: ``(usual, smaller, bytes that the usual ones need in RAM)``."""
    usual = [shape("a", 4, 100 << 20, kv=2048), shape("b", 4, 200 << 20, kv=2048)]
    smaller = {"a": [scaled(usual[0], 300 << 20), scaled(usual[0], 200 << 20)], "b": [scaled(usual[1], 500 << 20)]}
    whole = plan(usual, Budget((), 64 << 30), Request(n_ctx=8192))
    return usual, smaller, sum(one.ram_bytes for one in whole.experts) + MARGIN_RAM


@pytest.mark.parametrize(
    ("missing_mb", "taken", "weights_mb"),
    [(0, {}, 1200), (90, {"a": 0}, 1100), (150, {"a": 1}, 1000), (280, {"b": 0}, 900), (390, {"a": 0, "b": 0}, 800),
     (490, {"a": 1, "b": 0}, 700)],
)  # fmt: skip
def test_smaller_quants_keep_as_many_bytes_as_fit(quants, missing_mb, taken, weights_mb):
    """Usual quants where they fit; else the combination with most bytes of weights, for any order of experts."""
    usual, smaller, need = quants
    for order in (usual, usual[::-1]):
        made = plan(order, Budget((), need - (missing_mb << 20)), Request(n_ctx=8192), smaller)
        assert (made.fits, dict(made.smaller)) == (True, taken)
        assert sum(one.weights for one in made.shapes) == weights_mb << 20
        assert [one.name for one in made.shapes] == [one.name for one in made.experts] == [one.name for one in order]


def test_a_quant_is_given_up_after_bits_of_the_cache_and_before_context(quants):
    """The cache is quantized first, then smaller quants are taken, then the context is shortened."""
    usual, smaller, need = quants
    request = Request(n_ctx=8192, allow_kv_quant=True, allow_short_ctx=True)
    found = []
    for missing_mb in (50, 300, 900):
        made = plan(usual, Budget((), need - (missing_mb << 20)), request, smaller)
        assert made.fits
        found.append((made.request.type_k, bool(made.smaller), made.request.n_ctx))
    assert found[0] == ("q8_0", False, 8192)
    assert found[1][1:] == (True, 8192)
    assert found[2][1:] == (True, found[2][2])
    assert found[2][2] < 8192


def test_nothing_fits_with_the_smallest_quants(quants):
    """Where even those are too large the plan is that of the usual ones, with remedies."""
    usual, smaller, _ = quants
    made = plan(usual, Budget((), 600 << 20), Request(n_ctx=8192), smaller)
    assert (made.fits, dict(made.smaller)) == (False, {})
    assert made.remedies


def test_layers_that_are_fixed_stay():
    """Layers that the user fixed are kept even where they do not fit, and that is said."""
    made = plan([shape("e", 4, 1 << 30)], Budget((1 << 30,), 32 << 30), Request(layers={"e": -1}))
    assert made.experts[0].n_gpu_layers == 5
    assert not made.fits
    assert any("ask for fewer" in text for text in made.remedies)


def test_memory_adds_up():
    """Weights, cache and buffers are those of the formulae; a shorter cell type takes less."""
    one = shape("e", 3, 1000, 500, kv=64)
    assert one.weights == 3 * 1000 + 1000
    assert cells(300) == 512
    assert one.kv(300) == 3 * 512 * 128 * 2
    assert one.kv(300, "q8_0", "q8_0") == int(512 * 128 * CACHE_BITS["q8_0"] / 8) * 3
    placed = place(one, 2, Request(n_ctx=300))
    assert placed.vram_bytes + placed.ram_bytes == one.weights + one.kv(300) + placed.buffers_bytes


def test_sizes_by_name():
    """The billions in a name give the size of a file."""
    assert size_by_name("deepseek-r1-distill-qwen-1.5b") == int(1.5e9 * 0.6)
    assert size_by_name("llama-3.1-8b-instruct") == int(8e9 * 0.6)
    assert size_by_name("phi-4-mini") == int(4e9 * 0.6)


def test_quants_have_bits():
    """The quant in a reference gives bits per weight, the longer name before the shorter; no quant, none."""
    assert bits_per_weight("u/model-GGUF:Q4_K_M") == bits_per_weight("model-q4_k_m.gguf")
    assert bits_per_weight("a-Q2_K.gguf") < bits_per_weight("a-Q3_K_S.gguf") < bits_per_weight("a-Q3_K_M.gguf")
    assert bits_per_weight("u/model-GGUF") is None


def test_another_quant_keeps_the_shape():
    """Tensors shrink alike; layers and cache stay as they are."""
    one = shape("e", 3, 1000, 500)
    half = scaled(one, one.weights // 2)
    assert half.layer_bytes == (500, 500, 500)
    assert half.weights == one.weights // 2
    assert half.kv(300) == one.kv(300)
    assert half.estimated
