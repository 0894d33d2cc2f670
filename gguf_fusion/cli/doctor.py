"""``gguf-fusion doctor``: what this installation can do, and what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from gguf_fusion import hub
from gguf_fusion.cli._output import print_json, print_line, print_table
from gguf_fusion.cli._registry import registry_option
from gguf_fusion.config import DEFAULT_ENSEMBLE, Registry
from gguf_fusion.doctor import examine
from gguf_fusion.errors import NotCachedError

_SIGNS = {"ok": "ok", "warn": "note", "fail": "FAIL"}


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="A GGUF file to decode one token with.")
@click.option("--offline", is_flag=True, help="Do not ask whether the hub answers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@registry_option
def doctor(registry: Registry, model: Path | None, offline: bool, as_json: bool) -> None:
    """Check versions, native library, devices, memory, caches and the hub; exit status 1 if something fails."""
    checks, facts = examine(model or _smallest(registry), offline=offline)
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks], **facts})
    else:
        print_table(("CHECK", "", "FOUND"), [(c.name, _SIGNS[c.status], c.detail) for c in checks])
        cpu = facts["cpu"]
        print_line(f"\n{cpu['machine']}, {cpu['cores']} cores, {' '.join(cpu['features'])}")
    if failed:
        raise SystemExit(1)


def _smallest(registry: Registry) -> Path | None:
    """The smallest expert of the default ensemble that is on this machine."""
    found = []
    for name in registry.ensemble(DEFAULT_ENSEMBLE).experts:
        try:
            found.append(hub.locate(name, registry))
        except NotCachedError:
            continue
    return min(found, key=lambda path: path.stat().st_size, default=None)
