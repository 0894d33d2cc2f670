"""The harness's model class for an ensemble; needs the extra ``eval``.

Importing this module registers the model ``gguf-fusion``; its arguments are those of ``Ensemble.from_registry``, the
name as ``ensemble``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from gguf_fusion.chat import Message, utf8
from gguf_fusion.config import DEFAULT_ENSEMBLE, check_known
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.harness.scoring import continuation, document, require_bytes, shortened

_Answer = TypeVar("_Answer")

_CHAT = "\ue000chat\ue001"
"""Marks a context that holds messages as JSON: every expert has a template of its own."""

_MAX_GEN_TOKS = 256
"""The harness's own default."""

_GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p", "seed"}


@register_model("gguf-fusion")
class FusionLM(LM):  # type: ignore[misc]  # the harness has no types
    """Answers the harness's three kinds of requests with the fused law over bytes.

    Requests are worked on in the order of their contexts, so that one that begins like another is not read twice; the
    answers come in the order of the requests. They are those of single calls, within rounding.
    """

    def __init__(
        self,
        ensemble: Ensemble | str = DEFAULT_ENSEMBLE,
        *,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        """``batch_size`` and ``device`` are taken because the harness hands them on; they have no meaning here.

        Raises UsageError for an ensemble over tokens, and what ``Ensemble.from_registry`` raises.
        """
        super().__init__()
        if isinstance(ensemble, str):
            ensemble = Ensemble.from_registry(ensemble, space="byte", **options)
        require_bytes(ensemble)
        self.ensemble = ensemble

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(ln f(continuation | context), whether it is what greedy decoding would write) of every request."""

        def answer(request: tuple[str, str]) -> tuple[float, bool]:
            context, begun = self._unpacked(request[0])
            return continuation(self.ensemble, context, utf8(request[1]), begun)

        return self._answers("loglikelihood", requests, answer, quiet=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln f of every document."""
        return self._answers(
            "loglikelihood_rolling",
            requests,
            lambda request: document(self.ensemble, utf8(request[0])),
            quiet=disable_tqdm,
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The texts written after every context, up to a stop string that is no part of them."""
        return self._answers("generate_until", requests, lambda request: self._generated(*request), quiet=disable_tqdm)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as they are: each expert reads them in its own format."""
        return _CHAT + json.dumps(chat_history, ensure_ascii=False)

    @property
    def tokenizer_name(self) -> str:
        """What the harness tells cached requests apart by."""
        return "gguf-fusion-" + "-".join(self.ensemble.names)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Each expert's own template, as JSON."""
        return json.dumps(dict(zip(self.ensemble.names, self.ensemble.templates, strict=True)))

    def _generated(self, context: str, options: dict[str, Any]) -> str:
        check_known("generation option", options, dict.fromkeys(_GENERATION))
        stop = options.get("until") or []
        n = int(options.get("max_gen_toks", _MAX_GEN_TOKS))
        sampling: dict[str, Any] = {
            name: options[name] for name in ("top_k", "top_p", "min_p", "seed") if name in options
        }
        sampled = options.get("do_sample", bool(options.get("temperature")))
        prompt, begun = self._unpacked(context)
        if isinstance(prompt, bytes):
            prompt = shortened(self.ensemble.experts, prompt, n_more=n)
        reply = self.ensemble.generate(
            prompt,
            given=begun,
            stop=[text for text in ([stop] if isinstance(stop, str) else stop) if text],
            max_tokens=n,
            temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
            reuse=True,
            **sampling,
        )
        return "".join(step.text for step in reply)

    def _unpacked(self, context: str) -> tuple[bytes | list[Message], bytes]:
        """(a text or messages, how the answer to the messages begins)."""
        if not context.startswith(_CHAT):
            return utf8(context), b""
        messages, end = json.JSONDecoder().raw_decode(context, len(_CHAT))
        begun = context[end:]
        if messages[-1]["role"] == "assistant":
            begun = messages.pop()["content"] + begun
        return messages, utf8(begun)

    def _answers(
        self, kind: str, requests: list[Instance], answer: Callable[[Any], _Answer], *, quiet: bool
    ) -> list[_Answer]:
        found: dict[int, _Answer] = {}
        order = sorted(range(len(requests)), key=lambda i: requests[i].args[0])
        for i in tqdm(order, desc=kind, disable=quiet or None, leave=False):
            found[i] = answer(requests[i].args)
            self.cache_hook.add_partial(kind, requests[i].args, found[i])
        return [found[i] for i in range(len(requests))]
