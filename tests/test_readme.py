"""README.md: what it shows is what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from gguf_fusion.config import Registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def tables() -> ModuleType:
    """The script that fills the README."""
    spec = spec_from_file_location("readme_tables", ROOT / "bench" / "readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_two_commands_come_first() -> None:
    """One command that runs the main job, one that passes the tests."""
    first, second = blocks("")[:2]
    assert first.startswith("pip install . && gguf-fusion run ")
    assert second == "pip install '.[test]' && gguf-fusion pull pocket && pytest\n"


def test_measured_tables_and_help_texts_are_up_to_date() -> None:
    """Tables come from bench/results, help texts from the commands."""
    script = str(ROOT / "bench" / "readme_tables.py")
    result = subprocess.run([sys.executable, script, "--check"], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_links_lead_to_files() -> None:
    """Every link into the repository has its file."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_registry_example_is_valid(tmp_path: Path) -> None:
    """The example of a file of one's own is accepted, weights and all."""
    (example,) = blocks("toml")
    tomllib.loads(example)
    (tmp_path / "models.toml").write_text(example, encoding="utf-8")
    (tmp_path / "writer-base.gguf").touch()
    spec = Registry.load([tmp_path / "models.toml"]).ensemble("mine")
    assert spec.weights == (2.0, 1.0)


@pytest.mark.model
@pytest.mark.parametrize("code", [code for code in blocks("python") if "127.0.0.1" not in code])
def test_python_examples_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python of the README works as it stands."""
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 40


def test_tables_cope_with_missing_new_and_repeated_results(tables: ModuleType, tmp_path: Path) -> None:
    """A table without results says so, unknown results show all plain values, a newer record replaces an older one."""
    tables.RESULTS = tmp_path
    assert "Not measured yet" in tables.table("speed")
    (tmp_path / "speed.jsonl").write_text('{"test": "pp512", "t_s": 12.3456, "more": [1], "version": "1"}\n')
    assert tables.table("speed").startswith("| test | t_s |\n| --- | --- |\n| pp512 | 12.3 |\n")
    records = [
        {"expert": "a", "domain": d, "bpb_own": own, "bytes": 10}
        | {"bridge": [{"epsilon": 0.1, "bpb": own + 1, "cost": 0.01, "decodes_per_token": 1.2}]}
        for d, own in (("x", 5.0), ("x", 1.0), ("y", 2.0))
    ]
    (tmp_path / "fidelity.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "| a | 0.1 | 1.500 | 2.500 | +1.0 % | 1.20 |" in tables.table("fidelity")
    assert "2 measurements, 20 bytes" in tables.table("fidelity")


def test_stale_blocks_are_named(tables: ModuleType, tmp_path: Path) -> None:
    """The check says which block is out of date, and filling it twice changes nothing."""
    tables.RESULTS = tmp_path
    text = "a\n<!-- table:speed -->\nold\n<!-- end -->\n<!-- help:strategies -->\n<!-- end -->\nb\n"
    assert tables.stale(text) == ["table:speed", "help:strategies"]
    assert tables.stale(tables.filled(text)) == []
    assert tables.filled(tables.filled(text)) == tables.filled(text)
