"""`POST /generate`, `GET` and `PUT /deployment`. Loads without torch."""

import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serving.answers.generation import Event, GenerateAnswer, GenerateRequest, Started, TextDelta
from serving.deployment import Deployment, DeployRequest
from serving.engines.engine import EngineError
from serving.routes.disconnects import ClientGone, EventStream, first, until_disconnect
from serving.routes.streams import sse
from training.errors import PolythinkError

log = logging.getLogger(__name__)


class AnswersRequests(Protocol):
    """A `serving.generator.Generator`, in this process or behind a Serve handle."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]: ...

    async def deployment(self) -> Deployment: ...

    async def deploy(self, request: DeployRequest) -> Deployment: ...

    async def models(self) -> list[str]: ...


def generate_router(generator: AnswersRequests) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/generate", response_model=GenerateAnswer)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Reasoning and answer apart, and the language that the reasoning was in."""
        events = until_disconnect(request.receive, generator.generate(body))
        try:
            start = await first(events)
            if body.stream:
                return EventStream(_as_sse(events), timing_headers(start))
            answers = [event async for event in events if isinstance(event, GenerateAnswer)]
        except ClientGone:
            return Response(status_code=499)
        return JSONResponse(answers[-1].model_dump(mode="json"), headers=timing_headers(start))

    @router.get("/deployment")
    async def deployment() -> Deployment:
        """How the generator is: which model answers requests that name none."""
        return await generator.deployment()

    @router.put("/deployment", status_code=202)
    async def deploy(body: DeployRequest) -> Deployment:
        """Loads a model in the background and switches to it once it has generated a token."""
        return await generator.deploy(body)

    return router


def timing_headers(start: Any) -> dict[str, str]:
    """Where the time to the first token went, as browsers and proxies read it (W3C Server-Timing, milliseconds)."""
    if not isinstance(start, Started):
        return {}
    parts = {"replica": start.replica_s, "load": start.load_s, "first-token": start.first_token_s}
    return {"Server-Timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in parts.items())}


async def _as_sse(events: AsyncGenerator[Event, None]) -> AsyncGenerator[str, None]:
    try:
        async for event in events:
            if isinstance(event, TextDelta):
                yield sse(event.channel, {"text": event.text})
            elif isinstance(event, GenerateAnswer):
                yield sse("done", event.model_dump(mode="json"))
    except ClientGone:
        raise
    except Exception as error:  # the status is sent already: the stream itself must tell
        yield sse("error", {"error": told(error).as_dict()})


def told(error: Exception) -> PolythinkError:
    """`error` in a form for people; one that nobody expected goes to the log as well."""
    if isinstance(error, PolythinkError):
        return error
    log.error("generation failed", exc_info=error)
    return EngineError(f"{type(error).__name__}: {error}", hint="The service's log has the traceback.")
