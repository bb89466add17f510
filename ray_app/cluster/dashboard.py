"""Ray's dashboard over HTTP: is a Ray there, and which Serve applications run on it. Needs no connection to the cluster itself."""

import time
from typing import Any

import httpx

from ray_app.cluster.processes import ServiceError

APPLICATIONS = "/api/serve/applications/"

PATIENCE_S = 60
"""The dashboard's Serve part is a process of its own, which answers 500 until it is up; Ray starts it again if it is late."""


class Dashboard:
    """The dashboard at `url`.

    Args:
        token: Ray's token, where the cluster was started with RAY_AUTH_MODE=token.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 120):
        self.url = url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.options: dict[str, Any] = {"headers": headers, "timeout": timeout_s, "trust_env": False}

    def ray_version(self) -> str | None:
        """The version of the Ray that answers, or None when nothing does or it is no Ray.

        Raises:
            ServiceError: a Ray answers, but not without a token.
        """
        try:
            response = httpx.get(f"{self.url}/api/version", **self.options | {"timeout": 5})
            if response.status_code in {401, 403}:
                raise ServiceError(
                    f"the Ray at {self.url} asks for a token",
                    hint="Set RAY_AUTH_TOKEN_PATH to its file, or choose another --dashboard-port to start an own Ray.",
                )
            return response.json()["ray_version"] if response.is_success else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    def serve(self) -> dict[str, Any]:
        """Everything Serve says of itself: `applications` by name, `http_options`, `proxies`."""
        return self._request("GET").json()

    def application(self, name: str) -> dict[str, Any]:
        """`status`, `message`, `deployments` of one application; {} when there is none."""
        return self.serve().get("applications", {}).get(name, {})

    def deploy(self, config: dict[str, Any]) -> None:
        """Makes Serve run exactly the applications of `config`, in the form of a Serve config file."""
        self._request("PUT", config)

    def _request(self, method: str, body: dict[str, Any] | None = None) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                response = httpx.request(method, self.url + APPLICATIONS, json=body, **self.options)
            except httpx.HTTPError as error:
                raise ServiceError(f"Ray's dashboard at {self.url} does not answer: {error}") from error
            if response.status_code < 500 or time.monotonic() > deadline:
                break
            time.sleep(1)
        if not response.is_success:
            raise ServiceError(f"Ray Serve refuses {method} {APPLICATIONS}: {response.text[:2000]}")
        return response
