"""The run command: what it prints, and what it says about bad input."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gguf_fusion.cli import _sampling, main
from gguf_fusion.records import Step


def run(*arguments: str, stdin: bytes | str = "") -> Result:
    return CliRunner().invoke(main, ["run", *arguments], input=stdin)


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["hi", "--ensemble", "pockett"], "", "pocket"),
        (["hi", "-e", "nobody"], "", "nobody"),
        (["hi", "-e", "gemma-3-270m=x"], "", "REF=WEIGHT"),
        (["hi", "--strategy", "linar"], "", "linear"),
        (["hi", "--temp", "-1"], "", "temperature"),
        ([], "", "expected a prompt"),
        ([], b"\xff\xfe", "expected UTF-8"),
    ],
)
def test_bad_input(arguments: list[str], stdin: bytes | str, message: str) -> None:
    """One line that says what is wrong, a status that is not 0, nothing on stdout."""
    result = run(*arguments, "--offline", stdin=stdin)
    assert result.exit_code in {1, 2}
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_pipe_that_never_closes_is_not_waited_for() -> None:
    """With a prompt, a silent stdin holds nothing up; without one it is the prompt."""
    command = [sys.executable, "-m", "gguf_fusion", "run", "hi", "--ensemble", "pockett", "--offline"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        assert b"pocket" in run.stderr.read()
        assert run.wait(timeout=60) == 2


@pytest.mark.parametrize(
    ("sent", "waits", "read"), [(b"text", False, "text"), (b"", False, ""), (b"text", True, "text")]
)
def test_what_is_piped_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch, sent: bytes, waits: bool, read: str) -> None:
    """Whatever began in time counts, in whole; what never begins does not."""
    receiver, sender = os.pipe()
    monkeypatch.setattr(_sampling, "_STDIN_S", 0.05)
    if sent:
        threading.Thread(target=lambda: (os.write(sender, sent), os.close(sender))).start()
        time.sleep(0.02)
    with os.fdopen(receiver) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert _sampling.piped_text(waits=waits) == read
    if not sent:
        os.close(sender)


def test_an_end_is_explained() -> None:
    """END is told from a stop string and from a limit, with what every expert gave it."""
    step = Step(
        symbol=256, data=b"", logprob=-0.5, expert_logprobs=np.log([0.5, 1.0]), weights=np.ones(2) / 2,
        responsibility=np.array([0.25, 0.75]), n_decodes=0, ghost_share=0.0, finish_reason="stop",
    )  # fmt: skip
    ensemble = SimpleNamespace(names=("a", "b"), space=SimpleNamespace(end=256))
    found = _sampling.ending(ensemble, step)  # type: ignore[arg-type]
    assert found["by"] == "end of text"
    assert found["experts"]["b"] == {"probability": 1.0, "responsibility": 0.75}
    for other, by in (
        (replace(step, data=b"x", symbol=120), "stop string"),
        (replace(step, finish_reason="length"), "limit"),
    ):
        assert _sampling.ending(ensemble, other) == {"by": by}  # type: ignore[arg-type]


@pytest.mark.model
def test_pocket_answers_the_same_every_time() -> None:
    """Three real experts write one text; a seed gives it again, streamed or as JSON."""
    arguments = ("What is the capital of France?", "--max-bytes", "40", "--seed", "1", "--offline")
    streamed = run(*arguments)
    assert streamed.exit_code == 0, streamed.stderr
    answer = json.loads(run(*arguments, "--json").stdout)
    assert streamed.stdout == answer["text"] + "\n"
    assert answer["seed"] == 1
    assert answer["finish_reason"] in {"stop", "length"}
    assert 0 < answer["timings"]["bytes"] <= 40
    assert len(answer["experts"]) == 3
    assert all(math.isfinite(value) for value in answer["timings"].values() if isinstance(value, float))


@pytest.mark.model
def test_one_expert_raw_greedy_is_its_own_text() -> None:
    """One expert alone goes on exactly as the model itself would, token for token."""
    from gguf_fusion import hub
    from gguf_fusion.experts.llama import LlamaExpert

    prompt = "def fibonacci(n):\n"
    name = "smollm2-135m-instruct"
    answer = run(prompt, "-e", name, "--raw", "--temp", "0", "-n", "12", "--json", "--offline")
    assert answer.exit_code == 0, answer.stderr
    with LlamaExpert.load(hub.locate(name), name=name, n_ctx=512) as expert:
        path = expert.tokenize(prompt.encode())
        start = len(path)
        for _ in range(12):
            path = np.append(path, np.int32(expert.evaluate(path)[0].argmax()))
        assert json.loads(answer.stdout)["text"].encode() == expert.vocabulary.text(path[start:])


@pytest.mark.model
def test_interrupt_keeps_what_was_printed() -> None:
    """Ctrl-C ends a reply at once with status 130; the text so far stays, and nothing else is printed."""
    command = [sys.executable, "-m", "gguf_fusion", "run", "Tell a long story.", "--seed", "1", "--offline"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as run:
        assert run.stdout is not None
        shown = run.stdout.read(1)
        run.send_signal(signal.SIGINT)
        rest, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert (shown + rest).decode()
    assert errors.decode().strip() == "interrupted"
