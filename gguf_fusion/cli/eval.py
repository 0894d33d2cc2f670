"""``gguf-fusion eval``: tasks of lm-evaluation-harness on a fused model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from gguf_fusion.cli._ensemble import fusion_options, load_ensemble, machine_options
from gguf_fusion.cli._output import note, print_json, print_line, print_table, warn
from gguf_fusion.config import nearest
from gguf_fusion.errors import MissingExtraError, UsageError


@click.command("eval")
@click.option("--tasks", metavar="NAME,…", help="Tasks of lm-evaluation-harness, or of --include-path; list shows all.")
@click.option(
    "--include-path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Task files of your own.",
)
@click.option("--limit", type=click.IntRange(1), help="Only the first N documents of each task.")
@click.option("--num-fewshot", type=click.IntRange(0), help="Examples before each question, if not the task's own.")
@click.option("--chat", is_flag=True, help="Ask in the experts' chat formats.")
@click.option("-s", "--system", help="A system text for --chat.")
@click.option(
    "--code",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Problems in the HumanEval format (JSON lines): programs are written and run.",
)
@click.option("--run-code", is_flag=True, help="Allow programs that the model wrote to run on this machine.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write every request, answer and result as JSON.",
)
@fusion_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@machine_options
def evaluate(
    tasks: str | None,
    include_path: Path | None,
    limit: int | None,
    num_fewshot: int | None,
    chat: bool,
    system: str | None,
    code: Path | None,
    run_code: bool,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Evaluate an ensemble with lm-evaluation-harness (extra: eval).

    Probabilities are those of the fused law over bytes, so models of any vocabularies compare. Data sets that are not
    on this machine come from Hugging Face, where the task says so.
    """
    names = [name for name in (tasks or "").split(",") if name]
    if not names and code is None:
        raise UsageError("expected --tasks NAME,… or --code FILE, got neither; --tasks list shows what there is")
    if code is not None and not run_code:
        raise UsageError("--code runs programs that a model wrote, in a sandbox; add --run-code if that may be")
    if options["offline"]:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # read when the packages are imported
    try:
        from gguf_fusion.harness import runner
    except ModuleNotFoundError as error:
        raise MissingExtraError((error.name or "lm_eval").partition(".")[0], "eval") from error
    known = runner.task_names(include_path)
    if names == ["list"]:
        _list(known, as_json)
        return
    for name in names:
        if name not in known:
            raise UsageError(
                f"no task is called {name!r}{nearest(name, known) if len(known) < 50 else _near(name, known)}"
            )
    if code is not None:
        _tell_sandbox()
    with load_ensemble({**options, "space": "byte"}) as ensemble:
        found = runner.run(
            ensemble,
            names,
            include_path=include_path,
            code=code,
            limit=limit,
            num_fewshot=num_fewshot,
            chat=chat,
            system=system,
        )
    if output is not None:
        _write(output, found.everything)
    if as_json:
        print_json({"ensemble": ensemble.name, "strategy": ensemble.strategy, "results": found.rows})
        return
    table = [[r["task"], r["metric"], _number(r["value"]), _number(r["stderr"]), str(r["n"])] for r in found.rows]
    print_table(["TASK", "METRIC", "VALUE", "STDERR", "DOCUMENTS"], table)


def _list(known: list[str], as_json: bool) -> None:
    if as_json:
        print_json(known)
    else:
        print_line("\n".join(known))


def _near(name: str, known: list[str]) -> str:
    """Like ``nearest``, without a list of thousands."""
    hint = nearest(name, known)
    return hint if "did you mean" in hint else "; --tasks list shows all"


def _tell_sandbox() -> None:
    from gguf_fusion.harness.sandbox import MEMORY_BYTES, TIME_S, cuts_network

    note(f"programs run for at most {TIME_S:.0f} s in {MEMORY_BYTES >> 20} MiB, in an empty directory of their own")
    if not cuts_network():
        warn("programs keep the network here: this system does not allow to take it away (unshare)")


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(record, ensure_ascii=False, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
