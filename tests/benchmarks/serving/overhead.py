"""What HTTP and Ray add to one short answer: the same request by HTTP and in this process, taken in turns."""

import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import httpx

from serving.answers.generation import GenerateRequest
from serving.generator import Generator
from serving.models.loading import EngineSettings, load_served_model
from serving.models.names import ModelNames

ROUNDS = 100
WARM = 20
"""Rounds that load the model and fill caches: not counted."""


async def overhead_ms(url: str, model_dir: Path, home: Path) -> dict[str, float]:
    """Medians in milliseconds of eight greedy tokens, one client."""
    names = ModelNames(home, (home, model_dir), f"sqlite:///{home}/mlflow.db")
    settings = EngineSettings(device="cpu")
    generator = Generator(names, lambda source: load_served_model(source, settings), state_file=home / "unused.json")
    body = {"prompt": "Hello", "model": str(model_dir), "max_new_tokens": 8, "temperature": 0}
    direct, remote = [], []
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            async with aclosing(generator.generate(GenerateRequest.model_validate(body))) as events:
                async for _ in events:
                    pass
            direct.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            (await http.post("/generate", json=body)).raise_for_status()
            remote.append(time.perf_counter() - begin)
    generator.close()
    direct_ms, remote_ms = _median_ms(direct[WARM:]), _median_ms(remote[WARM:])
    return {"direct_ms": direct_ms, "http_ray_ms": remote_ms, "overhead_ms": round(remote_ms - direct_ms, 2)}


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 2)
