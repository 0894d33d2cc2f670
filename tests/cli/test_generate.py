"""The run command: what it prints, and what it says about bad input."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gguf_fusion.cli import main


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
