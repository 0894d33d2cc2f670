"""``gguf-fusion plan``: JSON keys, exit status, and sizes as people write them."""

import json

import pytest
from click.testing import CliRunner

from gguf_fusion.cli import main


def plan(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_json_has_what_scripts_need():
    """The object names every expert with layers and bytes, the totals, the predicted step and remedies."""
    result = plan("desktop-24", "--vram", "8GB", "--ram", "32GB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fits"] is True
    assert len(found["experts"]) == 3
    for one in found["experts"].values():
        assert {"n_gpu_layers", "n_layers", "weights_bytes", "kv_bytes", "buffers_bytes"} <= set(one)
        assert one["weights_bytes"] == sum(one["layer_bytes"]) + one["other_bytes"]
    assert 0 < found["total"]["vram_bytes"] <= 8e9
    assert found["predicted_step_s"] > 0
    assert found["remedies"] == []


def test_too_little_memory_ends_with_status_1_and_remedies():
    """Where nothing fits the exit status is 1 and the output says what to change."""
    result = plan("desktop-24", "--vram", "0", "--ram", "4GB")
    assert result.exit_code == 1
    assert "it does not fit:" in result.output
    assert "a smaller quant of" in result.output


@pytest.mark.parametrize("size", ["6GB", "6gb", "6 GB", "6G", "6000MB", "6000000000"])
def test_sizes_are_read_as_people_write_them(size):
    """Units in any case, with or without B and blanks, mean the same."""
    result = plan("laptop-6", "--vram", size, "--ram", "16GiB", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["budget"]["vram_bytes"] == [6_000_000_000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vram", "lots"), "expected a size such as 6GB"),
        (("nosuch",), "no ensemble is called 'nosuch'"),
        (("pocket", "-ngl", "4", "--vram", "0"), "there is none"),
    ],
)
def test_mistakes_are_explained(arguments, message):
    """Wrong sizes, names and layers without a card are refused with a hint."""
    result = plan(*arguments)
    assert result.exit_code != 0
    assert message in str(result.exception) + result.output
