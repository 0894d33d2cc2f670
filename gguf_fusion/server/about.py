"""Routes that tell what is served: health, models, properties, tokens, and what the experts read of a chat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI

from gguf_fusion import __version__
from gguf_fusion.chat import NO_TEMPLATE, as_messages
from gguf_fusion.config import nearest
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.experts.base import Expert
from gguf_fusion.expressions import listing
from gguf_fusion.preview import Preview, preview
from gguf_fusion.sampling import sampling_params
from gguf_fusion.server.bodies import ChatBody, DetokenizeBody, TokenizeBody
from gguf_fusion.server.errors import RefusedError
from gguf_fusion.server.service import Service

_Answer = TypeVar("_Answer")


class AboutRoutes:
    """Adds its routes to ``app``."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self._service = service
        for path in ("/health", "/v1/health"):
            app.get(path)(self.health)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.get("/props")(self.props)
        app.get("/tokenizer_info")(self.tokenizer_info)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        app.post("/apply-template")(self.apply_template)

    async def health(self) -> dict[str, str]:
        """200 once the models are loaded, 503 before."""
        _ = self._service.ensemble
        return {"status": "ok"}

    async def models(self) -> dict[str, Any]:
        """The one model: the ensemble."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        """The ensemble by its name."""
        self._service.check_model(name)
        return self._model()

    async def props(self) -> dict[str, Any]:
        """What a client may want to know beforehand."""
        ensemble = self._service.ensemble
        usual = sampling_params(ensemble.sampling)
        return {
            "default_generation_settings": {
                "n_ctx": min(expert.n_ctx for expert in ensemble.experts),
                "params": {
                    "temperature": usual.temperature,
                    "top_k": usual.top_k,
                    "top_p": usual.top_p,
                    "min_p": usual.min_p,
                    "repeat_penalty": usual.repeat_penalty,
                    "max_tokens": self._service.settings.max_tokens,
                },
            },
            "total_slots": 1,
            "model_alias": self._service.name,
            "chat_templates": self._templates(),
            "build_info": f"gguf-fusion {__version__}",
            "fusion": {
                **self._service.facts(),
                "piece_expert": ensemble.piece_expert,
                "symbols": "bytes" if ensemble.space.vocabulary is None else "tokens",
                "strategies": [
                    {"name": row.name, "kind": row.kind, "formula": row.formula, "parameters": dict(row.defaults)}
                    for row in listing()
                ],
            },
        }

    async def tokenizer_info(self) -> dict[str, Any]:
        """Special texts of the piece expert's vocabulary, as evaluation tools ask for them."""
        ensemble = self._service.ensemble
        expert = ensemble.heaviest()
        vocabulary = expert.vocabulary
        end = vocabulary.piece(int(vocabulary.end_ids[0])) if len(vocabulary.end_ids) else None
        bos = None if vocabulary.bos_id is None else vocabulary.piece(vocabulary.bos_id)
        return {
            "bos_token": None if bos is None else bos.decode("utf-8", "replace"),
            "eos_token": None if end is None else end.decode("utf-8", "replace"),
            "pad_token": None,
            "chat_template": self._templates()[expert.name],
        }

    def _templates(self) -> dict[str, str | None]:
        """Jinja templates by expert; None for one that reads a chat as plain text."""
        ensemble = self._service.ensemble
        pairs = zip(ensemble.names, ensemble.templates, strict=True)
        return {name: None if template == NO_TEMPLATE else template for name, template in pairs}

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a text, in the vocabulary of the piece expert or of ``expert``."""
        text = body.content if body.content is not None else body.prompt
        if text is None:
            raise RefusedError(400, "content: expected a text to tokenize, got none", param="content")
        data = text.encode()
        expert = self._expert(body.model, body.expert)
        found = await self._ask(lambda _: (expert.tokenize_template if body.parse_special else expert.tokenize)(data))
        ids: list[int] = found.tolist()
        vocabulary = expert.vocabulary
        if (body.add_special or body.add_special_tokens) and vocabulary.bos_id is not None:
            ids = [vocabulary.bos_id, *ids]
        tokens: list[Any] = list(ids)
        if body.with_pieces:
            tokens = [{"id": token, "piece": _piece(vocabulary.piece(token))} for token in ids]
        return {"tokens": tokens, "count": len(ids), "max_model_len": expert.n_ctx, "expert": expert.name}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids; what is no text, such as BOS, adds nothing."""
        expert = self._expert(body.model, body.expert)
        vocabulary = expert.vocabulary
        wrong = next((token for token in body.tokens if token >= vocabulary.n_vocab), None)
        if wrong is not None:
            raise RefusedError(
                400, f"tokens: expected ids of {expert.name!r}, 0…{vocabulary.n_vocab - 1}, got {wrong}", param="tokens"
            )
        text = vocabulary.text(np.array(body.tokens, np.int32)).decode("utf-8", "replace")
        return {"content": text, "prompt": text}

    async def apply_template(self, body: ChatBody) -> dict[str, Any]:
        """What each expert reads of a chat; nothing is written. ``prompt`` is the piece expert's."""
        ensemble = self._service.ensemble
        body.check_fields()
        self._service.check_model(body.model)
        messages = as_messages([message.message(i) for i, message in enumerate(body.messages)])

        def render(_: Ensemble) -> dict[str, Preview]:
            pairs = zip(ensemble.experts, ensemble.templates, strict=True)
            return {expert.name: preview(expert, own, messages, ensemble.plain_chat) for expert, own in pairs}

        found = await self._ask(render)
        told = {
            name: {
                "prompt": one.prompt,
                "tokens": len(one.ids),
                "control_tokens": one.n_control,
                "ends": one.end_tokens,
            }
            for name, one in found.items()
        }
        return {"prompt": found[ensemble.heaviest().name].prompt, "fusion": {"prompts": told}}

    def _expert(self, model: str | None, name: str | None) -> Expert:
        ensemble = self._service.ensemble
        self._service.check_model(model)
        if name is None:
            return ensemble.heaviest()
        if name not in ensemble.names:
            raise RefusedError(400, f"expert: unknown {name[:100]!r}{nearest(name, ensemble.names)}", param="expert")
        return ensemble.experts[ensemble.names.index(name)]

    async def _ask(self, function: Callable[[Ensemble], _Answer]) -> _Answer:
        return await asyncio.wrap_future(self._service.owner.call(function))

    def _model(self) -> dict[str, Any]:
        ensemble = self._service.ensemble
        experts = [
            {"name": expert.name, "weight": weight, "n_ctx": expert.n_ctx, "n_vocab": expert.vocabulary.n_vocab}
            for expert, weight in zip(ensemble.experts, ensemble.weights, strict=True)
        ]
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "gguf-fusion",
            "meta": {"experts": experts, "strategy": ensemble.strategy},
        }


def _piece(data: bytes) -> str | list[int]:
    """A piece as text, or its bytes where it is none, as llama-server does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
