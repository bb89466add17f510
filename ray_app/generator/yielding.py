"""Training before answering: the generator gives its GPUs back when a job needs them, so that one node serves both.

While the first job in the queue lacks only what the generator holds, requests are refused with a Retry-After; without
requests the generator's replicas are idle, and Serve ends them after `GeneratorSettings.idle_s`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.concurrency import run_in_threadpool

from ray_app.generator.settings import GeneratorSettings
from ray_app.queue.admission import GENERATOR_YIELDS
from ray_app.queue.store import SqlStore
from serving.answers.generation import Event, GenerateRequest
from serving.deployment import Deployment, DeployRequest
from serving.errors import UnavailableError
from serving.routes.generate import AnswersRequests


def yielding(settings: GeneratorSettings) -> GeneratorSettings:
    """`settings` under which replicas that hold GPUs can all go, unless a smallest number was asked for."""
    if settings.num_gpus and "min_replicas" not in settings.model_fields_set:
        return settings.model_copy(update={"min_replicas": 0})
    return settings


def gpus_of(settings: GeneratorSettings) -> float:
    """GPUs that the generator can give back."""
    settings = yielding(settings)
    return settings.num_gpus * (settings.max_replicas - settings.min_replicas)


class YieldingGenerator:
    """A generator that answers and loads nothing while a job waits for its GPUs."""

    def __init__(self, generator: AnswersRequests, store: SqlStore):
        self._generator = generator
        self._store = store

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """
        Raises:
            UnavailableError: a job needs the GPUs.
        """
        await self._check_free()
        async with aclosing(self._generator.generate(request)) as events:  # closed with us, when the client is gone
            async for event in events:
                yield event

    async def deployment(self) -> Deployment:
        return await self._generator.deployment()

    async def deploy(self, request: DeployRequest) -> Deployment:
        """
        Raises:
            UnavailableError: a job needs the GPUs; a replica would be started on them.
        """
        await self._check_free()
        return await self._generator.deploy(request)

    async def models(self) -> list[str]:
        return await self._generator.models()

    async def _check_free(self) -> None:
        for job in await run_in_threadpool(self._store.queue):
            if job.status_reason.endswith(GENERATOR_YIELDS):
                raise UnavailableError(f"job {job.id} needs the generator's GPUs", hint="It answers again afterwards.")
