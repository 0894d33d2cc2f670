"""Smaller quants: taken only where they are allowed and needed, and told."""

import json

import pytest
from click.testing import CliRunner

from gguf_fusion import placement, smaller
from gguf_fusion.cli import main
from gguf_fusion.config import Registry
from gguf_fusion.devices import DeviceInfo, DeviceKind
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import ConfigError, ModelFileError
from gguf_fusion.experts import native_devices
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.members import members_of, with_router
from gguf_fusion.plan.memory import guessed
from gguf_fusion.router.head import Head
from gguf_fusion.testing import nested_vocabulary

GB = 10**9
SIZES = {"a": 1.1, "b": 0.8, "c": 1.9, "c-small": 1.0, "c-tiny": 0.6, "a-small": 0.7}
"""GB of every file, as the planner sees them."""


@pytest.fixture
def ram(monkeypatch):
    """A machine without cards; the test sets its GB of free RAM."""
    free = [64.0]
    cpu = DeviceInfo(name="cpu", description="cpu", kind=DeviceKind.CPU, free_bytes=64 * GB, total_bytes=64 * GB)
    monkeypatch.setattr(native_devices, "devices", lambda: [cpu])
    monkeypatch.setattr(placement, "free_ram_bytes", lambda: int(free[0] * GB))
    return free


@pytest.fixture
def registry(ram, tmp_path, write_gguf, monkeypatch):
    """Experts a, b, c; a has one smaller quant, c has two."""
    text = '[ensembles.trio]\nexperts = ["a", "b", "c"]\n'
    for name in SIZES:
        write_gguf(f"{name}.gguf")
    for name in "abc":
        listed = ", ".join(f'{{ path = "./{one}.gguf" }}' for one in SIZES if one.startswith(f"{name}-"))
        text += f'[experts.{name}]\nref = "./{name}.gguf"\n' + (f"smaller = [{listed}]\n" if listed else "")
    (tmp_path / "r.toml").write_text(text)
    monkeypatch.setattr(smaller, "read", lambda path: path.stem)
    monkeypatch.setattr(smaller, "shape_of", lambda name, stem: guessed(name, int(SIZES[stem] * GB)))
    return Registry.load([tmp_path / "r.toml"])


def files(members, registry):
    return {one.spec.name: smaller.path_of(one, registry).stem for one in members}


@pytest.mark.parametrize(
    ("free", "taken"),
    [(64, {}), (5.3, {"a": "a-small"}), (4.9, {"c": "c-small"}), (4.0, {"a": "a-small", "c": "c-small"})],
)
def test_the_largest_quants_that_fit_are_taken(registry, ram, caplog, free, taken):
    """Nothing changes where all fits; else as many bytes of weights as possible are kept, and the log says which."""
    members = members_of(registry.ensemble("trio"), registry)
    ram[0] = free
    chosen, changed = smaller.choose(members, registry)
    assert files(chosen, changed) == {"a": "a", "b": "b", "c": "c", **taken}
    assert [one.weight for one in chosen] == [one.weight for one in members]
    assert caplog.text.count("its smaller quant") == len(taken)


def test_nothing_is_changed_where_nothing_would_fit(registry, ram):
    """Too little memory even for the smallest: the usual files, so that the error speaks of them."""
    members = members_of(registry.ensemble("trio"), registry)
    ram[0] = 1.5
    chosen, changed = smaller.choose(members, registry)
    assert chosen == members
    assert changed is registry


def test_a_routers_expert_keeps_its_file(registry, ram, tmp_path):
    """A head fits only the hidden states of the very file that it was trained with."""
    head = Head.__new__(Head)
    object.__setattr__(head, "experts", ("a", "b", "c"))
    object.__setattr__(head, "router", "c")
    ram[0] = 5.3
    members = with_router(members_of(registry.ensemble("trio"), registry), head, registry)
    chosen, changed = smaller.choose(members, registry)
    assert files(chosen, changed) == {"a": "a-small", "b": "b", "c": "c"}
    ram[0] = 4.0
    assert files(*smaller.choose(members, registry))["c"] == "c"


def test_load_takes_them_only_where_it_may(registry, ram, monkeypatch):
    """``smaller_quants`` as an option or of the ensemble decides; the default is off."""
    loaded = []

    class Fake(TableExpert):
        def __init__(self, path, *, name, **settings):
            loaded.append(path.stem)
            vocabulary = nested_vocabulary()
            super().__init__(vocabulary, lambda _: [1.0] * vocabulary.n_vocab, name=name)

        def chat_template(self):
            return None

    monkeypatch.setattr(LlamaExpert, "load", Fake)
    ram[0] = 4.9
    for allowed, files_read in ((None, ["a", "b", "c"]), (True, ["a", "b", "c-small"]), (False, ["a", "b", "c"])):
        loaded.clear()
        Ensemble.from_registry("trio", registry=registry, calibrate=False, smaller_quants=allowed).close()
        assert loaded == files_read


def test_plan_says_what_is_taken(registry, tmp_path):
    """Not allowed: a remedy that names the option; allowed: it fits, and the JSON says which quants."""
    arguments = ["plan", "trio", "--vram", "0", "--ram", "4.9GB", "--config", str(tmp_path / "r.toml")]
    without = CliRunner().invoke(main, [*arguments, "--json"])
    found = json.loads(without.stdout)
    assert (without.exit_code, found["fits"], found["smaller_quants"]) == (1, False, {})
    assert "--allow-smaller-quants" in found["remedies"][-1]
    allowed = CliRunner().invoke(main, [*arguments, "--allow-smaller-quants", "--json"])
    found = json.loads(allowed.stdout)
    assert (allowed.exit_code, found["fits"], list(found["smaller_quants"])) == (0, True, ["c"])
    assert found["smaller_quants"]["c"].endswith("c-small.gguf")
    one = found["experts"]["c"]
    assert one["weights_bytes"] == sum(one["layer_bytes"]) + one["other_bytes"] == pytest.approx(1.0 * GB, rel=0.01)
    picture = CliRunner().invoke(main, [*arguments, "--allow-smaller-quants"])
    assert "a smaller quant of c: " in picture.output


def test_a_quant_that_is_not_there(registry, tmp_path):
    """A path without a file, and a reference whose size nobody can know, are errors that say what to do."""
    text = (tmp_path / "r.toml").read_text()
    for quant, message in (('path = "./gone.gguf"', "no such file"), ('hub = "u/r"', "give 'size' in bytes")):
        (tmp_path / "other.toml").write_text(text.replace('path = "./c-small.gguf"', quant))
        other = Registry.load([tmp_path / "other.toml"])
        with pytest.raises((ConfigError, ModelFileError), match=message):
            smaller.choose(members_of(other.ensemble("trio"), other), other)


def test_the_shipped_registry_offers_smaller_quants():
    """A trio of 7-9B that needs 18 GB fits into 14 with quants of known size, all smaller than the usual ones."""
    arguments = ["plan", "desktop-16", "--vram", "0", "--ram", "14GB", "--json"]
    found = json.loads(CliRunner().invoke(main, arguments).stdout)
    allowed = json.loads(CliRunner().invoke(main, [*arguments, "--allow-smaller-quants"]).stdout)
    assert (found["fits"], allowed["fits"]) == (False, True)
    assert allowed["smaller_quants"]
    assert allowed["total"]["ram_bytes"] < found["total"]["ram_bytes"]
    for name in allowed["smaller_quants"]:
        assert allowed["experts"][name]["weights_bytes"] < found["experts"][name]["weights_bytes"]
