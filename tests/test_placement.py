"""Placing experts on fake cards and workers: the fastest placement that fits, looked at again before each load."""

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_fusion import placement
from gguf_fusion.cli import main
from gguf_fusion.config import Registry
from gguf_fusion.devices import DeviceInfo, DeviceKind
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import LoadError
from gguf_fusion.experts import native_devices, native_rpc
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.placement import Placement, pools_of
from gguf_fusion.plan.memory import guessed
from gguf_fusion.plan.planner import GPU_CONTEXT
from gguf_fusion.testing import nested_vocabulary

GB = 10**9


def card(free, kind=DeviceKind.GPU, name="card"):
    return DeviceInfo(name=name, description=name, kind=kind, free_bytes=int(free), total_bytes=int(free))


class Machine:
    """Fake devices whose free memory tests change, and what was loaded on them."""

    def __init__(self):
        self.own, self.workers, self.loads, self.closed, self.fail = [], {}, [], [], {}


@pytest.fixture
def machine(monkeypatch):
    """A machine with 64 GB of RAM whose cards and workers a test sets."""
    found = Machine()
    monkeypatch.setattr(native_devices, "devices", lambda: [*found.own, card(64 * GB, DeviceKind.CPU)])
    monkeypatch.setattr(native_rpc, "remote_devices", lambda ends: [card(found.workers[end]) for end in ends])
    monkeypatch.setattr(placement, "free_ram_bytes", lambda: 64 * GB)
    return found


@pytest.fixture
def trio(machine, tmp_path, write_gguf, monkeypatch):
    """Experts a, b, c of 1 to 3 GB (as the planner sees them) in a registry; loading one makes a fake."""
    sizes = {"a": 1_100_000_000, "b": 800_000_000, "c": 1_900_000_000}
    monkeypatch.setattr(placement, "shape_of", lambda name, _: guessed(name, sizes[name]))
    lines = ['[ensembles.trio]\nexperts = ["a", "b", "c"]\n']
    for name in sizes:
        write_gguf(f"{name}.gguf")
        lines.append(f'[experts.{name}]\nref = "./{name}.gguf"\n')
    (tmp_path / "r.toml").write_text("".join(lines))

    class Fake(TableExpert):
        def __init__(self, path, *, name, **settings):
            machine.loads.append((name, settings))
            fails = machine.fail.get(name, [])
            if fails and fails.pop(0):
                raise LoadError(f"expert {name!r}: native library: out of memory")
            vocabulary = nested_vocabulary()
            super().__init__(vocabulary, lambda _: np.ones(vocabulary.n_vocab), name=name)

        def chat_template(self):
            return None

        def close(self):
            super().close()
            machine.closed.append(self.name)

    monkeypatch.setattr(LlamaExpert, "load", Fake)
    return Registry.load([tmp_path / "r.toml"])


def load(registry, **options):
    return Ensemble.from_registry("trio", registry=registry, calibrate=False, **options)


def layers(machine):
    return {name: settings.get("n_gpu_layers") for name, settings in machine.loads}


def test_one_command_gets_the_fastest_placement(machine, trio):
    """Without a word about layers a large card gets all of them, a small one as many as fit, no card none."""
    counts = []
    for free in (24, 4, 2):
        machine.own, machine.loads = [card(free * GB)], []
        with load(trio):
            counts.append(sum(layers(machine).values()))
    machine.own, machine.loads = [], []
    with load(trio):
        assert layers(machine) == dict.fromkeys("abc")
    everything = sum(guessed(n, s).n_layers + 1 for n, s in (("a", 11 * 10**8), ("b", 8 * 10**8), ("c", 19 * 10**8)))
    assert everything == counts[0] > counts[1] > counts[2] > 0


@pytest.mark.parametrize("free", [2, 4, 6, 8, 12])
def test_plans_stay_within_the_card(machine, trio, free):
    """What is placed never exceeds the card's free memory, whatever the order of experts."""
    machine.own = [card(free * GB)]
    specs = [trio.expert(name) for name in "abc"]
    plans = []
    for order in itertools.permutations(specs):
        made = Placement.decide(order, [spec.sources[0].path for spec in order]).plan
        assert made.vram_bytes <= 0.95 * free * GB
        plans.append({one.name: one for one in made.experts})
    assert all(one == plans[0] for one in plans)


def test_the_right_device(machine, trio):
    """A discrete card is taken, not an integrated one with more memory; alone, that one is taken."""
    machine.own = [card(31 * GB, DeviceKind.SHARED, "integrated"), card(8 * GB, name="discrete")]
    assert [device.name for device in placement.own_cards()] == ["discrete"]
    machine.own = machine.own[:1]
    assert [device.name for device in placement.own_cards()] == ["integrated"]


def test_what_does_not_fit_is_said_before_loading(machine, trio, monkeypatch):
    """Too little memory of any kind: an error with sums and remedies, nothing is loaded."""
    machine.own = [card(1 * GB)]
    monkeypatch.setattr(placement, "free_ram_bytes", lambda: 1 * GB)
    with pytest.raises(LoadError, match=r"do not fit \(RAM .* of 1\.0 GB.*smaller quant of c"):
        load(trio)
    assert not machine.loads


def test_fixed_layers_are_tried_or_lowered(machine, trio, caplog):
    """Layers that a user fixed are tried, with a warning, where they may not fit; lowered where that is allowed."""
    machine.own = [card(2 * GB)]
    with load(trio, n_gpu_layers=-1):
        assert min(layers(machine).values()) > 20
    assert "may not fit" in caplog.text
    machine.loads = []
    with load(trio, n_gpu_layers=-1, fewer_layers=True):
        assert min(layers(machine).values()) < 20


def test_memory_that_shrinks_between_plan_and_load(machine, trio, caplog):
    """Expert 2 of 3 finds less memory: an error frees expert 1; or it gets fewer layers, if that is allowed."""
    machine.own = [card(12 * GB)]
    real = LlamaExpert.load

    def shrinking(path, **settings):
        machine.own = [card(1 * GB)]
        return real(path, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaExpert, "load", shrinking)
        with pytest.raises(LoadError, match=r"'b' was to take \d+ MB .* only 1000 MB are free.*-ngl.*smaller context"):
            load(trio)
        assert [name for name, _ in machine.loads] == machine.closed == ["a"]
        machine.own, machine.loads = [card(12 * GB)], []
        with load(trio, fewer_layers=True):
            counts = layers(machine)
    assert counts["a"] > counts["b"] > 0
    assert "only 1000 MB are free" in caplog.text


def test_a_failed_load_is_tried_once_more_with_fewer_layers(machine, trio, caplog):
    """With --fewer-layers a failing load has one more try; without, or failing twice, it frees the rest."""
    machine.own = [card(24 * GB)]
    machine.fail = {"b": [True]}
    with load(trio, fewer_layers=True):
        tries = [settings["n_gpu_layers"] for name, settings in machine.loads if name == "b"]
    assert len(tries) == 2
    assert 0 < tries[1] <= 0.75 * tries[0]
    assert "once more" in caplog.text
    for options, fails in (({}, [True]), ({"fewer_layers": True}, [True, True])):
        machine.fail, machine.closed = {"b": fails}, []
        with pytest.raises(LoadError, match=r"'b'.*out of memory"):
            load(trio, **options)
        assert machine.closed == ["a"]


def test_workers_are_planned_with(machine, trio):
    """An expert with workers lies there: their memory counts, that of the own card does not; others stay."""
    machine.workers = {"far:1": 3 * GB, "far:2": 1 * GB}
    with load(trio, rpc={"c": ["far:1"]}, n_threads=1):
        by_name = dict(machine.loads)
    assert by_name["c"]["rpc"] == ("far:1",)
    assert by_name["c"]["n_gpu_layers"] > 0
    assert by_name["a"]["n_gpu_layers"] == 0
    specs = [replace(trio.expert(name), rpc=rpc) for name, rpc in zip("abc", [("far:2",), (), ("far:1",)], strict=True)]
    made = Placement.decide(specs, [spec.sources[0].path for spec in specs]).plan
    assert 0 < made.bytes_in("far:1") <= 0.95 * 3 * GB
    assert GPU_CONTEXT < made.bytes_in("far:2") <= 0.95 * GB
    assert made.vram_bytes == 0


def test_workers_that_share_one_are_one_pool():
    """Endpoints that two experts have in common make one pool, so that no memory is counted twice."""
    registry = Registry.load()
    names = registry.ensemble("pocket").experts
    ends = [("x:1",), ("x:1", "y:1"), ("z:1",)]
    specs = [replace(registry.expert(name), rpc=rpc) for name, rpc in zip(names, ends, strict=True)]
    assert list(pools_of(specs).values()) == ["x:1,y:1", "x:1,y:1", "z:1"]


def test_the_plan_command_counts_workers(machine):
    """--rpc with a worker's memory shows in the JSON and in the picture."""
    machine.workers = {"far:1": 6 * GB}
    arguments = ["plan", "laptop-6", "--vram", "0", "--ram", "16GB", "--rpc", "smollm3-3b=far:1"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "far:1[" in result.output
    unknown = CliRunner().invoke(main, ["plan", "laptop-6", "--rpc", "smollm=far:1"])
    assert unknown.exit_code == 2
    assert "smollm3-3b" in unknown.stderr


def test_a_build_for_the_cpu_is_left_alone(machine, trio, caplog):
    """Without cards and workers nothing is planned: settings go to the experts as they are."""
    caplog.set_level(logging.WARNING)
    assert Placement.decide([trio.expert("a")], [trio.expert("a").sources[0].path]) is None
    with load(trio, n_gpu_layers=7):
        assert set(layers(machine).values()) == {7}


def test_options_reach_placed_experts(machine, trio):
    """Whatever else the options say reaches experts that the planner places, and those it does not."""
    for cards in ([card(24 * GB)], []):
        machine.own, machine.loads = cards, []
        with load(trio, flash_attn=True, n_ctx=300, type_k="q8_0"):
            for _, settings in machine.loads:
                assert (settings["flash_attn"], settings["n_ctx"], settings["type_k"]) == (True, 300, "q8_0")


def test_a_card_that_is_nearly_full_is_told(machine, trio, caplog, monkeypatch):
    """After loading, a card with 100 MB of headroom gives a warning; one with more gives none."""
    for left, told in ((100e6, True), (1 * GB, False)):
        machine.own, machine.loads = [card(12 * GB)], []
        caplog.clear()
        real = Placement.look_back

        def look(self, left=left, real=real):
            machine.own = [card(left)]
            real(self)

        with monkeypatch.context() as patch:
            patch.setattr(Placement, "look_back", look)
            load(trio).close()
        assert ("may move memory to RAM" in caplog.text) is told


def test_shared_memory_is_never_more_than_is_free(machine, monkeypatch):
    """A computer whose GPU shares 8 GB of RAM, 5.3 of them free, is planned with 5.3."""
    monkeypatch.setattr("gguf_fusion.devices.free_ram_bytes", lambda: int(5.3 * GB))
    machine.own = [card(8 * GB, DeviceKind.SHARED)]
    assert [device.free_bytes for device in placement.own_cards()] == [int(5.3 * GB)]
