"""The Serve application: deployed from `configs/serve.yaml`, waited for, taken off again."""

import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import yaml

from ray_app.cluster.dashboard import Dashboard
from ray_app.cluster.parts import client_token, ray_directory, service_variables
from ray_app.cluster.processes import ServiceError
from ray_app.cluster.state import Cluster
from training.config import PRESETS

APPLICATION = "polythink"
Report = Callable[[str], None]
"""Told what is being waited for."""


def dashboard_of(cluster: Cluster) -> Dashboard:
    return Dashboard(cluster.dashboard_url, client_token(cluster))


def deploy(cluster: Cluster, report: Report, timeout_s: float = 300) -> None:
    """Brings the application up and waits until it answers; one that runs is left as it is.

    Raises:
        ServiceError: it does not start.
    """
    dashboard = dashboard_of(cluster)
    serve = dashboard.serve()
    deadline = time.monotonic() + timeout_s
    status = serve.get("applications", {}).get(APPLICATION, {}).get("status")
    if status == "DEPLOY_FAILED":  # Serve does not try the same file again
        undeploy(cluster)
        _wait(lambda: not dashboard.application(APPLICATION), deadline)
    if status not in {"RUNNING", "DEPLOYING", "UNHEALTHY"}:  # Serve itself mends an unhealthy one
        dashboard.deploy(serve_config(cluster, serve))
    _wait(lambda: _is_ready(cluster, dashboard, report), deadline)


def undeploy(cluster: Cluster) -> None:
    """Takes the application off a Ray that goes on; what else Serve runs there stays."""
    dashboard = dashboard_of(cluster)
    config = serve_config(cluster, dashboard.serve())
    dashboard.deploy({**config, "applications": _others(config["applications"])})


def serve_config(cluster: Cluster, serve: dict[str, Any]) -> dict[str, Any]:
    """`configs/serve.yaml` with our address, and the applications that others have deployed by file.

    Serve ends every application that a new file leaves out.
    """
    config = yaml.safe_load((PRESETS / "serve.yaml").read_text(encoding="utf-8"))
    config["http_options"] = {**config.get("http_options", {}), "host": cluster.host, "port": cluster.ports.port}
    if not cluster.owns_ray:  # its head was not started in our environment
        for application in config["applications"]:
            variables = application.setdefault("runtime_env", {}).setdefault("env_vars", {})
            variables.update(service_variables(cluster))
    deployed = [app["deployed_app_config"] for app in serve.get("applications", {}).values()]
    return {**config, "applications": [*config["applications"], *_others(filter(None, deployed))]}


def healthy(cluster: Cluster) -> bool:
    """Whether the API answers."""
    return answers(f"{cluster.url}/healthz")


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _others(applications: Any) -> list[dict[str, Any]]:
    return [application for application in applications if application.get("name") != APPLICATION]


def _is_ready(cluster: Cluster, dashboard: Dashboard, report: Report) -> bool:
    application = dashboard.application(APPLICATION)
    if application.get("status") == "DEPLOY_FAILED":
        raise ServiceError(
            f"the service does not start: {_cause(application)}",
            hint=f"Logs: {ray_directory()}/session_latest/logs/serve" if cluster.owns_ray else "",
        )
    states = {name: part["status"].lower() for name, part in application.get("deployments", {}).items()}
    report("starting the service: " + (", ".join(f"{name} {state}" for name, state in states.items()) or "loading"))
    return application.get("status") == "RUNNING" and healthy(cluster)


def _cause(application: dict[str, Any]) -> str:
    """The exception at the end of the first failed replica's traceback, else what Serve says itself."""
    for part in application.get("deployments", {}).values():
        if part["status"] == "DEPLOY_FAILED" and (
            found := re.findall(r"^[\w.]+(?:Error|Exception): .*", part["message"], re.M)
        ):
            return str(found[-1])
    return str(application.get("message", ""))[-2000:]


def _wait(condition: Callable[[], bool], deadline: float) -> None:
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError("the service was not ready in time", hint="See `polythink status`.")
        time.sleep(0.5)
