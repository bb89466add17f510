"""OpenAI's `/v1/chat/completions` and `/v1/models`, with errors in OpenAI's form. Loads without torch."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from serving.answers.generation import Event, GenerateAnswer, ScoredToken, Started, TextDelta
from serving.errors import error_headers, request_error, status_code_of, unreadable
from serving.routes.disconnects import ClientGone, EventStream, first, until_disconnect
from serving.routes.generate import AnswersRequests, timing_headers, told
from serving.routes.openai_schemas import DEFAULT_MODEL, ChatRequest
from training.errors import PolythinkError

T = TypeVar("T")


def openai_router(generator: AnswersRequests) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers with `reasoning_content` (and `reasoning`, the same) beside `content`."""
        choices = merge([generator.generate(choice) for choice in body.requests()])
        events = until_disconnect(request.receive, choices)
        completion = Completion(body)
        try:
            _, start = await first(events)
            if body.stream:
                return EventStream(completion.stream(events), timing_headers(start))
            answers = {index: event async for index, event in events if isinstance(event, GenerateAnswer)}
        except ClientGone:
            return Response(status_code=499)
        except PolythinkError as error:
            error.field = {"max_new_tokens": body.limit_field}.get(error.field or "", error.field)
            raise
        return JSONResponse(
            completion.whole([answers[index] for index in range(len(answers))]), headers=timing_headers(start)
        )

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """`default` is whichever model is deployed; the others can be named as well."""
        names = [DEFAULT_MODEL, *await generator.models()]
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": 0, "owned_by": "polythink"} for name in names],
        }

    return router


class Completion:
    """The answers of one request in OpenAI's form."""

    def __init__(self, body: ChatRequest):
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._with_logprobs = bool(body.logprobs)

    def whole(self, answers: Sequence[GenerateAnswer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            message = {
                "role": "assistant",
                "content": answer.answer,
                "reasoning_content": answer.reasoning,
                "reasoning": answer.reasoning,
                "refusal": None,
            }
            choices.append(
                self._ended(index, answer) | {"message": message, "logprobs": self._logprobs(answer.logprobs)}
            )
        head = self._head | {"object": "chat.completion", "model": answers[0].model}
        return head | {"choices": choices, "usage": _usage(answers)}

    async def stream(self, events: AsyncGenerator[tuple[int, Event], None]) -> AsyncGenerator[str, None]:
        """Chunks as server-sent events, ended by `[DONE]`."""
        answers: list[GenerateAnswer] = []
        begun: set[int] = set()
        try:
            async for index, event in events:
                if isinstance(event, Started):
                    continue
                if index not in begun:
                    begun.add(index)
                    yield self._chunk([_delta(index, {"role": "assistant", "content": ""})])
                if isinstance(event, GenerateAnswer):
                    answers.append(event)
                    yield self._chunk([self._ended(index, event) | {"delta": {}}])
                else:
                    yield self._chunk([_delta(index, _text(event)) | {"logprobs": self._logprobs(event.logprobs)}])
            if self._with_usage:
                yield self._chunk([], usage=_usage(answers))
        except ClientGone:
            raise
        except Exception as error:  # the status is sent already: the stream itself must tell
            yield f"data: {json.dumps(error_form(told(error)), ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"

    def _ended(self, index: int, answer: GenerateAnswer) -> dict[str, Any]:
        """What the end of a choice tells, whole or streamed; the language verdict and warnings are ours."""
        return {
            "index": index,
            "finish_reason": answer.finish_reason,
            "reasoning_language": answer.reasoning_language.model_dump(),
            "warnings": answer.warnings,
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        chunk = self._head | {"object": "chat.completion.chunk", "choices": choices}
        if self._with_usage:
            chunk["usage"] = usage
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {
            "content": [
                _scored(token.token, token.logprob) | {"top_logprobs": [_scored(*other) for other in token.top]}
                for token in tokens
            ],
            "refusal": None,
        }


def _scored(token: str, logprob: float) -> dict[str, Any]:
    whole = "�" not in token  # a part of a character has no text of its own
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()) if whole else None}


def _usage(answers: Sequence[GenerateAnswer]) -> dict[str, int]:
    prompt = answers[0].usage.prompt_tokens
    completion = sum(answer.usage.completion_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _delta(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None}


def _text(event: TextDelta) -> dict[str, str]:
    if event.channel == "answer":
        return {"content": event.text}
    return {"reasoning_content": event.text, "reasoning": event.text}


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all `sources` as they come, each with its source's index. The first failure ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(index, source, queue)) for index, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                running -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, source: AsyncGenerator[T, None], queue: "asyncio.Queue[Any]") -> None:
    try:
        async with aclosing(source) as items:
            async for item in items:
                queue.put_nowait((index, item))
        queue.put_nowait(None)
    except Exception as error:  # travels to the one who reads the queue, and is raised there
        queue.put_nowait(error)


class OpenAIRoute(APIRoute):
    """Answers errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                known = {"body": list(ChatRequest.model_fields)}
                return error_response(request_error(error.errors(), known))
            except PolythinkError as error:
                return error_response(error)
            except HTTPException as error:
                if error.status_code == 400:
                    return error_response(unreadable(error))
                return JSONResponse(_form(str(error.detail), error.status_code), error.status_code, error.headers)

        return handle


def error_response(error: PolythinkError) -> JSONResponse:
    return JSONResponse(error_form(error), _status(error), error_headers(error))


def error_form(error: PolythinkError) -> dict[str, Any]:
    message = f"{error.message}. {error.hint}" if error.hint else error.message
    return _form(message, _status(error), error.field, type(error).__name__)


def _status(error: PolythinkError) -> int:
    status = status_code_of(error)
    return 400 if status == 422 else status  # OpenAI's word for a faulty request


def _form(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 503: "overloaded_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
