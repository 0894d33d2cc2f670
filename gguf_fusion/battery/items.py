"""The items, and the programs that check an answer."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from gguf_fusion.errors import UsageError
from gguf_fusion.harness.sandbox import run_program

CATEGORIES = ("factual", "reasoning", "math", "code", "creative", "instruction", "multilingual", "domain")

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"```(?:\w+)?\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt. ``reference``: a good continuation;  ``check``: how an answer is judged (see ``passes``)."""

    id: str
    category: str
    language: str
    prompt: str
    reference: str
    check: Mapping[str, Any]
    max_bytes: int


def items(category: str | None = None) -> list[Item]:
    """All items, or those of a category. Raises UsageError for one that does not exist."""
    if category is not None and category not in CATEGORIES:
        raise UsageError(f"--category: expected one of {', '.join(CATEGORIES)}, got {category!r}")
    raw = tomllib.loads(files("gguf_fusion.battery").joinpath("items.toml").read_text(encoding="utf-8"))
    found = [
        Item(
            id=one["id"], category=one["category"], language=one.get("language", "en"), prompt=one["prompt"],
            reference=one["reference"], check=one["check"], max_bytes=one.get("max_bytes", 400),
        )
        for one in raw["items"]
    ]  # fmt: skip
    return [item for item in found if category in (None, item.category)]


def passes(item: Item, answer: str) -> bool:
    """Whether an answer passes the item's check.

    numeric: the last number in it is the value (within ``tolerance``); exact: it is one of ``accept``, but for blanks
    and case; choice: the first option named by its letter is the answer, or, where no letter is named, its text stands
    there and that of no other option; regex: the pattern is found; code: its tests run without an error in a process of
    their own with limits;
    constraints: words that must or must not stand there, and how many words it has.
    """
    check, text = item.check, answer.strip()
    if check["kind"] == "numeric":
        numbers = _NUMBER.findall(text)
        last = float(numbers[-1].replace(",", "")) if numbers else float("nan")
        return bool(abs(last - check["value"]) <= check.get("tolerance", 1e-9))
    if check["kind"] == "exact":
        return " ".join(text.lower().split()) in {" ".join(one.lower().split()) for one in check["accept"]}
    if check["kind"] == "choice":
        return bool(_chosen(text, check["options"]) == check["answer"])
    if check["kind"] == "regex":
        return re.search(check["pattern"], text) is not None
    if check["kind"] == "code":
        fenced = _FENCE.search(answer)
        return run_program((fenced[1] if fenced else answer) + "\n" + check["tests"] + "\n").passed
    words = len(text.split())
    return (
        all(one.lower() in text.lower() for one in check.get("contains", ()))
        and not any(one.lower() in text.lower() for one in check.get("absent", ()))
        and check.get("min_words", 0) <= words <= check.get("max_words", 10**9)
    )


def _chosen(text: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that an answer names, None where it names none or several texts.

    A letter counts before a sign or the end of a line, or after "answer", "option" or "choice": "A" is also a word.
    """
    letters = "".join(options)
    named = re.search(
        rf"(?:answer|option|choice)\W+(?:is\W+)?([{letters}])\b|(?<!\w)([{letters}])(?=\W*$|[).:,;*])",
        text,
        re.MULTILINE,
    )
    if named:
        return named[1] or named[2]
    said = [letter for letter, words in options.items() if words.lower() in text.lower()]
    return said[0] if len(said) == 1 else None
