"""What kind of task a prompt is, and which experts suit it.

The classifier is a logistic regression on hashed byte 3-grams, fitted at first use in some milliseconds on the short
prompts below, after two rules: a code fence or a line that starts like a program means code; mostly other than ASCII
letters, or two languages named, means multilingual. It knows a handful of habits and no more; ``task=…`` overrides it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.config import nearest
from gguf_fusion.errors import UsageError

TASKS = ("factual", "reasoning", "math", "code", "creative", "instruction", "multilingual", "domain", "other")
"""Kinds of prompts; ``other`` leaves the weights as they are."""

ROLES: Mapping[str, tuple[str, ...]] = {
    "code": ("coder", "code"),
    "math": ("reasoner", "math"),
    "reasoning": ("reasoner",),
    "creative": ("prose", "chat"),
    "factual": ("chat",),
    "instruction": ("chat",),
    "multilingual": ("chat", "multilingual"),
    "domain": ("chat",),
}
"""Roles of the registry that suit a kind of task."""

_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "factual": (
        "What is the capital of Norway?", "Who wrote the opera Carmen?", "When did the Berlin Wall fall?",
        "How many moons does Mars have?", "Which river flows through Vienna?", "Where is the Gobi desert?",
        "Name the largest ocean.", "What is the boiling point of water at sea level?",
    ),
    "reasoning": (
        "If all roses are flowers and some flowers fade, must some roses fade?",
        "Tom is taller than Ann, Ann is taller than Bo. Who is the shortest?",
        "A farmer must cross a river with a wolf, a goat and a cabbage. How?",
        "Which one does not belong: apple, pear, carrot, plum? Explain why.",
        "Yesterday was two days before Friday. What day is tomorrow?",
        "Three switches control one lamp in another room. How do you find the right one?",
        "Think step by step: can both statements be true?", "What follows if the premise is false?",
    ),
    "math": (
        "What is 17 * 23?", "Solve 2x + 5 = 19 for x.", "Compute the derivative of x^3 + 2x.",
        "A train travels 180 km in 2 hours. What is its average speed?", "What is 15 percent of 240?",
        "Find the area of a circle with radius 4.", "Prove that the square root of 2 is irrational.",
        "How many ways are there to choose 3 of 8 books?",
    ),
    "code": (
        "Write a Python function that reverses a list.", "Fix this bug: for (int i = 0; i <= n; i++)",
        "Implement binary search in C++.", "Explain what this SQL query does: SELECT name FROM users WHERE age > 30;",
        "Write a regular expression that matches dates.", "How do I merge two branches with git?",
        "Create a class Stack with push and pop methods.", "def fibonacci(n):",
    ),
    "creative": (
        "Write a short poem about autumn rain.", "Tell me a story about a lonely lighthouse keeper.",
        "Invent a name for a cafe run by cats.", "Continue the tale: The door opened by itself, and",
        "Compose a song about the sea.", "Describe a city on the back of a giant turtle.",
        "Write a dialogue between the sun and the moon.", "Make up a myth that explains thunder.",
    ),
    "instruction": (
        "Summarize the following text in two sentences.", "Rewrite this paragraph in a formal tone.",
        "List five tips for better sleep as bullet points.", "Give me a recipe for pancakes.",
        "Write an email that declines an invitation politely.", "Correct the spelling of this sentence.",
        "Turn these notes into a table.", "Plan a three day trip to Rome.",
    ),
    "multilingual": (
        "Translate to French: Where is the station?", "Wie heißt die Hauptstadt von Österreich?",
        "¿Cuál es la capital de Chile?", "Comment dit-on merci en japonais?",
        "Übersetze ins Englische: Der Hund schläft.", "Qual è la differenza tra ser e estar?",
        "Translate this sentence into German and Spanish.", "Напиши короткое приветствие.",
    ),
    "domain": (
        "What are the side effects of ibuprofen?", "Explain the difference between civil and criminal law.",
        "How does a heat pump work?", "What caused the fall of the Roman Republic?",
        "Describe the function of the mitral valve.", "What is consideration in contract law?",
        "Why do bridges need expansion joints?", "How is type 2 diabetes treated?",
    ),
}  # fmt: skip

_N_FEATURES = 512
_ROUNDS = 60
_RATE = 2.0
_DECAY = 1e-3
_CODE = re.compile(
    rb"```|^\s*(?:def |class |import |from \w+ import|#include|public |function |const |SELECT )", re.MULTILINE
)


def classify(text: bytes) -> dict[str, float]:
    """Probability of each kind of task for a prompt; no text, or text of nothing known, is ``other``."""
    if not text.strip():
        return {"other": 1.0}
    if _CODE.search(text):
        return {"code": 1.0}
    if sum(byte >= 0x80 for byte in text) > 0.15 * len(text):
        return {"multilingual": 1.0}
    weights, bias = _fitted()
    chances = _softmax(_features(text)[None] @ weights + bias)[0]
    return dict(zip(_PROMPTS, chances.tolist(), strict=True))


def checked_task(task: str) -> str:
    """The task; raises UsageError for one that does not exist, with the nearest."""
    if task and task not in TASKS:
        raise UsageError(f"task: expected {', '.join(TASKS)}, got {task!r}{nearest(task, TASKS)}")
    return task


def role_weights(chances: Mapping[str, float], roles: Sequence[str], base: F64, share: float) -> F64:
    """float64[n], sum 1: Σ_c π(c) W[c]; W[c] gives ``share`` to the experts whose role suits c, the rest to the others.

    Where no expert suits, or all do, the base weights stay.
    """
    total = np.zeros(len(base))
    for task, chance in chances.items():
        suits = np.array([role in ROLES.get(task, ()) for role in roles])
        if suits.any() and not suits.all():
            theirs = max(share, float(base[suits].sum()))  # suiting the task never costs weight
            part = np.where(suits, theirs * base / base[suits].sum(), (1.0 - theirs) * base / base[~suits].sum())
        else:
            part = base
        total += chance * part
    weights: F64 = total / total.sum()
    return weights


def _features(text: bytes) -> F64:
    """float64[n]: counts of hashed byte 3-grams of the first kilobyte, in lower case, scaled to length 1."""
    data = np.frombuffer(b"  " + text[:1024].lower() + b" ", np.uint8).astype(np.uint32)
    hashed = (data[:-2] * np.uint32(7919) + data[1:-1] * np.uint32(104729) + data[2:] * np.uint32(31)) % _N_FEATURES
    counts = np.bincount(hashed, minlength=_N_FEATURES).astype(np.float64)
    scaled: F64 = counts / np.sqrt((counts**2).sum())
    return scaled


@cache
def _fitted() -> tuple[F64, F64]:
    """(float64[n_features, n_tasks], float64[n_tasks]) by gradient descent with momentum on the prompts above."""
    labels = [i for i, prompts in enumerate(_PROMPTS.values()) for _ in prompts]
    x = np.stack([_features(prompt.encode()) for prompts in _PROMPTS.values() for prompt in prompts])
    wanted = np.eye(len(_PROMPTS))[labels]
    weights, bias = np.zeros((_N_FEATURES, len(_PROMPTS))), np.zeros(len(_PROMPTS))
    speed = np.zeros_like(weights)
    for _ in range(_ROUNDS):
        error = (_softmax(x @ weights + bias) - wanted) / len(x)
        speed = 0.9 * speed - _RATE * (x.T @ error + _DECAY * weights)
        weights += speed
        bias -= _RATE * error.sum(axis=0)
    return weights, bias


def _softmax(logits: F64) -> F64:
    raw = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances: F64 = raw / raw.sum(axis=1, keepdims=True)
    return chances
