"""Pieces of a streamed answer, gathered: each that crosses from the generator to the client costs three processes a millisecond."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from serving.answers.generation import Event, GenerateAnswer, TextDelta


async def paced(events: AsyncGenerator[Event, None], interval_s: float | None) -> AsyncGenerator[list[Event], None]:
    """What has come since the last list: the first text and the answer at once, text between them at most every `interval_s`.

    Closing it closes `events`; what `events` raises comes after what it gave before.

    Args:
        interval_s: None gives one list, at the end.
    """
    came: list[Event] = []
    news, over = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    came.append(event)
                    news.set()
                    if isinstance(event, GenerateAnswer):
                        over.set()
        finally:
            over.set()
            news.set()

    def taken() -> list[Event]:
        found = merged(came)
        came.clear()
        return found

    reading = asyncio.create_task(read())
    try:
        while not over.is_set():
            await (over if interval_s is None else news).wait()
            news.clear()
            batch = taken()
            if batch:
                yield batch
            if interval_s and any(isinstance(event, TextDelta) for event in batch):
                await _until(over, interval_s)
        if came:
            yield taken()
        await reading
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def _until(over: asyncio.Event, interval_s: float) -> None:
    try:
        async with asyncio.timeout(interval_s):
            await over.wait()
    except TimeoutError:
        pass


def merged(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of text of one channel made one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and event.channel == last.channel:
            logprobs = [*last.logprobs, *event.logprobs]
            found[-1] = TextDelta(channel=event.channel, text=last.text + event.text, logprobs=logprobs)
        else:
            found.append(event)
    return found
