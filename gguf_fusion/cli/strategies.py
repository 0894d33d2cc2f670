"""``gguf-fusion strategies``: pools, weight rules and presets."""

from __future__ import annotations

import math
from dataclasses import asdict

import click

from gguf_fusion.cli._output import print_json, print_line, print_table
from gguf_fusion.expressions import DEFAULT, listing
from gguf_fusion.parameters import shown


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def strategies(as_json: bool) -> None:
    """List the ways to combine experts: a strategy is pool(weight rule)."""
    rows = listing()
    if as_json:
        records = [{**asdict(row), "defaults": {k: _plain(v) for k, v in row.defaults.items()}} for row in rows]
        print_json({"default": DEFAULT, "strategies": records})
        return
    table = []
    for row in rows:
        defaults = ", ".join(f"{name}={shown(value)}" for name, value in row.defaults.items() if value not in ("", ()))
        name = " = ".join((row.name, *row.aliases))
        table.append([name, row.kind, row.formula, defaults, row.source])
    print_table(["NAME", "KIND", "FORMULA", "DEFAULTS", "SOURCE"], table)
    print_line(f"\ndefault: {DEFAULT}")


def _plain(value: object) -> object:
    """JSON has no infinite numbers: they are written as they stand in an expression."""
    return shown(value) if isinstance(value, float) and math.isinf(value) else value
