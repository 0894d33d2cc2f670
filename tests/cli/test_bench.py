"""``gguf-fusion bench`` and ``quants``: ranges, formats, JSON keys, bad input."""

import json

import pytest
from click.testing import CliRunner

from gguf_fusion.cli import main
from gguf_fusion.cli.bench import _numbers
from gguf_fusion.errors import UsageError
from gguf_fusion.measure.speed import cases


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("4", [4]), ("1,2", [1, 2]), ("1-4", [1, 2, 3, 4]), ("2-8+2", [2, 4, 6, 8]), ("1-8*2", [1, 2, 4, 8]), ("0", [0])],
)
def test_ranges_are_those_of_llama_bench(text, wanted):
    """Numbers, lists, ranges with a step and ranges with a factor."""
    assert _numbers("-p", text, 0) == wanted


@pytest.mark.parametrize("text", ["x", "1-x", "", "-3"])
def test_other_ranges_are_refused(text):
    """What is no range is refused with an example."""
    with pytest.raises(UsageError, match="-p: expected"):
        _numbers("-p", text, 0)


def test_settings_are_multiplied():
    """Every combination of values is one case."""
    found = cases(n_threads=[1, 2], n_ctx=[0], type_k=["f16", "q8_0"], type_v=["f16"], n_gpu_layers=[0], n_prompt=[8],
                  n_gen=[4])  # fmt: skip
    assert [(case.n_threads, case.type_k) for case in found] == [(1, "f16"), (1, "q8_0"), (2, "f16"), (2, "q8_0")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quants"], "give either REF"),
        (["quants", "x", "--ensemble", "pocket"], "give either REF"),
        (["quants", "--ensemble", "pocket"], "needs --budget"),
        (["quants", "smollm2-135m-instruct", "--quants", "Q9_K"], "unknown level 'Q9_K'"),
        (["quants", "smollm2-135m-instruct", "--text", "/no/such/file"], "/no/such/file"),
        (["quants", "smollm2-135m-instruct", "--quants", ","], "no level given"),
        (["quants", "--ensemble", "pockett", "--budget", "1GB"], "pocket"),
        (["quants", "--ensemble", "pocket", "--budget", "much"], "--budget: expected a size"),
        (["quants", "smollm2-135m-instruct", "--fit", "much"], "--fit: expected a size"),
        (["bench", "-p", "0", "-n", "0"], "nothing to measure"),
        (["bench", "--type-k", "q3"], "expected cache types"),
        (["bench", "nosuch"], "nosuch"),
    ],
)
def test_mistakes_are_explained(arguments, message):
    """Wrong names, levels, texts and ranges end with a message, not a traceback."""
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert message in str(result.exception) + result.output


@pytest.mark.model
def test_bench_prints_llama_bench_fields():
    """One JSON line per test with llama-bench's names; the fused row tells where the time went."""
    result = CliRunner().invoke(
        main,
        ["bench", "smollm2-135m-instruct", "-p", "16", "-n", "4", "-r", "2", "-t", "1", "-o", "jsonl", "--offline"],
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["test"] for one in rows] == ["pp16", "tg4"]
    for one in rows:
        assert {"model_filename", "model_size", "n_threads", "avg_ns", "stddev_ns", "avg_ts", "samples_ns"} <= set(one)
        assert len(one["samples_ns"]) == 2
        assert one["avg_ts"] > 0


@pytest.mark.model
def test_quants_needs_leave_to_quantize_twice():
    """A file that is quantized already is only made worse when that is asked for."""
    quick = ["--chunk", "16", "--chunks", "1", "-p", "4", "-n", "2", "-r", "1", "-t", "1", "--offline"]
    result = CliRunner().invoke(main, ["quants", "smollm2-135m-instruct", "--quants", "Q8_0", *quick])
    assert result.exit_code != 0
    assert "--requantize" in str(result.exception) + result.output
