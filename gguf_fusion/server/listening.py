"""From the owner's thread to a client: events as they come, and an end to the work when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from starlette.requests import Request

from gguf_fusion.ensemble import Ensemble
from gguf_fusion.server.owner import Job, Owner

_Result = TypeVar("_Result")


class GoneError(Exception):
    """The client has closed the connection."""


async def listen(owner: Owner, events: Callable[[Ensemble, Job], Iterator[Any]]) -> AsyncGenerator[Any, None]:
    """The events of a new job. Leaving it early, by an error or by cancelling, ends the job within a step.

    Raises what ``Owner.submit`` raises, and what the job raised.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Any] = asyncio.Queue()

    def send(event: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, event)

    job = Job(events, send)
    owner.submit(job)
    try:
        while (event := await queue.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event
    finally:
        owner.cancel(job)


async def unless_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of ``work``; it is cancelled, and GoneError raised, as soon as the client closes the connection."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_closed(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _closed(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
