"""Routes that write texts: chat completions and completions, whole or streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gguf_fusion.grammar import Grammar, Grammars
from gguf_fusion.sampling import sampling_params
from gguf_fusion.server.answers import Answer
from gguf_fusion.server.bodies import MAX_PROMPTS, Body, ChatBody, CompletionBody
from gguf_fusion.server.errors import RefusedError, refused
from gguf_fusion.server.listening import GoneError, listen, unless_gone
from gguf_fusion.server.metrics import Metrics
from gguf_fusion.server.service import Service
from gguf_fusion.server.writer import Began, Delta, Order, Prompt, Spent, write

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions."""

_TRACE_TOP = 5
"""Alternatives per piece under ``fusion``."""


class TextRoutes:
    """Adds its routes to ``app``."""

    def __init__(self, app: FastAPI, service: Service, metrics: Metrics | None) -> None:
        self._service = service
        self._metrics = metrics
        self._grammars: Grammars | None = None
        either: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
        app.post("/v1/chat/completions", responses=either)(self.chat)
        app.post("/v1/completions", responses=either)(self.completions)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """A chat completion."""
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        messages = [message.message(i) for i, message in enumerate(body.messages)]
        if body.top_logprobs is not None and not body.logprobs:
            raise RefusedError(400, "top_logprobs: expected logprobs: true with it", param="top_logprobs")
        n_top = (body.top_logprobs or 0) if body.logprobs else body.n_probs or None
        return await self._answer(request, body, [messages], limit, n_top, chat=True)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """A completion of a text or of several."""
        prompt = body.prompt
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts: Any = prompt if several else [prompt]
        limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        n_top = (body.n_probs or None) if body.logprobs is None else body.logprobs
        return await self._answer(request, body, prompts, limit, n_top, chat=False, echo=bool(body.echo))

    async def _answer(
        self,
        request: Request,
        body: Body,
        prompts: Sequence[Prompt],
        limit: int | None,
        n_top: int | None,
        *,
        chat: bool,
        echo: bool = False,
    ) -> Response:
        ensemble = self._service.ensemble
        body.check_fields()
        self._service.check_model(body.model)
        n = body.n or 1
        if n * len(prompts) > MAX_PROMPTS:
            raise RefusedError(400, f"n: expected at most {MAX_PROMPTS} texts, got {n * len(prompts)}", param="n")
        sampling = body.sampling(self._service.settings.max_tokens, limit)
        seed = body.first_seed()
        sampling_params({**ensemble.sampling, **sampling, "seed": seed})
        fusion = body.fusion
        weights = None if fusion is None else fusion.weights
        strategy = None if fusion is None else fusion.strategy
        trace = fusion is not None and fusion.trace
        facts = self._service.facts(strategy, weights)
        order = Order(
            prompts=prompts,
            chat=chat,
            n=n,
            sampling=sampling,
            seed=seed,
            weights=weights,
            strategy=strategy,
            grammar=await self._grammar(body),
            bias=body.bias(),
            n_top=max(n_top or 0, _TRACE_TOP if trace else 0),
            pieces=trace or n_top is not None,
            reuse=seed is None if body.cache_prompt is None else body.cache_prompt,
            echo=echo,
        )
        answer = Answer(
            chat=chat,
            model=self._service.name,
            n_choices=n * len(prompts),
            n_top=n_top,
            trace=trace,
            experts=ensemble.names,
            facts=facts,
        )
        events = self._events(order)
        try:
            if not body.stream:
                return JSONResponse(await unless_gone(request, _whole(events, answer)))
            first = await unless_gone(request, _until_began(events))
        except GoneError:
            return Response(status_code=499)
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return StreamingResponse(
            _stream(first, events, answer, include_usage=include_usage), media_type="text/event-stream"
        )

    async def _events(self, order: Order) -> AsyncGenerator[Any, None]:
        async with aclosing(listen(self._service.owner, partial(write, order))) as events:
            async for event in events:
                if isinstance(event, Spent) and self._metrics is not None:
                    self._metrics.count(event)
                yield event

    async def _grammar(self, body: Body) -> Grammar | None:
        wanted = body.grammar_source()
        if wanted is None:
            return None
        kind, source = wanted
        if self._grammars is None:
            self._grammars = await asyncio.to_thread(Grammars, self._service.ensemble.space)
        return await asyncio.to_thread(self._grammars.compile, kind, source)


async def _whole(events: AsyncGenerator[Any, None], answer: Answer) -> dict[str, Any]:
    deltas: list[Delta] = []
    spent = Spent()
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                deltas.append(event)
            elif isinstance(event, Began):
                answer.facts["seed"] = event.seed
            else:
                spent = event
    return answer.whole(deltas, spent)


async def _until_began(events: AsyncGenerator[Any, None]) -> list[Any]:
    """Events up to the one from which on there is something to stream: until then an error is a status."""
    found = []
    async for event in events:
        found.append(event)
        if isinstance(event, Began):
            break
    return found


async def _stream(
    first: Sequence[Any], events: AsyncGenerator[Any, None], answer: Answer, *, include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events, ``[DONE]`` at the end; an error that comes late is an event too."""
    async with aclosing(events):
        try:
            answer.facts["seed"] = next(event.seed for event in first if isinstance(event, Began))
            for chunk in answer.opening():
                yield _sse(chunk)
            for event in first:
                for chunk in answer.chunks(event) if isinstance(event, Delta) else ():
                    yield _sse(chunk)
            async for event in events:
                chunks = (
                    answer.chunks(event)
                    if isinstance(event, Delta)
                    else answer.closing(event, include_usage=include_usage)
                )
                for chunk in chunks:
                    yield _sse(chunk)
        except Exception as error:  # noqa: BLE001 (the status has been sent: the client is told in the stream)
            yield _sse(refused(error).body)
            return
    yield "data: [DONE]\n\n"


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
