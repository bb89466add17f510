"""Which model answers: the one a request names, else the deployed one, else the newest that a job made."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from serving.answers.answering import answer
from serving.answers.generation import Event, GenerateAnswer, GenerateRequest, Started, TextDelta
from serving.answers.measures import Measured, Stopwatch
from serving.deployment import NEWEST, Deployment, DeployRequest, read_choice, write_choice
from serving.engines.engine import OverloadedError
from serving.errors import RequestError, UnavailableError
from serving.models.names import REGISTERED, ModelNames, ModelSource, names_of_jobs
from serving.models.pool import ModelPool
from serving.models.served import ServedModel
from training.errors import PolythinkError

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Pause between two looks at which model is chosen and which job is the newest."""
RETRY_FAILED_S = 30.0
"""A model that could not be loaded is not tried again by itself before that."""


class RequestTimeoutError(RequestError):
    """The answer was not ready in the time that a request may take."""

    status_code = 504


@dataclass(frozen=True)
class Target:
    """A model that is to answer, and the request that chose it."""

    source: ModelSource
    chosen: DeployRequest


@dataclass(frozen=True)
class Failure:
    """Why what was chosen does not answer."""

    reason: str
    target: Target | None = None
    at: float = field(default_factory=time.monotonic)


class Generator:
    """Answers requests and switches models while it does. Used from one event loop.

    Args:
        names: finds models.
        load: loads one, with a first token generated.
        fits: whether there is memory for one beside those that are loaded.
        state_file: keeps the chosen deployment over restarts.
        max_models: models in memory at once.
        load_timeout_s: longest that a request waits for its model.
        request_timeout_s: longest that an answer may take once its model is there.
        observe: is told what every request cost.
    """

    def __init__(
        self,
        names: ModelNames,
        load: Callable[[ModelSource], ServedModel],
        *,
        fits: Callable[[ModelSource], bool] = lambda source: True,
        state_file: Path,
        max_models: int = 2,
        load_timeout_s: float = 600,
        request_timeout_s: float = 600,
        observe: Callable[[Measured], None] = lambda measured: None,
    ):
        self._names = names
        self._pool = ModelPool(load, fits=fits, capacity=max_models, load_timeout_s=load_timeout_s)
        self._state_file = state_file
        self._load_timeout_s = load_timeout_s
        self._request_timeout_s = request_timeout_s
        self._observe = observe
        self._registry_threads = ThreadPoolExecutor(4, "registry")
        self._looked_at = -LOOK_S
        self._looking: asyncio.Task[None] | None = None
        self._current: Target | None = None
        self._switch: asyncio.Task[None] | None = None
        self._next: Target | None = None
        self._announced = False  # whether `_next` was asked for here, rather than found in the file
        self._failure: Failure | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """A start, text deltas when `request.stream`, and the answer.

        Raises:
            RequestError, NotFoundError: the request, or the model it names.
            UnavailableError: no model is there, or it did not load in time.
            OverloadedError: too many requests wait.
            RequestTimeoutError: the answer took too long.
            EngineError: the model failed.
        """
        clock = Stopwatch()
        try:
            source = await (self._default() if request.model is None else self._named(request.model))
            async with self._pool.lease(source) as model, aclosing(answer(model, request, source)) as events:
                clock.loaded()
                async for event in _in_time(events, self._request_timeout_s):
                    if isinstance(event, Started):
                        event = clock.started(event)
                    if request.stream or not isinstance(event, TextDelta):
                        yield event
                    if isinstance(event, GenerateAnswer):
                        self._observe(clock.measured(event))
        except PolythinkError as error:
            self._observe(clock.failed(error))
            raise

    async def deploy(self, request: DeployRequest) -> Deployment:
        """Starts to load a model that is to answer from then on; the one before answers until then, and stays on failure.

        Raises:
            RequestError, NotFoundError: there is no such model.
        """
        target = await self._target(request)
        self._failure = None
        self._switch_to(target, announce=True)
        return await self.deployment()

    async def deployment(self) -> Deployment:
        """What answers requests that name no model."""
        target = self._current or self._next
        reason = self._failure and self._failure.reason
        if target is None:
            try:
                target = await self._chosen()
            except PolythinkError as error:
                return Deployment(state="empty", model=None, reason=reason or error.message, loaded=self._pool.names)
        return Deployment(
            state=self._state(),
            model=target.source.name,
            engine=target.chosen.engine,
            autoscaling=target.chosen.bounds,
            reason=reason,
            loading=self._next and self._next.source.name,
            loaded=self._pool.names,
            running=self._pool.users,
        )

    async def models(self) -> list[str]:
        """Names that requests can give: those in memory, and the jobs' models, newest first."""
        jobs = await asyncio.to_thread(names_of_jobs, self._names.home)
        return list(dict.fromkeys([*self._pool.names, *jobs]))

    async def start(self) -> None:
        """Begins to load the deployment chosen before a restart, if one was."""
        try:
            target = await self._chosen()
        except PolythinkError as error:  # a replica that cannot be told what to load serves what requests name
            self._failure = Failure(error.message)
            return
        if target.chosen != NEWEST:
            self._switch_to(target)

    def check_health(self) -> None:
        """
        Raises:
            EngineError: a model in memory will not answer any more.
        """
        self._pool.check_health()

    def close(self) -> None:
        """Unloads all models; what still runs ends with an EngineError."""
        self._pool.close()
        self._registry_threads.shutdown(wait=False, cancel_futures=True)

    def _state(self) -> Literal["idle", "loading", "ready", "failed"]:
        if self._current:
            return "ready"
        if self._next:
            return "loading"
        return "failed" if self._failure else "idle"

    async def _named(self, name: str) -> ModelSource:
        """The model of that name; on the engine that it is deployed on, if it is."""
        source = await self._resolve(name)
        deployed = self._current.source if self._current else None
        if deployed is None or deployed.directory != source.directory:
            return source
        return replace(source, engine=deployed.engine)

    async def _target(self, chosen: DeployRequest) -> Target:
        source = await self._resolve(chosen.model)
        return Target(replace(source, engine=chosen.engine), chosen)

    async def _resolve(self, name: str) -> ModelSource:
        """MLflow may take its time: it is asked on threads of its own, as answers need the others."""
        threads = self._registry_threads if name.startswith(REGISTERED) else None
        return await asyncio.get_running_loop().run_in_executor(threads, self._names.resolve, name)

    async def _chosen(self) -> Target:
        return await self._target(await asyncio.to_thread(read_choice, self._state_file))

    async def _default(self) -> ModelSource:
        """The deployed model; another one, chosen on another replica or made by a newer job, is loaded beside it."""
        if self._current is None:
            await asyncio.shield(self._begin_look())
        elif time.monotonic() - self._looked_at > LOOK_S:
            self._begin_look()
        if self._switch is not None and (self._current is None or not self._pool.has(self._current.source)):
            await asyncio.shield(self._switch)  # the pool's own limit ends a wait that is too long
        if self._current is None:
            reason = self._failure and self._failure.reason
            raise UnavailableError(f"no model is ready: {reason}", hint="GET /deployment says more.", field="model")
        return self._current.source

    def _begin_look(self) -> asyncio.Task[None]:
        """The one look that is under way. Whoever has a model does not wait for it."""
        if self._looking is None or self._looking.done():
            self._looked_at = time.monotonic()
            self._looking = asyncio.create_task(self._look())
        return self._looking

    async def _look(self) -> None:
        """Begins to load what is chosen now, if that is not what answers."""
        if self._next and self._announced:
            return  # it was chosen after what the file says
        before = self._current, self._next
        try:
            target = await self._chosen()
        except PolythinkError as error:
            # The file is broken, or names what is gone, or MLflow does not answer: the model before keeps answering.
            if self._current is None and isinstance(error, UnavailableError):
                raise
            self._failure = Failure(error.message)
        else:
            if self._failure and self._failure.target is None:
                self._failure = None
            if before != (self._current, self._next):
                return  # another one was chosen during the look
            if target != self._current and not self._failed_lately(target):
                self._switch_to(target)

    def _failed_lately(self, target: Target) -> bool:
        failure = self._failure
        return failure is not None and failure.target == target and time.monotonic() - failure.at < RETRY_FAILED_S

    def _switch_to(self, target: Target, announce: bool = False) -> None:
        """Loads a model in the background; the last one asked for wins. `announce`: other replicas are to follow."""
        if self._next != target:
            self._next, self._announced = target, announce
            self._switch = asyncio.create_task(self._load_and_switch(target, announce))

    async def _load_and_switch(self, target: Target, announce: bool) -> None:
        source = target.source
        try:
            async with self._pool.lease(source) as model, asyncio.timeout(self._load_timeout_s):
                await self._prove(model, source)
            if announce and self._next == target:
                write_choice(self._state_file, target.chosen)
        except Exception as error:  # whatever a model, a library or the disk raises: GET /deployment tells it
            self._pool.forget(source)
            if self._next == target:
                self._next, self._failure = None, Failure(f"{source.name}: {self._reason(error)}", target)
            return
        if self._next == target:
            self._pool.pin(source)
            self._next, self._failure, self._current = None, None, target

    def _reason(self, error: Exception) -> str:
        if isinstance(error, PolythinkError):
            return error.message
        if isinstance(error, TimeoutError):
            return f"no token in {self._load_timeout_s:g} s"
        log.error("a deployment failed", exc_info=error)
        return f"{type(error).__name__}: {error}"

    async def _prove(self, model: ServedModel, source: ModelSource) -> None:
        """That `model` answers. One with too many requests does, as its loading has shown; an adapter may be new to it."""
        try:
            await model.probe(source.adapter)
        except OverloadedError:
            if source.adapter is not None and (self._current is None or self._current.source != source):
                raise


async def _in_time(events: AsyncGenerator[Event, None], limit_s: float) -> AsyncGenerator[Event, None]:
    deadline = asyncio.get_running_loop().time() + limit_s
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                event = await anext(events)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RequestTimeoutError(
                f"the answer took longer than {limit_s:g} s", hint="Ask for fewer tokens, or stream."
            ) from None
        yield event
