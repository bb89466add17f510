"""A stand-in for a model registry on loopback, Unity Catalog's or a tracking server's: answers MLflow's real client and
records what it was sent."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

API = re.compile(r"/api/2\.0/mlflow/(?:unity-catalog/)?")


@dataclass
class UnityCatalog:
    """Registered models and versions, uploaded files, and every request as (method, path, body)."""

    url: str = ""
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    versions: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    created: int = 0
    failing_requests: int = 0
    """So many of the next requests are answered 503."""

    def version(self, number: str) -> dict[str, Any]:
        return next(version for version in self.versions if version["version"] == number)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        name = body.get("name") if isinstance(body, dict) else None
        match (method, API.sub("", path)):
            case ("POST", "registered-models/create"):
                if name in self.models:
                    return 400, {"error_code": "RESOURCE_ALREADY_EXISTS", "message": f"{name} exists"}
                self.models.add(name)
                return 200, {"registered_model": {"name": name}}
            case ("GET", "registered-models/get"):
                if name in self.models:
                    return 200, {"registered_model": {"name": name}}
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": f"no {name}"}
            case ("GET", "model-versions/search"):
                return 200, {"model_versions": self.versions}
            case ("POST", "model-versions/create"):
                self.created += 1
                number = str(self.created)
                status = "PENDING_REGISTRATION" if "unity-catalog" in path else "READY"
                self.versions.append(body | {"version": number, "status": status})
                return 200, {"model_version": self.versions[-1]}
            case ("POST", "model-versions/finalize"):
                version = self.version(body["version"])
                version["status"] = "READY"
                return 200, {"model_version": version}
            case ("DELETE", "model-versions/delete"):
                self.versions[:] = [v for v in self.versions if v["version"] != body["version"]]
                return 200, {}
            case ("GET", "model-versions/get"):
                return 200, {"model_version": self.version(body["version"])}
            case ("POST", "model-versions/set-tag" | "registered-models/alias"):
                return 200, {}
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": f"{method} {path}"}


@contextmanager
def unity_catalog() -> Iterator[UnityCatalog]:
    catalog = UnityCatalog()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(parts.path)
            if path.startswith("/api/2.0/fs/files/"):
                catalog.files[path.removeprefix("/api/2.0/fs/files")] = data
                return self.reply(204, None)
            body = json.loads(data) if data else {key: values[0] for key, values in parse_qs(parts.query).items()}
            catalog.requests.append((self.command, path, body))
            if catalog.failing_requests:
                catalog.failing_requests -= 1
                return self.reply(503, {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "down for a minute"})
            return self.reply(*catalog.answer(self.command, path, body))

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_any

        def reply(self, status: int, value: Any) -> None:
            content = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    catalog.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield catalog
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
