"""Speeds that were measured: kept per file, device and threads, the best of a few loads, and used by plans."""

import json
import time

import pytest
from click.testing import CliRunner

from gguf_fusion import calibration
from gguf_fusion.cli import main
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.gguf_info import read
from gguf_fusion.plan.memory import shape_of
from gguf_fusion.plan.planner import STEP_OVERHEAD
from gguf_fusion.testing import byte_vocabulary

SECONDS = 0.02


class Slow(TableExpert):
    """Takes a known time per token; remembers its calls."""

    calls = 0

    def __init__(self, path, *, name, **settings):
        vocabulary = byte_vocabulary()
        super().__init__(vocabulary, lambda _: [1.0] * vocabulary.n_vocab, name=name)

    def evaluate(self, path, n_rows=1, **options):
        Slow.calls += 1
        time.sleep(SECONDS)
        return super().evaluate(path, n_rows, **options)

    def chat_template(self):
        return None


@pytest.fixture
def path(write_gguf, monkeypatch):
    """A tiny file; loading it makes the slow expert."""
    Slow.calls = 0
    monkeypatch.setattr(LlamaExpert, "load", Slow)
    return write_gguf("tiny.gguf")


def test_a_speed_is_bytes_over_seconds_and_the_best_counts(path):
    """Bytes read per step over the time beyond the fixed cost; three loads measure, then it is only looked up."""
    expert = Slow(path, name="tiny")
    shape = shape_of("tiny", read(path))
    expected = (sum(shape.layer_bytes) + shape.output_bytes) / (SECONDS - STEP_OVERHEAD)
    speeds = [calibration.measure(expert, path, "CPU", 1) for _ in range(3)]
    assert speeds == sorted(speeds)
    assert 0.3 * expected < speeds[-1] <= 1.05 * expected
    calls = Slow.calls
    assert calibration.measure(expert, path, "CPU", 1) == speeds[-1] == calibration.remembered(path, "CPU", 1)
    assert Slow.calls == calls
    assert (expert.n_decoded, calibration.remembered(path, "CPU", 2), calibration.remembered(path, "x", 1)) == (
        0, None, None,
    )  # fmt: skip


def test_another_file_and_a_damaged_memory_are_measured_again(path):
    """A file that changed has no speed yet; neither has anything where the memory cannot be read."""
    calibration.measure(Slow(path, name="tiny"), path, "CPU", 1)
    calibration._memory().write_text("{damaged")
    assert calibration.remembered(path, "CPU", 1) is None
    calibration.measure(Slow(path, name="tiny"), path, "CPU", 1)
    path.write_bytes(path.read_bytes() + b" ")
    assert calibration.remembered(path, "CPU", 1) is None


def test_the_first_load_measures_and_plans_use_it(path):
    """After one load the plan's seconds are the measured ones; --no-calibrate goes back to guesses."""
    with Ensemble.from_files([path], calibrate=False, n_threads=1):
        assert not calibration._memory().exists()
    with Ensemble.from_files([path], n_threads=1):
        assert Slow.calls > 0

    def planned(*more):
        result = CliRunner().invoke(main, ["plan", "-e", str(path), "--ram", "4GB", "-t", "1", "--json", *more])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        return found["predicted_step_s"], found["experts"]["tiny"]["speed"]

    seconds, how = planned()
    assert how == "measured"
    assert 0.8 * SECONDS < seconds < 3 * SECONDS
    seconds, how = planned("--no-calibrate")
    assert how == "guessed"
    assert seconds < 0.5 * SECONDS
