"""The commands about model files, as a user runs them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from gguf_fusion import cli
from gguf_fusion.cli import main
from gguf_fusion.cli._output import ConsoleProgress

Write = Callable[..., Path]


def run(*args: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture
def registry_file(tmp_path: Path, write_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two experts with files, one without, and an ensemble of two."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_gguf("a.gguf", fields={"tokenizer.chat_template": "TEMPLATE {{ x }}"})
    write_gguf("b.gguf")
    path = tmp_path / "r.toml"
    path.write_text(
        '[experts.a]\nref = "./a.gguf"\nrole = "chat"\nlicence = "MIT"\n'
        '[experts.b]\nref = "./b.gguf"\nneeds_acceptance = "say yes"\nlicence_url = "https://terms"\n'
        '[experts.c]\nsources = [{ hub = "u/c", quant = "Q4_K_M", size = 5000000 }]\n'
        'needs_acceptance = "say yes"\nlicence_url = "https://terms"\n'
        '[ensembles.ab]\ndescription = "both"\nexperts = ["a", "b"]\nweights = [2, 1]\n'
    )
    return path


def test_help_lists_the_commands_without_importing_them() -> None:
    """``-h`` equals ``--help``, names the commands that exist and loads none of them, nor any heavy package."""
    short = run("-h")
    assert short.exit_code == 0
    assert short.output == run("--help").output
    for name in ("pull", "list", "show", "rm"):
        assert f"\n  {name}" in short.output
    script = (
        "import sys, gguf_fusion.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'numba', 'llama_cpp', 'huggingface_hub', 'tqdm', 'gguf_fusion.cli.models'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_command_that_is_not_there_breaks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is missing hides its command, and only that."""
    monkeypatch.setitem(cli.COMMANDS, "ghost", ("gguf_fusion.cli.ghost:ghost", "Not there."))
    assert "ghost" not in run("-h").output
    assert run("ghost").exit_code == 2
    assert run("list").exit_code == 0


def test_show_json_has_the_path(registry_file: Path, tmp_path: Path) -> None:
    """``show NAME --json`` gives path, size and what the file says."""
    result = run("show", "a", "--json", "--config", registry_file)
    facts = json.loads(result.stdout)
    assert facts["path"] == str(tmp_path / "a.gguf")
    assert facts["size_bytes"] == (tmp_path / "a.gguf").stat().st_size
    assert (facts["role"], facts["licence"], facts["n_vocab"], facts["quant"]) == ("chat", "MIT", 5, "Q4_K_M")


def test_show_before_the_pull(registry_file: Path) -> None:
    """An expert that is not here is described all the same, without a path."""
    facts = json.loads(run("show", "c", "--json", "--config", registry_file).stdout)
    assert facts["path"] is None
    assert facts["size_bytes"] == 5_000_000
    assert "5.0 MB" in run("show", "c", "--config", registry_file).stdout


def test_show_an_ensemble(registry_file: Path) -> None:
    """An ensemble shows its experts with weights."""
    result = run("show", "ab", "--config", registry_file)
    assert result.stdout.splitlines()[0] == "ab: both"
    facts = json.loads(run("show", "ab", "--json", "--config", registry_file).stdout)
    assert [(expert["name"], expert["weight"], expert["present"]) for expert in facts["experts"]] == [
        ("a", 2.0, True),
        ("b", 1.0, True),
    ]


def test_show_template(registry_file: Path) -> None:
    """``--template`` prints the template alone; a file without one says so."""
    assert run("show", "a", "--template", "--config", registry_file).stdout == "TEMPLATE {{ x }}\n"
    failed = run("show", "b", "--template", "--config", registry_file)
    assert failed.exit_code == 1
    assert "no chat template" in failed.stderr


def test_list(registry_file: Path) -> None:
    """What is here is listed; ``--all`` lists the rest; JSON always has everything."""
    shown = run("list", "--config", registry_file).stdout
    assert "\na " in shown
    assert "\nc " not in shown
    assert "\nc " in run("list", "--all", "--config", registry_file).stdout
    facts = json.loads(run("list", "--json", "--config", registry_file).stdout)
    states = {expert["name"]: expert["present"] for expert in facts["experts"]}
    assert (states["a"], states["c"]) == (True, False)
    assert [e["present"] for e in facts["ensembles"] if e["name"] == "ab"] == [True]


def test_list_when_nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache tells how to begin."""
    monkeypatch.chdir(tmp_path)
    assert "gguf-fusion pull pocket" in run("list").stdout


def test_pull_prints_paths(registry_file: Path, tmp_path: Path) -> None:
    """An ensemble prints one line an expert, as JSON too; results alone go to stdout."""
    result = run("pull", "ab", "--config", registry_file)
    assert result.stdout == f"a  {tmp_path / 'a.gguf'}\nb  {tmp_path / 'b.gguf'}\n"
    facts = json.loads(run("pull", "a", "b", "--json", "--config", registry_file).stdout)
    assert [fact["name"] for fact in facts] == ["a", "b"]


def test_terms_are_shown_before_fetching(registry_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that need acceptance appear with their link, unless the file is here already."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = run("pull", "c", "--config", registry_file)
    assert "c: say yes: https://terms" in result.stderr
    assert result.exit_code == 1
    assert "say yes" not in run("pull", "b", "--config", registry_file).stderr


def test_dry_run(registry_file: Path) -> None:
    """Sizes come first, what is here counts nothing."""
    result = run("pull", "ab", "c", "--dry-run", "--config", registry_file)
    assert result.stdout.splitlines()[-1] == "5.0 MB to fetch"
    facts = json.loads(run("pull", "ab", "c", "--dry-run", "--json", "--config", registry_file).stdout)
    assert facts["to_fetch_bytes"] == 5_000_000
    assert [model["present"] for model in facts["models"]] == [True, True, False]


def test_rm_never_touches_files_of_the_user(registry_file: Path, tmp_path: Path) -> None:
    """A file that the user named by its path stays."""
    result = run("rm", "-y", "a", "--config", registry_file)
    assert result.exit_code == 1
    assert "nothing to delete" in result.stderr
    assert (tmp_path / "a.gguf").exists()


def test_rm_of_a_fetched_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_bytes: Callable[..., bytes]
) -> None:
    """Asks first, a dry run frees nothing, ``-y`` deletes and says how much."""
    content = gguf_bytes()
    part = '{ package = "p", version = "1", member = "p/m.gguf" }'
    path = tmp_path / "r.toml"
    path.write_text(
        f'[experts.w]\nsources = [{{ wheels = [{part}], sha256 = "{"ab" * 32}", size = {len(content)} }}]\n'
    )
    fetched = Path(os.environ["GGUF_FUSION_CACHE"]) / "models" / ("ab" * 8) / "m.gguf"
    fetched.parent.mkdir(parents=True)
    fetched.write_bytes(content)
    assert "would be freed" in run("rm", "w", "--dry-run", "--config", path).stdout
    refused = CliRunner().invoke(main, ["rm", "w", "--config", str(path)], input="n\n")
    assert refused.exit_code == 130
    assert fetched.exists()
    result = json.loads(run("rm", "w", "-y", "--json", "--config", path).stdout)
    assert result["freed_bytes"] == len(content)
    assert not fetched.exists()


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["pull", "pockt"], 2, "did you mean 'pocket'"),
        (["show", "nothing-like-it"], 2, "no expert, ensemble or file"),
        (["show", "absent.gguf"], 1, "no such file"),
        (["show", "u/r:Q4_K_M"], 1, "gguf-fusion pull u/r:Q4_K_M"),
        (["pull", "a", "--offline", "--config", "absent.toml"], 2, "no such registry file"),
        (["pull", "gemma-3-270m"], 1, "not on this machine"),
        (["pull", "gemma-3-270m", "--source", "url"], 2, "no source of the kind"),
        (["pull"], 2, "Missing argument"),
        (["pull", "--nonsense", "a"], 2, "No such option"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_errors_are_one_line_and_a_status(
    args: list[str], status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes end with a line on stderr and a status, never with a traceback; stdout stays empty."""
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert result.exit_code == status
    assert said in result.stderr
    assert result.stdout == ""


def test_corrupt_files_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``show`` and ``pull`` of a foreign file give the diagnosis."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.gguf").write_text("<html></html>")
    for command in ("show", "pull"):
        result = run(command, "page.gguf")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: page.gguf: expected a GGUF file, got an HTML page")


def test_variables_stand_for_options(registry_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option has an environment variable."""
    monkeypatch.setenv("GGUF_FUSION_CONFIG", str(registry_file))
    monkeypatch.setenv("GGUF_FUSION_SHOW_JSON", "1")
    assert json.loads(run("show", "a").stdout)["name"] == "a"


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, registry_file: Path) -> None:
    """Ctrl-C gives status 130 and no traceback."""
    from gguf_fusion import hub

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "pull", interrupted)
    result = run("pull", "a", "--config", registry_file)
    assert result.exit_code == 130
    assert "nothing unfinished was kept" in result.stderr
    assert "Traceback" not in result.stderr


def test_closed_pipe_is_silent(registry_file: Path) -> None:
    """A reader that goes away leaves no complaint."""
    command = f"{sys.executable} -m gguf_fusion show a --json --config {registry_file} | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_full_disk_behind_stdout_is_one_line(registry_file: Path) -> None:
    """Results that cannot be written end with status 1 and a line that says why."""
    command = f"{sys.executable} -m gguf_fusion show a --json --config {registry_file} > /dev/full"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, f"error: {os.strerror(errno.ENOSPC)}\n")


def test_file_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch, registry_file: Path) -> None:
    """An error of the system that no command foresaw is a line with the file's name."""
    from gguf_fusion import hub

    def broken(*args: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/some/model.gguf")

    monkeypatch.setattr(hub, "pull", broken)
    result = run("pull", "a", "--config", registry_file)
    assert result.exit_code == 1
    assert result.stderr.endswith(f"error: {os.strerror(errno.EIO)}: /some/model.gguf\n")
    assert "Traceback" not in result.stderr


def test_plain_progress_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal a transfer is a line at its begin and one at its end; a broken one has no end."""
    progress = ConsoleProgress()
    progress.start("m.gguf", 5_000_000)
    progress.advance_to(4_000_000)
    progress.advance_to(3_000_000)
    progress.advance_to(6_000_000)
    progress.finish()
    progress.start("n.gguf", 10)
    progress.advance_to(4)
    progress.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fetching m.gguf (5.0 MB)"
    assert lines[1].startswith("fetched m.gguf in ")
    assert lines[2:] == ["fetching n.gguf (10 B)"]


def test_quiet_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """``-q`` silences the transfers."""
    progress = ConsoleProgress(quiet=True)
    progress.start("m.gguf", 5)
    progress.advance_to(5)
    progress.finish()
    assert capsys.readouterr().err == ""


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal there is a bar with name and size, and notes do not break it."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = ConsoleProgress()
    progress.start("m.gguf", 1000)
    progress.advance_to(500)
    progress.note("something")
    progress.advance_to(1000)
    progress.finish()
    shown = capsys.readouterr().err
    assert "m.gguf: 100%" in shown
    assert "something" in shown


def test_every_command_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands that are there can be loaded and have a help text with ``-h``."""
    context = click.Context(main)
    for name in main.list_commands(context):
        assert run(name, "-h").exit_code == 0


@pytest.mark.model
def test_the_default_ensemble_is_here() -> None:
    """After ``gguf-fusion pull pocket`` a second pull needs no network, and ``show`` knows the paths."""
    pulled = json.loads(run("pull", "pocket", "--offline", "--json").stdout)
    for fact in pulled:
        assert json.loads(run("show", fact["name"], "--json").stdout)["path"] == fact["path"]
