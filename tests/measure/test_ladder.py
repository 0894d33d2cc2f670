"""Ladders of levels: figures as plain records, remembered by hash, and nothing lost by an interruption."""

import json
import os
import signal
import subprocess
import sys

import pytest

from gguf_fusion.errors import UsageError
from gguf_fusion.measure import child
from gguf_fusion.measure.ladder import Plan, ladder, recommend
from gguf_fusion.measure.quality import NOISE_FLOOR
from gguf_fusion.measure.quants import quants

TEXT = b"the other thing that they thought about was the weather of the north. " * 5
PLAN = Plan(chunk=64, chunks=2, n_ctx=256, n_threads=1, n_prompt=4, n_gen=2, repetitions=1)
KEYS = {"quant", "size_bytes", "bpw", "pp_ts", "tg_ts", "bpb", "ppl", "kld_mean", "kld_se", "same_top", "peak_bytes"}


def climb(reference, levels, text=TEXT, **more):
    told = []
    return ladder("tiny", reference, levels, text, PLAN, told.append, **more), told


def test_levels_are_ordered_by_size_and_by_distance(tiny_model, same_process):
    """Smaller levels lie farther from the reference, whose distance from itself is below the noise floor."""
    done, _ = climb(tiny_model(), ["Q8_0", "Q2_K", "Q4_0"])
    assert done.problems == []
    assert [row["quant"] for row in done.rows] == ["Q2_K", "Q4_0", "Q8_0", "F32"]
    assert all(set(row) >= KEYS for row in done.rows)
    far = [row["kld_mean"] for row in done.rows]
    assert far == sorted(far, reverse=True)
    assert far[-1] < NOISE_FLOOR < far[-2]
    assert [row["is_reference"] for row in done.rows] == [False, False, False, True]
    assert all(row["pareto"] for row in done.rows)
    assert json.loads(json.dumps(done.rows)) == done.rows


def test_a_second_call_measures_nothing(tiny_model, same_process):
    """What was measured is remembered by the hash of the files, also under another name."""
    first, _ = climb(tiny_model(), ["Q8_0"])
    n = len(same_process)
    again, told = climb(tiny_model("renamed.gguf"), ["Q8_0"])
    assert [r["kld_mean"] for r in again.rows] == [r["kld_mean"] for r in first.rows]
    assert told in ([], ["Q8_0: quantizing renamed.gguf"])
    assert same_process[n:].count("speed_of") == 0


def test_an_interruption_loses_no_level(tiny_model, same_process, monkeypatch):
    """After Ctrl-C during the third level the first two are not measured again."""
    inner = child.call

    def stopping(module, function, *arguments):
        if function == "speed_of" and "Q4_0" in arguments[0]:
            raise KeyboardInterrupt
        return inner(module, function, *arguments)

    monkeypatch.setattr(child, "call", stopping)
    with pytest.raises(KeyboardInterrupt):
        climb(tiny_model(), ["Q8_0", "Q4_0"])
    monkeypatch.setattr(child, "call", inner)
    done, told = climb(tiny_model(), ["Q8_0", "Q4_0"])
    assert len(done.rows) == 3
    assert told == ["Q4_0: speed"]


def test_a_level_that_cannot_be_had_is_named(tiny_model, same_process):
    """One level that the model cannot be written as does not end the others."""
    done, _ = climb(tiny_model(), ["Q2_K_S", "Q8_0"])
    assert [row["quant"] for row in done.rows] == ["Q8_0", "F32"]
    assert len(done.problems) == 1 and done.problems[0].startswith("Q2_K_S: ")


def test_levels_from_elsewhere_are_not_made(tiny_model, same_process):
    """A level that a repository has is taken as it is."""
    reference = tiny_model()
    other = tiny_model("other.gguf", seed=1)
    done, _ = climb(reference, ["Q8_0"], obtain=lambda level: other)
    assert "write_level" not in same_process
    assert max(row["kld_mean"] for row in done.rows) > 0.1


def test_short_texts_are_refused_at_once(tiny_model, same_process):
    """A text shorter than one chunk ends the call before anything is timed."""
    with pytest.raises(UsageError, match="a chunk needs 64"):
        climb(tiny_model(), ["Q8_0"], text=b"short")
    assert same_process == []


def test_a_reference_with_another_vocabulary_is_refused(tiny_model, same_process):
    """Two files with different pieces cannot be compared, which is said before anything is measured."""
    model, other = tiny_model("a.gguf"), tiny_model("b.gguf", extra="he")
    with pytest.raises(UsageError, match="different vocabularies"):
        quants(str(model), ["Q8_0"], reference=str(other), text=TEXT, plan=PLAN)
    assert same_process == []


def test_a_file_is_compared_with_another_reference(tiny_model, same_process):
    """With a reference of its own, REF is one of the rows."""
    reference, model = tiny_model("a.gguf"), tiny_model("b.gguf", seed=1)
    done = quants(str(model), ["Q8_0"], reference=str(reference), text=TEXT, plan=PLAN)
    assert [(row["quant"], row["is_reference"]) for row in done.rows if row["quant"] == "F32"] in (
        [("F32", True), ("F32", False)],
        [("F32", False), ("F32", True)],
    )


def test_a_level_as_reference_needs_a_repository(tiny_model):
    """A file has no F16 beside it, and the message says what to give instead."""
    with pytest.raises(UsageError, match=r"--reference F16: .* give a file"):
        quants(str(tiny_model()), ["Q8_0"], reference="f16", text=TEXT, plan=PLAN)


def row(quant, size, tg, kld):
    return {"quant": quant, "size_bytes": size, "peak_bytes": 2 * size, "tg_ts": tg, "kld_mean": kld, "n_ctx": 1024}


def test_recommendations_keep_the_limits():
    """The level nearest to the reference that fits, that is fast enough, or both; what is lacking where none does."""
    rows = [row("Q2_K", 100, 30.0, 0.5), row("Q4_K_M", 200, 20.0, 0.05), row("Q8_0", 400, 10.0, 0.01)]
    assert recommend(rows, 500, None).startswith("Q4_K_M within 0.00 GB")
    assert recommend(rows, None, 25.0).startswith("Q2_K")
    assert recommend(rows, None, None).startswith("Q8_0")
    assert "the fastest, Q2_K, writes 30.0 tokens/s" in recommend(rows, 500, 99.0)
    assert "no level runs" in recommend(rows, 100, None)
    assert recommend([row("Q2_K", 100, 30.0, None)], None, None).startswith("Q2_K")


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_was(tiny_model, tmp_path):
    """The real command, killed during its second level, measures only what is missing when it is run again."""
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    command = [
        sys.executable, "-m", "gguf_fusion", "quants", str(tiny_model()), "--quants", "Q8_0,Q4_0", "--text", str(text),
        "--chunk", "64", "--chunks", "2", "-p", "4", "-n", "2", "-r", "1", "-t", "1", "--json",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        for line in first.stderr:
            if line.startswith("Q4_0"):
                os.kill(first.pid, signal.SIGKILL)
                break
    assert first.returncode == -signal.SIGKILL
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(one["quant"] for one in json.loads(second.stdout)) == ["F32", "Q4_0", "Q8_0"]
    assert "Q8_0: chunk" not in second.stderr and "F32: " not in second.stderr.replace("tiny-F32", "")
    assert "Q4_0: speed" in second.stderr
