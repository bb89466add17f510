"""What every request passes before its route: who sends it, then the limit of its body. Loads without torch."""

import re
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import RequestError, error_response
from serving.keys import ForbiddenError, is_loopback
from serving.routes import openai as openai_api

MIB = 1024**2
OPEN_PATHS = {"/healthz", "/readyz"}
"""Need no key."""

Authenticate = Callable[[Request], Awaitable[None]]
"""Raises an AuthError or ForbiddenError."""


async def require_loopback(request: Request) -> None:
    """Stands in for keys on an API that has none, which listens on loopback: a browser of this machine shows anybody's
    pages, and they send it requests across origins, or as if to a name of their own (DNS rebinding).

    Raises:
        ForbiddenError: the request is to another name, or a page from elsewhere wants to change something.
    """
    host = request.headers.get("host", "")
    if not is_loopback(re.sub(r":\d+$", "", host).strip("[]").lower()):
        raise ForbiddenError(
            f"Host {host[:200]!r} is no loopback address, and only those are answered without API keys",
            hint="Call it as 127.0.0.1 or localhost, or make a key: polythink keys add.",
            field="Host",
        )
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host and request.method not in {"GET", "HEAD"}:
        raise ForbiddenError(
            f"{request.method} from a page of {origin[:200]!r}, and without API keys only the service's own may do that",
            hint="Send it from a program, or make a key: polythink keys add.",
            field="Origin",
        )


class KeyCheck:
    """Middleware that asks who sends a request before anything else of it is looked at, its body included."""

    def __init__(self, app: ASGIApp, authenticate: Authenticate):
        self.app = app
        self.authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                await self.authenticate(Request(scope))
            except RequestError as error:
                answer = openai_api.error_response if scope["path"].startswith("/v1/") else error_response
                await answer(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """Refuses bodies over a size while they are read."""

    def __init__(self, app: ASGIApp, limits: dict[str, int], default: int):
        self.app = app
        self.limits = limits
        self.default = default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.limits.get(scope["path"], self.default)
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise HTTPException(413, f"the body is larger than the limit of {limit / MIB:g} MiB")
            return message

        await self.app(scope, limited, send)
