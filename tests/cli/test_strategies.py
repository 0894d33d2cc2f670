"""The command that lists strategies."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from gguf_fusion.cli import main
from gguf_fusion.expressions import listing, parse


def test_table_and_json() -> None:
    """Both list every registered part, and the default is a strategy."""
    table = CliRunner().invoke(main, ["strategies"])
    assert table.exit_code == 0
    assert all(row.name in table.stdout for row in listing())
    answer = json.loads(CliRunner().invoke(main, ["strategies", "--json"]).stdout, parse_constant=pytest.fail)
    assert [row["name"] for row in answer["strategies"]] == [row.name for row in listing()]
    parse(answer["default"])


def test_strategies_of_a_registry_are_checked(tmp_path) -> None:
    """A wrong strategy in a registry file is refused by every command that reads it, naming the ensemble."""
    registry = tmp_path / "models.toml"
    registry.write_text('[ensembles.mine]\nexperts = ["gemma-3-270m"]\nstrategy = "linearr(evidence)"\n')
    result = CliRunner().invoke(main, ["list", "--config", str(registry)])
    assert result.exit_code == 2
    assert "[ensembles.mine] strategy: unknown strategy 'linearr'; did you mean 'linear'?" in result.stderr
