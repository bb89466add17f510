"""The generator as a Serve deployment, and the API's view of it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, TypeVar

from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ReplicaState

from ray_app.generator.metrics import GeneratorMetrics
from ray_app.generator.pacing import paced
from ray_app.generator.scaling import autoscaling_config, check_scale
from ray_app.generator.settings import GeneratorSettings
from ray_app.loopback import keep_replica_on_loopback
from serving.answers.generation import Event, GenerateRequest, Started
from serving.deployment import DEPLOYMENT_FILE, Deployment, DeployRequest, read_choice
from serving.engines.engine import OverloadedError
from serving.errors import UnavailableError
from serving.generator import Generator
from serving.models.names import ModelNames, names_of_jobs
from training.errors import ConfigError, PolythinkError

T = TypeVar("T")

SERVE_ERRORS = (RayError, BackPressureError, DeploymentUnavailableError, AioRpcError)


def generator_app(names: ModelNames, settings: GeneratorSettings, actor_options: dict[str, Any]) -> Application:
    """The generator, to be bound into the API's constructor.

    Args:
        names: finds models, by paths that every node sees.
        actor_options: Ray's, such as the node to run on.
    """
    return GeneratorReplica.options(  # type: ignore[attr-defined]
        ray_actor_options={**actor_options, "num_gpus": settings.num_gpus},
        autoscaling_config=autoscaling_config(settings, names.home / DEPLOYMENT_FILE),
    ).bind(names, settings)


# The engine has its own bounded queue, which knows what is answered together; Serve's limit only has to be above it.
@serve.deployment(name="generator", max_ongoing_requests=2000, graceful_shutdown_timeout_s=30)
class GeneratorReplica:
    """Holds models and their engines; the event loop stays free while they work."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, names: ModelNames, settings: GeneratorSettings
    ):
        keep_replica_on_loopback()
        from serving.models.loading import (  # torch: not for the API replica, which imports us
            EngineSettings,
            fits_beside,
            load_served_model,
        )

        engine = EngineSettings(
            engine=settings.engine,
            device="cuda" if settings.num_gpus else "cpu",
            memory_share=0.9 / settings.max_models,
            max_sequences=settings.max_sequences,
            max_waiting=settings.max_waiting,
            cache_gib=settings.cache_gib,
            max_adapters=settings.max_adapters,
            max_adapter_rank=settings.max_adapter_rank,
            context_length=settings.context_length,
        )
        self.generator = Generator(
            names,
            lambda source: load_served_model(source, engine),
            fits=lambda source: fits_beside(source, engine),
            state_file=names.home / DEPLOYMENT_FILE,
            max_models=settings.max_models,
            load_timeout_s=settings.load_timeout_s,
            request_timeout_s=settings.request_timeout_s,
            observe=GeneratorMetrics().observe,
        )
        self._stream_interval_s = settings.stream_interval_s
        await self.generator.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[Event], None]:
        """Lists of events; without `request.stream` the last one holds the answer."""
        yield []  # a replica has the request
        interval_s = self._stream_interval_s if request.stream else None
        async with aclosing(paced(self.generator.generate(request), interval_s)) as lists:
            async for events in lists:
                yield events

    async def deployment(self) -> Deployment:
        return await self.generator.deployment()

    async def deploy(self, request: DeployRequest) -> Deployment:
        return await self.generator.deploy(request)

    async def models(self) -> list[str]:
        return await self.generator.models()

    async def check_health(self) -> None:
        """Serve asks every 10 s, and starts another replica in the place of one that raises three times."""
        self.generator.check_health()


class RemoteGenerator:
    """`serving.routes.generate.AnswersRequests` over a Serve handle: the errors are the generator's own.

    Args:
        handle: of `GeneratorReplica`.
        settings: those it was made with.
        state_file: what was chosen to answer, in POLYTHINK_HOME.
    """

    def __init__(self, handle: DeploymentHandle[Any], settings: GeneratorSettings, state_file: Path):
        self._handle = handle
        self._streams = handle.options(stream=True)
        self._settings = settings
        self._state_file = state_file
        self._replica_timeout_s = settings.replica_timeout_s

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        begin = time.monotonic()
        response = self._streams.generate.remote(request)
        try:
            await self._in_time(anext(aiter(response)))  # type: ignore[arg-type]  # a generator, by the option above
            replica_s = time.monotonic() - begin
            async for events in response:  # type: ignore[union-attr]
                for event in events:
                    yield event.model_copy(update={"replica_s": replica_s}) if isinstance(event, Started) else event
        except SERVE_ERRORS as error:
            raise _own_error(error) from None
        finally:
            response.cancel()  # when the client is gone; after the end it does nothing

    async def deployment(self) -> Deployment:
        """How the generator is; asking starts no replica."""
        states = await asyncio.to_thread(self._replica_states)
        running = states.get(ReplicaState.RUNNING, 0)
        if not running:
            return await asyncio.to_thread(self._without_replicas, bool(states.get(ReplicaState.STARTING)))
        deployment: Deployment = await self._answer(self._handle.deployment.remote())
        return deployment.model_copy(update={"replicas": running})

    def _replica_states(self) -> dict[ReplicaState, int]:
        application = serve.status().applications[self._handle.app_name]
        return dict(application.deployments[self._handle.deployment_name].replica_states)

    def _without_replicas(self, starting: bool) -> Deployment:
        try:
            chosen = read_choice(self._state_file)
        except ConfigError as error:
            return Deployment(state="failed", model=None, reason=error.message, replicas=0)
        state: Literal["loading", "idle"] = "loading" if starting else "idle"
        return Deployment(state=state, model=chosen.model, engine=chosen.engine, autoscaling=chosen.bounds, replicas=0)

    async def deploy(self, request: DeployRequest) -> Deployment:
        """Raises RequestError when more replicas are asked for than there may be."""
        check_scale(request, self._settings)
        return await self._answer(self._handle.deploy.remote(request))

    async def models(self) -> list[str]:
        """Names that requests can give; asking starts no replica."""
        states = await asyncio.to_thread(self._replica_states)
        if not states.get(ReplicaState.RUNNING):
            return await asyncio.to_thread(names_of_jobs, self._state_file.parent)
        return await self._answer(self._handle.models.remote())

    async def _answer(self, response: Awaitable[T]) -> T:
        try:
            return await self._in_time(response)
        except SERVE_ERRORS as error:
            raise _own_error(error) from None

    async def _in_time(self, response: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._replica_timeout_s):
                return await response
        except TimeoutError:
            raise UnavailableError(
                f"no replica of the generator took the request within {self._replica_timeout_s:g} s",
                hint="Training may hold the GPUs that it needs; the Ray dashboard shows what waits.",
            ) from None


def _own_error(error: Exception) -> Exception:
    """What the generator raised, out of Ray's wrapping; a replica that died is unavailable, another takes its place."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, PolythinkError) else error
    if isinstance(error, BackPressureError):
        return OverloadedError("as many requests wait as may", hint="Try again shortly.")
    return UnavailableError(f"the generator is not there: {type(error).__name__}", hint="It is being restarted.")
