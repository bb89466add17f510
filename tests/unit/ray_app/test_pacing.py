"""Pieces of a streamed answer are gathered: none is lost, none comes late, and whoever leaves ends the generation."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from ray_app.generator.pacing import merged, paced
from serving.answers.generation import (
    Enforcement,
    Event,
    GenerateAnswer,
    LanguageReport,
    ScoredToken,
    Started,
    TextDelta,
    Usage,
)
from serving.engines.engine import EngineError

STARTED = Started(model="a model")
ANSWER = GenerateAnswer(
    reasoning="", answer="abc", reasoning_language=LanguageReport(requested=None, detected=None, matches=None, share=None),
    finish_reason="stop", enforcement=Enforcement(mode="none"), usage=Usage(prompt_tokens=1, completion_tokens=3), model="a model",
)  # fmt: skip
NEVER_S = 3600.0


def text(piece: str) -> TextDelta:
    return TextDelta(channel="answer", text=piece)


def lists_of(events: Callable[[], AsyncGenerator[Event, None]], interval_s: float | None) -> list[list[Event]]:
    async def collect() -> list[list[Event]]:
        return [batch async for batch in paced(events(), interval_s)]

    return asyncio.run(asyncio.wait_for(collect(), 60))


async def spoken() -> AsyncGenerator[Event, None]:
    """A start with its first piece, then two pieces and the answer, each on a turn of its own."""
    yield STARTED
    yield text("a")
    for event in (text("b"), text("c"), ANSWER):
        await asyncio.sleep(0.01)
        yield event


def test_the_first_piece_and_the_answer_wait_for_nothing() -> None:
    assert lists_of(spoken, NEVER_S) == [[STARTED, text("a")], [text("bc"), ANSWER]]


def test_without_an_interval_each_piece_comes_by_itself() -> None:
    assert lists_of(spoken, 0) == [[STARTED, text("a")], [text("b")], [text("c")], [ANSWER]]


def test_who_does_not_stream_gets_one_list() -> None:
    assert lists_of(spoken, None) == [[STARTED, text("abc"), ANSWER]]


@pytest.mark.parametrize("interval_s", [0, NEVER_S, None])
def test_an_error_comes_after_what_came_before_it(interval_s: float | None) -> None:
    async def failing() -> AsyncGenerator[Event, None]:
        yield STARTED
        yield text("a")
        await asyncio.sleep(0.01)
        yield text("b")
        raise EngineError("the model failed")

    found: list[Event] = []

    async def collect() -> None:
        async for batch in paced(failing(), interval_s):
            found.extend(batch)

    with pytest.raises(EngineError, match="the model failed"):
        asyncio.run(asyncio.wait_for(collect(), 60))
    assert merged(found) == [STARTED, text("ab")]


def test_who_leaves_ends_the_generation() -> None:
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[Event, None]:
        try:
            while True:
                yield text("a")
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    async def leave() -> None:
        async with aclosing(paced(endless(), NEVER_S)) as lists:
            async for _ in lists:
                break
        assert ended.is_set()

    asyncio.run(asyncio.wait_for(leave(), 60))


def test_merged_keeps_channels_order_and_scores() -> None:
    scores = [ScoredToken(token=token, logprob=-1.0) for token in "ab"]
    pieces = [
        TextDelta(channel="reasoning", text="x"),
        TextDelta(channel="answer", text="a", logprobs=scores[:1]),
        TextDelta(channel="answer", text="b", logprobs=scores[1:]),
        TextDelta(channel="reasoning", text="y"),
    ]
    assert merged(pieces) == [pieces[0], TextDelta(channel="answer", text="ab", logprobs=scores), pieces[3]]
