"""The harness's model class and ``gguf-fusion eval``: its results are those of a direct computation."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_fusion.cli import main
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.harness.scoring import continuation, document
from gguf_fusion.vocabulary import Kind, Vocabulary

pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with the extra eval")

TASKS = Path(__file__).parents[2] / "bench" / "tasks"
ECHO = "{% for m in messages %}{{ '<u>' ~ m.content ~ '<a>' if m.role == 'user' else m.content }}{% endfor %}"


def expert(seed: int, name: str, *words: str) -> TableExpert:
    """A random law over printable bytes, given the last two bytes; sure of the END after a full stop."""
    kinds = [Kind.TEXT] * (256 + len(words)) + [Kind.CONTROL] * 3 + [Kind.END]
    texts = [bytes([b]) for b in range(256)] + [word.encode() for word in words] + [b"<u>", b"<a>", b"<s>", b"</s>"]

    def law(text: bytes) -> np.ndarray:
        probs = np.full(257, 1e-4)
        rng = np.random.default_rng([seed, zlib.crc32(text[-2:])])
        probs[32:127] += rng.dirichlet(np.full(95, 0.1))
        probs[256] = 5.0 if text.endswith(b".") else 1e-6
        return probs / probs.sum()

    return TableExpert.from_byte_law(Vocabulary.from_pieces(texts, kinds, len(texts) - 2), law, name=name)


@pytest.fixture
def ensemble() -> Iterator[Ensemble]:
    experts = [expert(1, "one", "the", " the", "ing"), expert(2, "two", "th", "e ", "in")]
    with Ensemble.from_experts(experts, templates=[ECHO, ECHO], strategy="linear") as made:
        yield made


def requests(*arguments: tuple[object, ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=args) for args in arguments]


def test_answers_are_those_of_single_calls_in_the_order_of_the_requests(ensemble: Ensemble) -> None:
    """However they are sorted inside."""
    from gguf_fusion.harness.model import FusionLM

    model = FusionLM(ensemble)
    asked = [("the thing", " in it"), ("a", "b"), ("the thing", " is"), ("", "the")]
    found = model.loglikelihood(requests(*asked), disable_tqdm=True)
    for (context, text), (score, greedy) in zip(asked, found, strict=True):
        wanted = continuation(ensemble, context.encode(), text.encode())
        assert (score, greedy) == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
    texts = [("the thing is in it",), ("",), ("a",)]
    rolling = model.loglikelihood_rolling(requests(*texts), disable_tqdm=True)
    assert rolling == [pytest.approx(document(ensemble, text.encode()), abs=1e-4) for (text,) in texts]


def test_what_is_generated_is_what_would_score_as_greedy(ensemble: Ensemble) -> None:
    """Texts end before the stop string; the written text is its own most probable continuation."""
    from gguf_fusion.harness.model import FusionLM

    model = FusionLM(ensemble)
    options = {"until": [], "max_gen_toks": 12, "do_sample": False}
    (text,) = model.generate_until(requests(("the thing", options)), disable_tqdm=True)
    assert text
    assert model.loglikelihood(requests(("the thing", text)), disable_tqdm=True)[0][1]
    stop = text[2:4]
    cut, sampled, again = model.generate_until(
        requests(
            ("the thing", {**options, "until": [stop]}),
            ("the thing", {"until": stop, "temperature": 0.9, "seed": 1, "do_sample": True}),
            ("the thing", {"until": [stop, ""], "temperature": 0.9, "seed": 1}),
        ),
        disable_tqdm=True,
    )
    assert cut == text[: text.index(stop)]
    assert stop not in sampled
    assert sampled == again
    with pytest.raises(UsageError, match=r"temprature.*did you mean"):
        model.generate_until(requests(("x", {"temprature": 1})), disable_tqdm=True)


def test_chats_are_read_by_every_expert_in_its_own_format(ensemble: Ensemble) -> None:
    """Messages reach the templates; an answer that has begun is continued."""
    from gguf_fusion.harness.model import FusionLM

    model = FusionLM(ensemble)
    question = {"role": "user", "content": "the thing?"}
    chat = model.apply_chat_template([question])
    begun = model.apply_chat_template([question, {"role": "assistant", "content": "it"}], add_generation_prompt=False)
    asked = requests((chat, " is"), (begun, " is"), (chat + "it", " is"))
    first, second, third = (score for score, _ in model.loglikelihood(asked, disable_tqdm=True))
    assert first == pytest.approx(continuation(ensemble, [question], b" is")[0], abs=1e-4)
    assert second == pytest.approx(continuation(ensemble, [question], b" is", b"it")[0], abs=1e-4)
    assert third == pytest.approx(second)
    assert "one" in model.tokenizer_name
    assert json.loads(model.chat_template()) == {"one": ECHO, "two": ECHO}


def test_a_local_task_gives_what_a_direct_computation_gives(ensemble: Ensemble) -> None:
    """Installed texts, the harness's own metrics: bits per byte and accuracy, computed here once more by hand."""
    from gguf_fusion.harness import runner

    sys.path.insert(0, str(TASKS))
    try:
        import docstrings
    finally:
        sys.path.remove(str(TASKS))
    found = runner.run(ensemble, ["docstrings_text", "docstrings_choice"], include_path=TASKS, limit=2)
    values = {(row["task"], row["metric"]): row["value"] for row in found.rows}
    assert {row["n"] for row in found.rows} == {2}
    texts = [row["text"].encode() for row in list(docstrings.texts()["test"])[:2]]
    bits = -sum(document(ensemble, text) for text in texts) / sum(map(len, texts)) / np.log(2)
    assert values["docstrings_text", "bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    right = right_per_byte = 0
    for row in list(docstrings.choices()["test"])[:2]:
        context = f"The function {row['name']}:".encode()
        scores = np.array([continuation(ensemble, context, f" {o}".encode())[0] for o in row["options"]])
        right += int(scores.argmax() == row["answer"])
        right_per_byte += int((scores / [len(o) for o in row["options"]]).argmax() == row["answer"])
    assert values["docstrings_choice", "acc"] == right / 2
    assert values["docstrings_choice", "acc_norm"] == right_per_byte / 2


def test_programs_are_written_run_and_counted(ensemble: Ensemble, tmp_path: Path) -> None:
    """A problem that any answer solves and one that none does: half of them pass."""
    from gguf_fusion.harness import runner

    test = "def check(f):\n    assert f() == 5"
    problems = [
        {"prompt": "def f():\n    return 5  #", "test": test, "entry_point": "f"},
        {"prompt": "def f():\n    return 6  #", "test": test, "entry_point": "f"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, problems)))
    (row,) = runner.run(ensemble, [], code=path).rows
    assert (row["task"], row["metric"], row["value"], row["n"]) == ("code", "pass_at_1", 0.5, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --tasks"),
        (["--tasks", "docstrings_txt"], "did you mean 'docstrings_text'"),
        (["--code", "pyproject.toml"], "--run-code"),
        (["--tasks", "docstrings_text", "--limit", "0"], "--limit"),
    ],
)
def test_bad_input(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, before anything is loaded."""
    monkeypatch.chdir(Path(__file__).parents[2])
    result = CliRunner().invoke(main, ["eval", *arguments, "--include-path", str(TASKS), "--offline"])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_missing_package_names_its_extra() -> None:
    """One line that says what to install."""
    script = (
        "import sys; sys.modules['lm_eval'] = None; from gguf_fusion.cli import main; main(['eval', '--tasks', 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: this needs the package lm_eval; install it with: pip install 'gguf-fusion[eval]'"
    ]


@pytest.mark.model
def test_a_real_expert_is_evaluated_on_the_command_line(tmp_path: Path) -> None:
    """One small model on the local tasks: plausible bits per byte, the table and the JSON agree."""
    arguments = ["eval", "-e", "smollm2-135m-instruct", "--tasks", "docstrings_text,docstrings_choice"]
    arguments += [
        "--include-path",
        str(TASKS),
        "-t",
        "1",
        "--limit",
        "3",
        "--offline",
        "--output",
        str(tmp_path / "all.json"),
    ]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    rows = {(row["task"], row["metric"]): row for row in json.loads(result.stdout)["results"]}
    assert 0.3 < rows["docstrings_text", "bits_per_byte"]["value"] < 2.0
    assert rows["docstrings_choice", "acc"]["n"] == 3
    assert len(json.loads((tmp_path / "all.json").read_text())["samples"]["docstrings_text"]) == 3
