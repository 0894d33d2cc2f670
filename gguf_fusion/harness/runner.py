"""Runs tasks of the harness on an ensemble; needs the extra ``eval``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import UsageError
from gguf_fusion.harness.code_task import code_task
from gguf_fusion.harness.model import FusionLM


@dataclass(frozen=True, slots=True)
class Results:
    """What the harness found."""

    rows: list[dict[str, Any]]
    """``task``, ``metric``, ``filter``, ``value``, ``stderr`` (None where there is none), ``n`` documents."""
    everything: dict[str, Any]
    """All it returned, every request and answer included."""


def task_names(include_path: Path | None = None) -> list[str]:
    """Names of all tasks and groups, those of a directory of one's own included."""
    return sorted(TaskManager(include_path=_text(include_path)).all_tasks)


def run(
    ensemble: Ensemble,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    code: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    system: str | None = None,
) -> Results:
    """Evaluate tasks by name, and the problems of a file as the task ``code``.

    Raises UsageError for an ensemble over tokens, and where a task cannot be set up (its data set is not here, …).
    """
    wanted: list[Any] = [*tasks, *([] if code is None else [code_task(code)])]
    model = FusionLM(ensemble)
    try:
        found = simple_evaluate(
            model=model,
            tasks=wanted,
            task_manager=TaskManager(include_path=_text(include_path)),
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            system_instruction=system,
            bootstrap_iters=1000,
        )
    except (OSError, ImportError) as error:
        first = str(error).partition("\n")[0]
        raise UsageError(f"lm-evaluation-harness cannot run {', '.join(map(str, tasks)) or 'code'}: {first}") from error
    return Results(rows=_rows(found), everything=found)


def _rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task, metrics in found["results"].items():
        n = found["n-samples"].get(task, {}).get("effective")
        for key, value in metrics.items():
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{name}")
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": name,
                    "value": float(value),
                    "stderr": error if isinstance(error, float) else None,
                    "n": n,
                }
            )
    return rows


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
