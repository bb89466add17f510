"""One request on one model: messages to token ids, the attempts at an answer, and their events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from serving.answers.enforcement import attempts, is_wrong, opening_ids
from serving.answers.generation import Event, GenerateRequest, Started, TextDelta
from serving.answers.reading import Reader, language_report
from serving.engines.engine import Sampling
from serving.errors import RequestError
from serving.models.names import ModelSource
from serving.models.served import ServedModel
from training.data import is_longer
from training.errors import DataError
from training.harmony import with_reasoning_language
from training.language import language_name


async def answer(model: ServedModel, request: GenerateRequest, source: ModelSource) -> AsyncGenerator[Event, None]:
    """A start with the first token, text deltas as they become final, then the whole answer.

    Args:
        model: loaded; the base when `source` is an adapter.
        source: what answers carry as their model, and the adapter to answer with.

    Of an attempt that may be given up, the reasoning is held back until it is judged, which is when the answer begins.

    Raises:
        RequestError: see `render`.
        RequestError, OverloadedError, EngineError: see `Engine.generate`.
    """
    prompt_ids = await asyncio.to_thread(render, model, request)
    language = request.reasoning_language
    opening: list[int] = []
    if request.enforce == "prefill" and language:
        opening = opening_ids(model.renderer.tokenizer, language)
    asked = attempts(request)
    spent_tokens = 0
    for number, attempt in enumerate(asked, start=1):
        reader = Reader(model.renderer, source.name, attempt, prompt_ids, opening, number, spent_tokens)
        held: list[Event] = []
        kept = number == len(asked)
        async with aclosing(_attempt(model, source, attempt, prompt_ids + opening, reader)) as events:
            async for event in events:
                if isinstance(event, Started):
                    if number == 1:
                        yield event
                    continue
                held.append(event)
                if not kept and isinstance(event, TextDelta) and event.channel == "reasoning":
                    continue
                if not kept and is_wrong(await asyncio.to_thread(language_report, reader.reasoning, language)):
                    break
                kept = True
                for waiting in held:
                    yield waiting
                held = []
        if kept:
            return
        spent_tokens = reader.completion_tokens


async def _attempt(
    model: ServedModel, source: ModelSource, request: GenerateRequest, ids: list[int], reader: Reader
) -> AsyncGenerator[Event, None]:
    tokens = model.engine.generate(ids, sampling(model, request, len(ids)), source.adapter)
    async with aclosing(tokens) as chunks:
        first = True
        async for chunk in chunks:
            if first:
                first = False
                yield Started(model=source.name)
                for delta in reader.begin():
                    yield delta
            for delta in reader.feed(chunk):
                yield delta
            if reader.stopped:
                break
    for delta in reader.finish():
        yield delta
    yield await asyncio.to_thread(reader.whole)


def render(model: ServedModel, request: GenerateRequest) -> list[int]:
    """The prompt's token ids.

    Raises:
        RequestError: the messages cannot be rendered, or fill the context and leave no place for an answer.
    """
    messages, context = request.conversation(), model.engine.context_length
    field = "prompt" if request.messages is None else "messages"
    if request.reasoning_language:
        messages = with_reasoning_language(messages, language_name(request.reasoning_language))
    texts = [message["content"] for message in messages]  # what earlier turns thought is not rendered
    if not is_longer(model.renderer.tokenizer, texts, context):
        try:
            ids = model.renderer.prompt_ids(messages, reasoning_effort=request.reasoning_effort)
        except DataError as error:
            raise RequestError(error.message, hint=error.hint, field=field) from None
        if len(ids) < context:
            return ids
    raise RequestError(
        f"{field} of {sum(map(len, texts)):,} characters leave no place in the context of {context:,} tokens",
        hint="Shorten the conversation.",
        field=field,
    )


def sampling(model: ServedModel, request: GenerateRequest, prompt_tokens: int) -> Sampling:
    limit = request.max_new_tokens
    if "max_new_tokens" not in request.model_fields_set:  # our default, not the client's word: what fits will do
        limit = max(1, min(limit, model.engine.context_length - prompt_tokens))
    return Sampling(
        max_new_tokens=limit,
        stop_ids=model.stop_ids,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        top_logprobs=request.top_logprobs,
    )
