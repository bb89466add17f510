"""Constant load on the deployed model while it is swapped for another, again and again."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil

from tests.benchmarks.serving.load import Service, ask, connect

MAX_TOKENS = 32


async def soak(
    url: str, names: list[str], prompts: list[str], minutes: float, clients: int, swap_s: float
) -> dict[str, Any]:
    """Counts what failed, and how the generator's memory grew after each of `names` had been loaded twice."""
    end = time.monotonic() + 60 * minutes
    failures: list[str] = []
    memory_mib: list[float] = []
    answered: set[str] = set()
    done = 0

    async def client(http: httpx.AsyncClient, number: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            request = await ask(http, Service(url, "default"), prompts[(number + done) % len(prompts)], MAX_TOKENS)
            done += 1
            if request.error:
                failures.append(request.error)

    async def swapper(http: httpx.AsyncClient) -> None:
        swap = 0
        while time.monotonic() < end:
            name = names[swap % len(names)]
            await deploy(http, name)
            await asyncio.sleep(swap_s)
            deployment = (await http.get("/deployment")).raise_for_status().json()
            assert deployment["model"] == name, deployment
            answered.add(name)
            memory_mib.append(generator_rss_mib())
            swap += 1

    async with connect(url, clients) as http:
        await deploy(http, names[-1])  # before it there is nothing that could answer
        await asyncio.gather(swapper(http), *(client(http, number) for number in range(clients)))
    settled = memory_mib[min(2 * len(names), len(memory_mib) - 1)]
    return {
        "minutes": minutes,
        "clients": clients,
        "requests": done,
        "failed": len(failures),
        "failures": failures[:5],
        "swaps": len(memory_mib),
        "models": len(answered),
        "rss_mib": [round(value, 1) for value in memory_mib],
        "rss_growth": round(memory_mib[-1] / settled - 1, 4),
    }


async def deploy(http: httpx.AsyncClient, name: str) -> None:
    """Begins to load `name`; requests of a service that had no model wait for it."""
    (await http.put("/deployment", json={"model": name})).raise_for_status()


def generator_rss_mib() -> float:
    """Resident memory of the generator's replica, found among this process's own by its title."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ServeReplica:default:generator" in " ".join(process.cmdline()):
                return float(process.memory_info().rss / 2**20)
    raise LookupError("no process of the generator's replica")
