"""A task of the harness: programs in the HumanEval format, written by the model and run in a sandbox.

The data set is a file of the user's: JSON lines (``.gz`` or not), each with ``prompt``, ``test``, ``entry_point`` and
perhaps ``task_id``. A program is the prompt, what the model wrote, the test, and the call ``check(entry_point)``.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from gguf_fusion.errors import UsageError
from gguf_fusion.harness.sandbox import run_program

NAME = "code"
_FIELDS = ("prompt", "test", "entry_point")

_UNTIL = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```"]
"""Where a function is over: the first line that does not belong to its body."""


def read_problems(path: Path) -> list[dict[str, str]]:
    """The problems of a file. Raises UsageError, naming the line."""
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            problems.append(
                {name: str(record[name]) for name in _FIELDS} | {"task_id": str(record.get("task_id", number))}
            )
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path}:{number}: expected a JSON object with {', '.join(_FIELDS)}: {error!r}") from None
    if not problems:
        raise UsageError(f"{path}: expected problems as JSON lines, got none")
    return problems


def program(problem: dict[str, str], answer: str) -> str:
    """The program that passes if the answer is right."""
    return f"{problem['prompt']}{answer}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"


def code_task(path: Path, *, max_tokens: int = 512) -> dict[str, Any]:
    """The task as the harness takes it; its measure is the share of problems whose first program passes."""
    from datasets import Dataset

    problems = read_problems(path)

    def verdict(doc: dict[str, str], answers: list[str]) -> dict[str, float]:
        return {"pass_at_1": float(run_program(program(doc, answers[0])).passed)}

    return {
        "task": NAME,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(problems)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{test}}",
        "process_results": verdict,
        "generation_kwargs": {"until": _UNTIL, "max_gen_toks": max_tokens, "do_sample": False},
        "metric_list": [{"metric": "pass_at_1", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
