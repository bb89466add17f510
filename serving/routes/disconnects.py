"""Streams that end when their client does: a model must not go on for nobody."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The connection was closed before the answer was ready; nobody reads what would be sent."""


async def until_disconnect(receive: Receive, source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The items of `source`; when the client is gone, closes `source` at once.

    The body must have been read: the next message that `receive` gives is then the disconnect.

    Raises:
        ClientGone: the client has closed the connection.
    """
    gone = asyncio.create_task(_disconnect(receive))
    try:
        while True:
            item = asyncio.create_task(_next(source))
            try:
                await asyncio.wait({item, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    raise ClientGone
            finally:
                await _end(item)
            result = item.result()
            if result is None:
                return
            yield result
    finally:
        await _end(gone)
        await source.aclose()


async def _next(source: AsyncGenerator[T, None]) -> T | None:
    return await anext(source, None)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: "asyncio.Task[Any]") -> None:
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def first(items: AsyncGenerator[T, None]) -> T:
    """The first item: errors until then become a status code instead of an event in a stream of status 200."""
    async for item in items:
        return item
    raise ClientGone


class EventStream(Response):
    """Server-sent events as they come. `events` must end by itself when the client is gone (`until_disconnect`).

    Starlette's own StreamingResponse waits for the disconnect too, and only one of two waiters would be told.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], headers: Mapping[str, str] = {}):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(ClientGone):
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
