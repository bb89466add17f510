"""The HTTP application. Everything outside is passed in; it loads without torch, Ray and MLflow."""

from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi_offline import FastAPIOffline
from starlette.concurrency import run_in_threadpool

from serving.errors import UnavailableError, install_error_handlers
from serving.jobs import JobStore
from serving.middleware import MIB, Authenticate, BodyLimit, KeyCheck, require_loopback
from serving.requests import PathPolicy
from serving.routes.files import FileRoutes, RowReader, read_rows
from serving.routes.jobs import JobRoutes, Planner
from serving.schemas import ErrorAnswer


def create_app(
    store: JobStore,
    *,
    home: Path,
    data_roots: Sequence[Path] = (),
    routers: Sequence[APIRouter] = (),
    authenticate: Authenticate | None = None,
    plan: Planner | None = None,
    read_rows: RowReader = read_rows,
    queue_timeout_s: float = 86_400,
    max_body_mib: float = 4,
    max_upload_mib: float = 512,
    mlflow_url: str | None = None,
    ray_url: str | None = None,
) -> FastAPI:
    """The service's application.

    Args:
        home: POLYTHINK_HOME; uploads lie in `home/files`.
        data_roots: directories whose files a request may name.
        routers: further routes, such as generation.
        authenticate: raises AuthError; guards every path but the two health checks. None answers this machine alone.
        plan: estimates what a configuration needs; None makes no plans.
        read_rows: reads and checks an uploaded file.
        queue_timeout_s: for jobs that give none.
        max_body_mib, max_upload_mib: sizes of bodies, elsewhere and on `POST /files`.
        mlflow_url, ray_url: what links in jobs point to.
    """
    app = FastAPIOffline(  # /docs with its scripts: FastAPI's own page has browsers fetch them from a CDN
        title="Polythink",
        version="0.1.0",
        responses={422: {"model": ErrorAnswer}},
        redoc_url=None,  # shows a logo that comes from elsewhere
        static_url="/docs/assets",
    )
    install_error_handlers(app)
    policy = PathPolicy(tuple(data_roots), home / "files")
    jobs = JobRoutes(store, policy, plan, queue_timeout_s, mlflow_url, ray_url)
    files = FileRoutes(store, home / "files", read_rows)
    app.add_api_route("/", lambda: RedirectResponse("/docs"), include_in_schema=False)
    for router in (jobs.router(), files.router(), *routers, _health(store)):
        app.include_router(router)
    app.add_middleware(BodyLimit, limits={"/files": int(max_upload_mib * MIB)}, default=int(max_body_mib * MIB))
    app.add_middleware(KeyCheck, authenticate=authenticate or require_loopback)  # added last, so it comes first
    return app


def _health(store: JobStore) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the process lives."""
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """Whether the API and its store work."""
        try:
            await run_in_threadpool(store.ping)
        except Exception as error:  # whatever the database's driver raises: this is the one place that asks
            raise UnavailableError(f"the job store does not answer: {error}") from error
        return JSONResponse({"status": "ready"})

    return router
