"""The service's HTTP API, as the command line calls it."""

import json
import os
import time
from collections.abc import Iterator
from math import inf
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx

from training.errors import ConfigError, PolythinkError

CONNECTION: dict[str, Any] = {"timeout": 60, "trust_env": False}
"""No proxy from the environment: the service is on this machine or in this network."""
UPLOAD_TIMEOUT_S = 600
"""For the service to check the rows of a file before it answers."""
MAX_FILE_NAME = 200
"""Characters of a name that `POST /files` takes."""
RECONNECT_S = 60
"""In which a stream that broke must be there again: a replica that was killed is replaced in 5 to 30 s."""


class ApiError(PolythinkError, RuntimeError):
    """The service refused a request, or does not answer."""

    status_code: int | None = None
    retry_after_s: float | None = None


class Service:
    """A running service.

    Args:
        url: its address; None takes `$POLYTHINK_URL`, else what `polythink up` started here.
        key: API key; None takes `$POLYTHINK_API_KEY`.

    Raises:
        ConfigError: the address is none of HTTP's.
    """

    def __init__(self, url: str | None = None, key: str | None = None):
        self.url = (url or os.environ.get("POLYTHINK_URL") or _local_url()).rstrip("/")
        if not _is_http(self.url):
            raise ConfigError(
                f"POLYTHINK_URL={self.url!r} is not the address of a service",
                hint="For example http://127.0.0.1:8000.",
                field="POLYTHINK_URL",
            )
        key = key or os.environ.get("POLYTHINK_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, **params: Any) -> Any:
        return _json(self._call("GET", path, params=_given(params)))

    def text(self, path: str, **params: Any) -> str:
        return self._call("GET", path, params=_given(params)).text

    def post(self, path: str, body: Any = None, *, idempotency_key: str | None = None, timeout_s: float = 60) -> Any:
        headers = self.headers | ({"Idempotency-Key": idempotency_key} if idempotency_key else {})
        return _json(self._call("POST", path, timeout_s, json=body, headers=headers))

    def upload(self, rows: BinaryIO, name: str) -> dict[str, Any]:
        """The answer of `POST /files`: the `id` and the number of `rows`.

        Args:
            rows: an open file, sent while it is read.
            name: the file's name; its ending says the format.
        """
        params = {"name": name[-MAX_FILE_NAME:]}
        answer: dict[str, Any] = _json(self._call("POST", "/files", UPLOAD_TIMEOUT_S, params=params, content=rows))
        return answer

    def events(self, path: str, **params: Any) -> Iterator[tuple[str, str]]:
        """`(event, data)` of a server-sent stream; goes on behind the last event when the connection breaks."""
        last_id = ""
        request: dict[str, Any] = {"params": _given(params), **CONNECTION}
        give_up = 0.0  # the first connection must stand; later ones are waited for
        while True:
            headers = self.headers | ({"Last-Event-ID": last_id} if last_id else {})
            try:
                with httpx.stream("GET", self.url + path, headers=headers, **request) as response:
                    if not response.is_success:
                        response.read()
                        if _is_ours(response) or time.monotonic() > give_up:
                            raise _error(response)
                        time.sleep(1)
                        continue
                    give_up = inf
                    for event, data, id_ in _parse_events(_lines(response.iter_text())):
                        last_id = id_ or last_id
                        yield event, data
                        if event == "end":
                            return
            except httpx.TransportError:
                if time.monotonic() > give_up:
                    raise self._unreachable() from None
            give_up = min(give_up, time.monotonic() + RECONNECT_S)
            time.sleep(1)

    def watch(self, job_id: str) -> Iterator[dict[str, Any]]:
        """The job at each change, up to its end. What the stream says is only a hint: `GET /jobs/{id}` is the truth."""
        for _, data in self.events(job_path(job_id, "/events")):
            yield json.loads(data)
        yield self.get(job_path(job_id))

    def generate(self, body: dict[str, Any], timeout_s: float = 300) -> dict[str, Any]:
        """The answer of `POST /generate`; waits for a model that is being loaded, as long as the service says to."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.post("/generate", body, timeout_s=timeout_s)
            except ApiError as error:
                if error.retry_after_s is None or time.monotonic() + error.retry_after_s > deadline:
                    raise
                time.sleep(error.retry_after_s)

    def _call(self, method: str, path: str, timeout_s: float = 60, **kwargs: Any) -> httpx.Response:
        options = {"headers": self.headers} | CONNECTION | {"timeout": timeout_s} | kwargs
        try:
            response = httpx.request(method, self.url + path, **options)
        except httpx.ConnectError:
            raise self._unreachable() from None
        except httpx.TimeoutException:
            raise ApiError(f"{method} {self.url}{path} was not answered in time") from None
        except httpx.TransportError as error:
            raise ApiError(
                f"{method} {self.url}{path}: the connection broke: {error}", hint="`polythink status` says what runs."
            ) from None
        if not response.is_success:
            raise _error(response)
        return response

    def _unreachable(self) -> ApiError:
        return ApiError(f"no service answers at {self.url}", hint="Start it with `polythink up`, or set POLYTHINK_URL.")


def _local_url() -> str:
    from ray_app.cluster import state as cluster_state

    cluster = cluster_state.load()
    return cluster.url if cluster else f"http://{cluster_state.LOOPBACK}:{cluster_state.Ports.from_env().port}"


def _is_http(url: str) -> bool:
    try:
        return httpx.URL(url).scheme in {"http", "https"}
    except httpx.InvalidURL:
        return False


def _is_ours(response: httpx.Response) -> bool:
    """Whether the service itself refused. Until its application is there again, Serve's proxy answers 404 in its own words."""
    try:
        return response.status_code < 500 and "error" in response.json()
    except ValueError:
        return False


def _given(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise ApiError(
            f"{response.request.url} answers in no JSON: it is not the service",
            hint="Set POLYTHINK_URL to its address.",
        ) from None


def _error(response: httpx.Response) -> ApiError:
    """The answer's own message and hint, where it has the service's form."""
    try:
        fault = response.json()["error"]
        error = ApiError(fault["message"], hint=fault.get("hint") or "", field=fault.get("field"))
    except (ValueError, KeyError, TypeError):
        error = ApiError(f"{response.request.url} answered {response.status_code}: {response.text[:500]}")
    error.status_code = response.status_code
    retry_after = response.headers.get("Retry-After", "")
    error.retry_after_s = float(retry_after) if retry_after.isdecimal() else None
    return error


def job_path(job_id: str, below: str = "") -> str:
    """Where a job is asked for; whatever was typed as its id stays one part of the path.

    Raises:
        ConfigError: no job can have this id.
    """
    if job_id in {"", ".", ".."}:  # which paths leave out
        raise ConfigError(
            f"JOB={job_id!r} is not the id of a job", hint="`polythink jobs list` shows them.", field="JOB"
        )
    return f"/jobs/{quote(job_id, safe='')}{below}"


def _lines(chunks: Iterator[str]) -> Iterator[str]:
    """Whole lines. httpx's own end at U+2028, U+0085 and others as well, which a log or a JSON text may hold."""
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        yield from whole


def _parse_events(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """`(event, data, id)` of server-sent events, in the form of the HTML standard's section 9.2."""
    event, id_ = "message", ""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield event, "\n".join(data), id_
            event, id_, data = "message", "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            event = value
        elif name == "id":
            id_ = value
        elif name == "data":
            data.append(value)
