"""The Serve application: `serve run configs/serve.yaml`, which `polythink up` does. Three deployments, one ingress."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from ray_app.generator.deployment import RemoteGenerator, generator_app
from ray_app.generator.yielding import YieldingGenerator, gpus_of, yielding
from ray_app.loopback import keep_replica_on_loopback
from ray_app.queue.admission import Limits
from ray_app.queue.dispatcher import Dispatcher, training_command
from ray_app.queue.ray_jobs import RayJobs, driver_environment
from ray_app.queue.retention import Retention
from ray_app.queue.store import SqlStore
from ray_app.queue.tracked_runs import TrackedRuns
from ray_app.settings import Settings
from serving.api import create_app
from serving.deployment import DEPLOYMENT_FILE
from serving.keys import KeyRing
from serving.models.names import ModelNames
from serving.routes.generate import generate_router
from serving.routes.openai import openai_router
from training.plan import plan

log = logging.getLogger("ray.serve")  # the logger whose lines Serve keeps in its log files

HEAD = {"node:__internal_head__": 0.001}
"""Ray's mark of the head node."""
SETTLE_EVERY_S = 5.0
"""Between two looks for runs that drivers left RUNNING in MLflow."""
SWEEP_EVERY_S = 600.0
"""Between two looks for jobs to forget."""
STUCK_AFTER_S = 120.0
"""A dispatcher's round that takes longer makes Serve restart the replica."""


def build_app(args: dict[str, Any]) -> Application:
    """The service as a Serve application.

    Args:
        args: fields of `Settings`; what is left out comes from POLYTHINK_* variables.
    """
    settings = Settings(**args)
    # Replicas take no CPU from training: they mostly wait. SQLite is a file of the head's.
    actor: dict[str, Any] = {"num_cpus": 0, "resources": HEAD if settings.on_head else {}}
    dispatcher = DispatcherReplica.options(ray_actor_options=actor).bind(settings)  # type: ignore[attr-defined]
    names = ModelNames(settings.home, settings.readable_roots, settings.tracking_uri)
    generator = generator_app(names, yielding(settings.generator), {"num_cpus": 0})
    api = ApiReplica.options(ray_actor_options=actor, num_replicas=settings.api_replicas)  # type: ignore[attr-defined]
    return api.bind(settings, dispatcher, generator)


# Requests are cheap, and some are followed for hours: hundreds at once are nothing to worry about.
@serve.deployment(name="api", max_ongoing_requests=1000, graceful_shutdown_timeout_s=5)
@serve.ingress()
class ApiReplica:
    """HTTP. Holds no state but database connections, and imports no torch."""

    def __init__(self, settings: Settings, dispatcher: Any, generator: DeploymentHandle[Any]):
        keep_replica_on_loopback()
        self.settings = settings  # `dispatcher` is only named so that Serve deploys it: nobody calls it
        self.store = SqlStore(settings.store_url, str(settings.home / "runs"))
        remote = RemoteGenerator(generator, yielding(settings.generator), settings.home / DEPLOYMENT_FILE)
        self.generator = YieldingGenerator(remote, self.store) if settings.generator.num_gpus else remote

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self.settings
        tracking = settings.tracking_uri
        return create_app(
            self.store,
            home=settings.home,
            data_roots=settings.readable_roots,
            routers=[generate_router(self.generator), openai_router(self.generator)],
            authenticate=KeyRing.read(settings.api_keys_file).authenticate if settings.api_keys_file else None,
            plan=lambda config: plan(config).as_dict(),
            queue_timeout_s=settings.queue_timeout_s,
            max_upload_mib=settings.max_upload_mib,
            mlflow_url=tracking if tracking.startswith("http") else None,
            ray_url=settings.ray_dashboard_url,
        )


@serve.deployment(name="dispatcher", num_replicas=1, graceful_shutdown_timeout_s=5)
class DispatcherReplica:
    """Steps the dispatcher, and what tidies up after it, in threads. Serve restarts it when the dispatcher stands still."""

    def __init__(self, settings: Settings):
        keep_replica_on_loopback()
        store = SqlStore(settings.store_url, str(settings.home / "runs"))
        names = ModelNames(settings.home, settings.readable_roots, settings.tracking_uri)
        self.dispatcher = Dispatcher(
            store=store,
            runner=RayJobs(env=driver_environment(str(settings.home), settings.tracking_uri, settings.storage)),
            runs=settings.home / "runs",
            limits=Limits(settings.max_running_jobs, settings.overtake_limit, gpus_of(settings.generator)),
            command=settings.driver_command or training_command(),
            storage=settings.storage,
        )
        tracked = TrackedRuns(store, settings.tracking_uri)
        retention = Retention(
            store, names, settings.keep_jobs, settings.keep_jobs_days, tracked.is_registered, settings.storage
        )
        self.last_round = time.monotonic()
        for work, pause_s in [
            (self._step, settings.poll_interval_s),
            # MLflow may take long to answer, or not answer: that must not hold up the queue
            (tracked.settle, SETTLE_EVERY_S),
            (retention.sweep, SWEEP_EVERY_S),
        ]:
            threading.Thread(target=_for_ever, args=(work, pause_s), daemon=True).start()

    def _step(self) -> None:
        self.last_round = time.monotonic()
        self.dispatcher.step()

    def check_health(self) -> None:
        """Asked by Serve every 10 s.

        Raises:
            RuntimeError: a round hangs.
        """
        idle_s = time.monotonic() - self.last_round
        if idle_s > STUCK_AFTER_S:
            raise RuntimeError(f"the dispatcher's round has taken {idle_s:.0f} s")


def _for_ever(work: Callable[[], object], pause_s: float) -> None:
    while True:
        try:
            work()
        except Exception:  # Ray's head, the database or MLflow is away: the next round asks again
            log.exception("a round of the dispatcher failed")
        time.sleep(pause_s)
