"""The doctor: child processes that die become diagnoses, and the exit status tells."""

import json

import pytest
from click.testing import CliRunner

from gguf_fusion import doctor
from gguf_fusion.cli import main

DIE = "import os, signal; os.kill(os.getpid(), signal.{})"


@pytest.mark.parametrize(
    ("signal", "words"),
    [("SIGILL", "needs CPU features you lack"), ("SIGSEGV", "segmentation fault"), ("SIGKILL", "want of memory")],
)
def test_a_death_by_signal_becomes_a_diagnosis(signal, words):
    """A child that dies of an illegal instruction, a crash or the out-of-memory killer says so."""
    probe = doctor.run_probe(DIE.format(signal))
    assert probe.answer is None
    assert words in probe.problem


def test_other_failures_give_their_last_words():
    """A child that ends with an error gives the error; one that answers gives the answer."""
    assert "no module named nonsense" in doctor.run_probe("import nonsense").problem.lower().replace("'", "")
    assert doctor.run_probe("print('{\"a\": 1}')").answer == {"a": 1}
    assert "could not be started" in doctor.run_probe("", python=("/no/such/python",)).problem


def test_exit_status_tells(monkeypatch):
    """An illegal instruction in the native library fails the whole check, with a rebuild hint."""
    monkeypatch.setattr(doctor, "_IMPORT", DIE.format("SIGILL"))
    result = CliRunner().invoke(main, ["doctor", "--offline"])
    assert result.exit_code == 1
    assert "FAIL" in result.output
    assert "rebuild" in result.output


def test_a_healthy_installation_is_reported_as_json(monkeypatch, tmp_path):
    """The JSON object has versions, memory, devices and every check."""
    monkeypatch.setenv("GGUF_FUSION_CACHE", str(tmp_path))
    result = CliRunner().invoke(main, ["doctor", "--offline", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert found["versions"]["llama-cpp-python"]
    assert found["ram"]["total_bytes"] > found["ram"]["free_bytes"] > 0
    names = {check["name"]: check["status"] for check in found["checks"]}
    assert names["kernels"] == names["llama.cpp"] == "ok"
    assert names["decode"] == "warn"


def test_a_hub_that_does_not_answer_is_a_note(monkeypatch):
    """Without a network the doctor says so within seconds and does not fail for it."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    check = doctor._hub(offline=False)
    assert check.status == "warn"
    assert "does not answer" in check.detail
