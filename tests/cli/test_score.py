"""The score command."""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gguf_fusion.cli import main
from gguf_fusion.cli.evaluate import _Clock


def score(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["score", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "at least one FILE"),
        (["nowhere.txt"], "nowhere.txt"),
        (["{file}", "--strategy", "linar"], "linear"),
        (["{file}", "--window", "100"], "window: expected"),
        (["{file}", "--exact", "--epsilon", "0.1"], "--exact"),
        (["{file}", "--split", "--dev", "{file}"], "--split"),
        (["{file}", "--domain", "code"], "NAME=GLOB"),
        (["{file}", "--ensemble", "pockett"], "pocket"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], message: str) -> None:
    """One line that says what is wrong, before anything is loaded."""
    file = tmp_path / "text.txt"
    file.write_text("some text")
    result = score(*(a.format(file=file) for a in arguments), "--offline")
    assert result.exit_code in {1, 2}
    assert message in result.stderr
    assert result.stdout == ""


def test_progress_where_nothing_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged trace is found out late: its document is read after all, and the progress says so."""
    with _Clock(0) as clock:
        clock.advance(64)
        clock.advance(36)
    assert "100 %" in capsys.readouterr().err


@pytest.mark.model
def test_real_experts(tmp_path: Path) -> None:
    """The keys that were promised, on the same bytes for all, and a bridge near the experts' own tokens."""
    file = tmp_path / "code.py"
    file.write_bytes((Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_bytes()[:600])
    result = score(str(file), "--strategy", "linear", "--traces", "off", "--offline", "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert len(answer["experts"]) == 3
    for expert in answer["experts"].values():
        assert 0.3 < expert["bpb_own"] < 4.0
        assert expert["bpb_bridge"] == pytest.approx(expert["bpb_own"], rel=0.15)
        assert 0.9 < expert["decodes_per_token"] < 2.5
        assert 0.0 <= expert["ghost_share"] < 0.1
        assert expert["reanchors"] >= 0
    assert math.isfinite(answer["fused"]["linear"]["bpb"])
    assert 400 < answer["bytes"] < 600
    assert answer["floor_hits"] == 0


@pytest.mark.model
def test_a_larger_model_and_pictures(tmp_path: Path) -> None:
    """A single model beside the experts is scored on the same bytes; pictures lie where they were asked for."""
    source = (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_bytes()
    files = []
    for i in range(2):
        files.append(tmp_path / f"{i}.py")
        files[-1].write_bytes(source[1000 * i :][:300])
    arguments = [
        "-t",
        "1",
        "-e",
        "smollm2-135m-instruct",
        "--larger",
        "gemma-3-270m",
        "--plot",
        str(tmp_path / "plots"),
    ]
    result = score(*map(str, files), *arguments, "--strategy", "linear", "--traces", "off", "--offline", "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert list(answer["experts"]) == ["smollm2-135m-instruct"]
    # Tokens of its own that begin in the scored range: where a token lies across the border, a few bytes more or less.
    assert abs(answer["larger"]["gemma-3-270m"]["own_bytes"] - answer["bytes"]) < 20
    assert answer["comparison"]["linear"]["larger"]["gemma-3-270m"]["p_value"] is not None
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "gain.png",
        "reliability.png",
        "weights.png",
    ]
