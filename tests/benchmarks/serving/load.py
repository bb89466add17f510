"""Load on an OpenAI-compatible service: closed loop (so many clients, each waiting for its answer) or open (a rate)."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Service:
    """Where requests go, and in which form."""

    url: str
    model: str
    encode: Callable[[str], list[int]] | None = None
    """Token ids of a prompt: they are sent to /v1/completions as they are. None: the prompt is sent to /v1/chat/completions."""

    def request(self, prompt: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a greedy streamed answer."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.encode is None:
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
        return "/v1/completions", body | {"prompt": self.encode(prompt)}


@dataclass
class Request:
    """One streamed answer; times in seconds from its start."""

    first_token_s: float | None = None
    total_s: float | None = None
    tokens: int = 0
    error: str | None = None


@dataclass
class Load:
    """What a service did under a load."""

    clients: int
    wall_s: float
    requests: list[Request] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return sum(request.error is not None for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return sum(request.tokens for request in self.requests) / self.wall_s

    def summary(self) -> dict[str, float]:
        done = [request for request in self.requests if request.error is None]
        first = [request.first_token_s for request in done if request.first_token_s is not None]
        per_token = [
            (request.total_s - request.first_token_s) / (request.tokens - 1)
            for request in done
            if request.tokens > 1 and request.total_s is not None and request.first_token_s is not None
        ]
        return {
            "clients": self.clients,
            "requests": len(self.requests),
            "failures": self.failures,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "first_token_ms_p50": _ms(first, 0.5),
            "first_token_ms_p95": _ms(first, 0.95),
            "per_token_ms_p50": _ms(per_token, 0.5),
            "total_ms_p50": _ms([request.total_s for request in done if request.total_s is not None], 0.5),
        }


def _ms(seconds: Sequence[float], quantile: float) -> float:
    if not seconds:
        return float("nan")
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))], 2)


async def closed_loop(service: Service, prompts: Sequence[str], clients: int, max_tokens: int) -> Load:
    """Every prompt once, by `clients` clients that each send the next one when theirs is answered."""
    waiting = list(reversed(prompts))
    requests: list[Request] = []

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            requests.append(await ask(http, service, waiting.pop(), max_tokens))

    async with connect(service.url, clients) as http:
        begin = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(clients)))
        return Load(clients, time.perf_counter() - begin, requests)


async def open_loop(service: Service, prompts: Sequence[str], per_s: float, max_tokens: int) -> Load:
    """Every prompt once, sent at random moments at a mean rate, whether earlier ones are answered or not."""
    moments = random.Random(0)
    tasks = []
    async with connect(service.url, len(prompts)) as http:
        begin = time.perf_counter()
        for prompt in prompts:
            tasks.append(asyncio.create_task(ask(http, service, prompt, max_tokens)))
            await asyncio.sleep(moments.expovariate(per_s))
        requests = list(await asyncio.gather(*tasks))
        return Load(0, time.perf_counter() - begin, requests)


async def ask(http: httpx.AsyncClient, service: Service, prompt: str, max_tokens: int) -> Request:
    """One greedy streamed answer. Tokens are counted by the service's usage, else by its chunks with text."""
    request = Request()
    path, body = service.request(prompt, max_tokens)
    begin = time.perf_counter()
    try:
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                request.error = f"{response.status_code}: {response.text[:200]}"
                return request
            async for line in response.aiter_lines():
                _read(line, request, begin)
    except httpx.HTTPError as error:
        request.error = f"{type(error).__name__}: {error}"
    request.total_s = time.perf_counter() - begin
    return request


def _read(line: str, request: Request, begin: float) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        request.error = str(chunk["error"])
        return
    if chunk.get("usage"):
        request.tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk.get("choices", []):
        if choice.get("text") or any(value for key, value in choice.get("delta", {}).items() if key != "role"):
            request.first_token_s = request.first_token_s or time.perf_counter() - begin
            if not chunk.get("usage"):
                request.tokens += 1


def connect(url: str, connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections + 4, max_keepalive_connections=connections + 4)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=600, trust_env=False)
