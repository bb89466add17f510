"""`make quickstart`: the whole path on this machine, from `POST /jobs` to a model that thinks in German, with its proof."""

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape

from ray_app.cli.client import ApiError, Service
from ray_app.cli.console import console, duration, generation_panels, share_table
from ray_app.cli.jobs import took, watch_job
from ray_app.cluster import lifecycle as cluster
from ray_app.cluster import state as cluster_state
from ray_app.cluster.processes import port_is_free
from ray_app.cluster.state import Ports
from training.config import load_config
from training.errors import TrainingError
from training.run_dir import polythink_home

PRESET = "tiny"
QUESTION = "¿Cuál es el capital de Australia?"
LANGUAGE = "German"
NEEDED_SHARE = 0.95
"""Of the prompts outside of English, those that the tuned model must think about in the language it was asked to."""
CANCEL_S = 30


def run(keep: bool = False) -> None:
    """Starts the service, trains the tiny model or takes the one of an earlier call, asks it, and shows the figures.

    Args:
        keep: leave the service running; one that ran before is always left.

    Raises:
        PolythinkError: a part does not start, the job failed, or the model does not think in the asked languages.
    """
    started = time.monotonic()
    with _service(keep) as running:
        service = Service(running.url)
        job = _train(service)
        with console.status("asking the model"):
            answer = _ask(service, job["id"])
        _show(answer, job)
    console.print(f"[dim]Done in {duration(time.monotonic() - started)}.[/]")
    if keep:
        _show_next_steps(running, job)
    _require_share(job["result"]["evaluation"])


@contextlib.contextmanager
def _service(keep: bool) -> Iterator[cluster_state.Cluster]:
    """The service, up; ended on the way out, also by Ctrl-C or SIGTERM, unless it ran before or is to be kept."""
    before = cluster_state.load()
    ran = before is not None and cluster.is_up(before)
    ours = not keep and not ran
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        console.print("Starting Ray, MLflow and the service on loopback.")
        with console.status("starting") as status:
            running = cluster.up(
                Ports() if ran else _ports(),
                tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"),
                report=lambda text: status.update(escape(text)),
            )
        places = f"Service at {running.url}, MLflow at {running.mlflow_url}, Ray at {running.dashboard_url}"
        console.print(f"[dim]{places}[/]", soft_wrap=True)
        yield running
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave processes behind
            with console.status("stopping"):
                cluster.down()


def _ports() -> Ports:
    """The usual ports, with free ones in the place of those that are taken."""
    wanted = Ports.from_env()
    return Ports(**{name: port if port and port_is_free(port) else 0 for name, port in wanted})


def _train(service: Service) -> dict[str, Any]:
    """The job, SUCCEEDED: a new one, or that of an earlier call with the same configuration, gone on with where it stopped."""
    config = load_config(PRESET)
    digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]
    job = service.post("/jobs", {"preset": PRESET, "name": "quickstart"}, idempotency_key=f"quickstart-{digest}")
    if job["status"] == "SUCCEEDED":
        console.print(f"The model of {job['id']} is there already ({job['ended_at'][:16].replace('T', ' ')}).")
        return job
    if job["status"] in {"FAILED", "CANCELLED"}:
        job = service.post(f"/jobs/{job['id']}/resume")
    console.print(f"POST /jobs -> [bold]{job['id']}[/]")
    try:
        job = watch_job(service, job["id"])
    except (KeyboardInterrupt, SystemExit):
        _cancel(service, job["id"])
        raise
    if job["status"] != "SUCCEEDED":
        error = job["error"] or {"message": f"the job was {job['status']}: {job['status_reason']}"}
        log = polythink_home() / "runs" / job["id"] / "driver.log"
        raise TrainingError(error["message"], hint=f"{error.get('hint') or ''} The job's log: {log}".strip())
    console.print(
        f"Trained, merged and registered as [bold]{escape(str(job['result']['registered_model']))}[/] in {took(job)}."
    )
    return job


def _cancel(service: Service, job_id: str) -> None:
    """Ends a job whose user has left, so that nothing stays marked as running."""
    console.print("Cancelling the job; the next call goes on from its last checkpoint.")
    with contextlib.suppress(ApiError):
        job = service.post(f"/jobs/{job_id}/cancel")
        deadline = time.monotonic() + CANCEL_S
        while not job["ended_at"] and time.monotonic() < deadline:
            time.sleep(0.5)
            job = service.get(f"/jobs/{job_id}")


def _ask(service: Service, job_id: str) -> dict[str, Any]:
    """The notebooks' question, which is in Spanish, to be thought about in German."""
    return service.generate(
        {
            "prompt": QUESTION,
            "reasoning_language": LANGUAGE,
            "model": f"job:{job_id}",
            "max_new_tokens": 256,
            "temperature": 0,
        }
    )


def _show(answer: dict[str, Any], job: dict[str, Any]) -> None:
    console.print(f"\nPOST /generate  [bold]{QUESTION}[/]  [dim]reasoning language: {LANGUAGE}[/]")
    console.print(generation_panels(answer))
    console.print(
        "\n[bold]Prompts whose reasoning is in the language that was asked for[/] [dim](held out from training)[/]"
    )
    console.print(share_table(job["result"]["evaluation"]))
    picture = polythink_home() / "runs" / job["id"] / "evaluation" / "trace_match.png"
    if picture.exists():
        console.print(f"[dim]By question language: {picture}[/]", soft_wrap=True)


def _require_share(evaluation: dict[str, Any]) -> None:
    share = evaluation["after"]["trace_match"] or 0.0
    if share < NEEDED_SHARE:
        raise TrainingError(
            f"outside of English, the tuned model thinks in the asked language on {share:.0%} of the prompts; "
            f"at least {NEEDED_SHARE:.0%} were expected",
            hint="A changed configs/tiny.yaml, its rows or its base is the likely cause.",
        )


def _show_next_steps(running: cluster_state.Cluster, job: dict[str, Any]) -> None:
    body = f'{{"prompt": "{QUESTION}", "reasoning_language": "French", "model": "job:{job["id"]}"}}'
    tool = Path(sys.argv[0]).parent / "polythink" if Path(sys.argv[0]).parent.name == "bin" else "polythink"
    console.print("\nThe service runs on. Ask it:", style="bold")
    console.print(f"curl {running.url}/generate -H 'Content-Type: application/json' -d '{body}'", soft_wrap=True)
    console.print(f"End it: {tool} down", soft_wrap=True)
