"""Errors of the HTTP side, each with its status code, and the one form in which every route but OpenAI's answers them.

`{"error": {"type": "ConfigError", "message": "…", "hint": "…", "field": "optim.learning_rate"}}`
"""

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from serving.schemas import IN_WORDS
from training.errors import ConfigError, DataError, MergeError, ModelError, PolythinkError

log = logging.getLogger(__name__)

BODY = "body"
"""The field of faults that are of a request's body as a whole."""


class RequestError(PolythinkError, ValueError):
    """A request that cannot be met as it was sent."""

    status_code = 422


class AuthError(RequestError):
    """No API key, or a wrong one."""

    status_code = 401


class NotFoundError(RequestError):
    """There is no such thing."""

    status_code = 404


class ConflictError(RequestError):
    """The request contradicts what is already there."""

    status_code = 409


class UnavailableError(RequestError):
    """Not now. `retry_after_s` becomes the Retry-After header."""

    status_code = 503
    retry_after_s = 10


def status_code_of(error: PolythinkError) -> int:
    """The HTTP status of an error: its own, 422 for faulty input, 500 for what failed on our side."""
    if isinstance(error, RequestError):
        return error.status_code
    return 422 if isinstance(error, ConfigError | DataError | ModelError) and not isinstance(error, MergeError) else 500


def error_body(type_: str, message: str, hint: str = "", field: str | None = None) -> dict[str, Any]:
    return {"error": {"type": type_, "message": message, "hint": hint, "field": field}}


def error_headers(error: PolythinkError) -> dict[str, str]:
    if isinstance(error, UnavailableError):
        return {"Retry-After": str(error.retry_after_s)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, AuthError) else {}


def error_response(error: PolythinkError) -> JSONResponse:
    return JSONResponse({"error": error.as_dict()}, status_code_of(error), error_headers(error))


def request_error(faults: Iterable[Mapping[str, Any]], known: Mapping[str, list[str]] | None = None) -> RequestError:
    """Pydantic's faults of a request as one error: each with its field, its value and the nearest known name.

    Args:
        faults: `ValidationError.errors()` or FastAPI's; locations may start with body, query, path or header.
        known: for hints at misspelt names, the names that are allowed in each part of the request.
    """
    messages, hints, fields = [], [], []
    for fault in faults:
        part, *rest = fault["loc"] or ("body",)
        location = rest if part in {"body", "query", "path", "header"} else fault["loc"]
        field = "" if fault["type"] == "json_invalid" else ".".join(map(str, location))
        cause = (fault.get("ctx") or {}).get("error")
        if isinstance(cause, PolythinkError):  # a nested configuration, which explains itself
            messages.append(cause.message)
            hints.append(cause.hint)
            fields.append(".".join(filter(None, [field, cause.field])))
            continue
        message, hint = _explain(fault, field, (known or {}).get(str(part), []) if len(location) == 1 else [])
        messages.append(f"{field or 'the body'}: {message}")
        hints.append(hint)
        fields.append(field)
    hint = " ".join(dict.fromkeys(filter(None, hints)))
    return RequestError("; ".join(dict.fromkeys(messages)), hint=hint, field=fields[0] or BODY)


def unreadable(error: HTTPException) -> RequestError:
    """FastAPI's word for a body that made its JSON reader fail."""
    return RequestError(f"the body cannot be read: {error.__cause__ or error.detail}", field=BODY)


def _explain(fault: Mapping[str, Any], field: str, known: list[str]) -> tuple[str, str]:
    value = fault.get("input")
    match fault["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(field, known)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."
            return "unknown field", hint if known else ""
        case "missing":
            return "is required", ""
        case "json_invalid":
            return f"not JSON: {fault['ctx']['error']} at character {fault['loc'][-1]}", ""
        case "string_pattern_mismatch" if words := IN_WORDS.get(fault["ctx"]["pattern"]):
            return f"must be {words} (given: {_shortened(value)})", ""
    message = fault["msg"].removeprefix("Value error, ")
    if isinstance(value, bytes):
        return "not JSON", "Send it with `Content-Type: application/json`."
    if isinstance(value, dict):  # a rule about several fields names them itself
        return message, ""
    return f"{message} (given: {_shortened(value)})", ""


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def install_error_handlers(app: FastAPI) -> None:
    """Makes every failure of `app` answer in the one form."""

    @app.exception_handler(PolythinkError)
    async def _ours(request: Request, error: PolythinkError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(request_error(error.errors(), _known_fields(request)))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:
            return error_response(unreadable(error))
        headers, hint = dict(error.headers or {}), ""
        if error.status_code == 404:
            hint = "See /docs for the routes."
        if error.status_code == 405 and (allowed := ", ".join(_allowed_methods(request))):
            headers["Allow"], hint = allowed, f"Allowed: {allowed}."
        return JSONResponse(error_body("HTTPError", str(error.detail), hint), error.status_code, headers)

    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        body = error_body("InternalError", f"{type(error).__name__}: {error}", "The service's log has the traceback.")
        return JSONResponse(body, 500)


def _allowed_methods(request: Request) -> list[str]:
    """Methods of all routes of the request's path; Starlette's own header names those of the first one only."""
    allowed: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is Match.PARTIAL:
            allowed |= route.methods or set()
    return sorted(allowed)


def _known_fields(request: Request) -> dict[str, list[str]]:
    """Names that the route's body and query may have, from its declared models."""
    dependant = getattr(request.scope.get("route"), "dependant", None)
    known: dict[str, list[str]] = {}
    for part, parameters in (("body", "body_params"), ("query", "query_params")):
        for parameter in getattr(dependant, parameters, []):
            model = getattr(parameter.field_info, "annotation", None)
            known.setdefault(part, []).extend(getattr(model, "model_fields", {parameter.alias: None}))
    return known
