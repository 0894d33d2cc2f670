"""The head: a linear map from the router's hidden state (and a few features) to expert weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_fusion.arrays import F64
from gguf_fusion.errors import MissingExtraError, ModelFileError

FORMAT = "gguf-fusion router 1"

EXTRAS = ("since", "entropy", "agreement", "running")
"""Features beside the hidden state: bytes since it was read (ln(1 + n)), each expert's entropy in bits, whether all
experts' first choices agree, each expert's recent bits per byte."""

RUNNING = 0.97
"""Forgetting of the running bits per byte."""


def extras_size(names: Sequence[str], n_experts: int) -> int:
    """How many numbers the named extra features are."""
    return sum(n_experts if name in ("entropy", "running") else 1 for name in names)


@dataclass(frozen=True, slots=True)
class Head:
    """log π = λ log π_router + log π_I, I = argmax ω (hard), or + Σ ω_i log π_i (soft); ω = softmax(W h + c).

    experts : names in the order of the rows of ``w``;  router : name of the router expert, ``router_sha256`` its file
    w, c    : float64[n_experts, n_features], float64[n_experts]
    mean, scale : float64[n_features], features are standardised by them
    lam     : weight λ >= 0 of the router's own law;  hard : which form is used by default
    extras  : names of features beside the hidden state;  card : where it comes from and how well it does
    """

    experts: tuple[str, ...]
    router: str
    router_sha256: str
    w: F64
    c: F64
    mean: F64
    scale: F64
    lam: float
    hard: bool = True
    extras: tuple[str, ...] = ()
    card: Mapping[str, Any] = field(default_factory=dict)

    def weights(self, features: F64) -> F64:
        """float64[n, n_experts], rows sum to 1, for float64[n, n_features] raw features."""
        return softmax((features - self.mean) / self.scale @ self.w.T + self.c)

    def save(self, path: Path) -> None:
        """Write safetensors with everything else as JSON metadata, by one rename."""
        try:
            from safetensors.numpy import save
        except ImportError:
            raise MissingExtraError("safetensors", "discover") from None

        about = {
            "experts": self.experts, "router": self.router, "router_sha256": self.router_sha256, "lam": self.lam,
            "hard": self.hard, "extras": self.extras, "card": self.card,
        }  # fmt: skip
        tensors = {"w": self.w, "c": self.c, "mean": self.mean, "scale": self.scale}
        raw = save(
            {k: np.ascontiguousarray(v) for k, v in tensors.items()}, {"format": FORMAT, "about": json.dumps(about)}
        )
        partial = path.with_name(path.name + ".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(raw)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Head:
        """Read what ``save`` wrote; raises ModelFileError for anything else."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise MissingExtraError("safetensors", "discover") from None

        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name).astype(np.float64) for name in ("w", "c", "mean", "scale")}
            if metadata.get("format") != FORMAT:
                raise ModelFileError(
                    f"{path}: expected a router of the form {FORMAT!r}, got {metadata.get('format')!r}"
                )
            about = json.loads(metadata["about"])
            head = cls(
                experts=tuple(about["experts"]), router=about["router"], router_sha256=about["router_sha256"],
                lam=float(about["lam"]), hard=bool(about["hard"]), extras=tuple(about["extras"]), card=about["card"],
                **tensors,
            )  # fmt: skip
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{path}: expected a router written by 'gguf-fusion router train' ({error})") from None
        n, n_features = len(head.experts), len(head.mean)
        if head.w.shape != (n, n_features) or head.c.shape != (n,) or head.scale.shape != (n_features,):
            raise ModelFileError(f"{path}: its tensors do not fit one another; train the router again")
        return head


def softmax(logits: F64) -> F64:
    """float64[n, k], rows sum to 1."""
    raw = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights: F64 = raw / raw.sum(axis=1, keepdims=True)
    return weights


def entropies(logprobs: F64) -> F64:
    """float64[...] in bits, of float64[..., n_symbols] natural logs."""
    finite = np.where(np.isneginf(logprobs), 0.0, logprobs)
    bits: F64 = -(np.exp(logprobs) * finite).sum(axis=-1) / np.log(2.0)
    return bits


def features(
    extras: Sequence[str],
    hidden: NDArray[Any],
    since: NDArray[Any],
    laws: NDArray[Any],
    running: F64,
) -> F64:
    """float64[n, n_features]: the hidden states and the named extra features.

    hidden : [n, n_embd];  since : [n], bytes since the hidden state was read
    laws   : [n, n_experts, n_symbols], natural logs;  running : float64[n, n_experts], recent bits per byte
    """
    parts = [np.asarray(hidden, np.float64)]
    for name in extras:
        if name == "since":
            parts.append(np.log1p(np.asarray(since, np.float64))[:, None])
        elif name == "entropy":
            parts.append(entropies(np.asarray(laws, np.float64)))
        elif name == "agreement":
            first = np.asarray(laws).argmax(axis=2)
            parts.append((first == first[:, :1]).all(axis=1).astype(np.float64)[:, None])
        else:
            parts.append(running)
    return np.concatenate(parts, axis=1)


def fused(head_weights: F64, lam: float, laws: F64, router: F64, *, hard: bool) -> F64:
    """float64[n, n_symbols], normalised natural logs of the routed law.

    head_weights : float64[n, n_experts];  laws : float64[n, n_experts, n_symbols];  router : float64[n, n_symbols]
    """
    if hard:
        chosen = head_weights.argmax(axis=1)
        logs = laws[np.arange(len(laws)), chosen]
    else:
        # A symbol that a lightly weighted expert rules out is ruled out: log-linear, as in the paper.
        kept = head_weights[:, :, None] > 0.0
        logs = np.where(kept, head_weights[:, :, None] * np.where(kept, laws, 0.0), 0.0).sum(axis=1)
    if lam:
        logs = logs + lam * router
    top = logs.max(axis=1, keepdims=True)
    law: F64 = logs - top - np.log(np.exp(logs - top).sum(axis=1, keepdims=True))
    return law
