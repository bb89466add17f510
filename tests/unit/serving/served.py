"""A generator over real models in a temporary home, and jobs that finished there."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from pathlib import Path

import httpx
from fastapi import FastAPI

from serving.errors import install_error_handlers
from serving.generator import Generator
from serving.models.loading import EngineSettings, load_served_model
from serving.models.names import ModelNames
from serving.routes.generate import generate_router
from serving.routes.openai import openai_router

SETTINGS = EngineSettings(device="cpu", max_sequences=8, current_date=date(2026, 1, 2))


def finish_job(home: Path, job_id: str, model: Path, *, status: str = "SUCCEEDED", ended_at: float = 1.0) -> str:
    """Leaves the run directory of a job that ended with `model`; returns the model's name."""
    run = home / "runs" / job_id
    run.mkdir(parents=True, exist_ok=True)
    result = {"status": status, "ended_at": ended_at}
    if status == "SUCCEEDED":
        result |= {"model": str(model), "adapter": str(run / "adapter")}
    path = run / "result.json"
    path.write_text(json.dumps(result))
    os.utime(path, (ended_at, ended_at))
    return f"job:{job_id}"


def make_generator(home: Path, *roots: Path, settings: EngineSettings = SETTINGS, **limits) -> Generator:
    return Generator(
        ModelNames(home, (home, *roots), f"sqlite:///{home}/mlflow.db"),
        lambda source: load_served_model(source, settings),
        state_file=home / "deployment.json",
        **limits,
    )


def make_app(generator: Generator) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(generate_router(generator))
    app.include_router(openai_router(generator))
    return app


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=60) as client:
        yield client


def events_of(text: str) -> list[tuple[str, dict]]:
    """Names and data of server-sent events."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events
