"""`polythink jobs …`: thin calls of the HTTP API."""

import json
from typing import Annotated, Any

import typer
from rich.markup import escape

from ray_app.cli.console import LiveProgress, console, duration, printable, show_jobs

app = typer.Typer(no_args_is_help=True, help="Jobs of the running service.")
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Its id.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Stay until it ends.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the API answers.")]


@app.command()
def submit(
    config: Annotated[str, typer.Argument(help="A preset's name or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as optim.learning_rate=1e-3")] = None,
    name: Annotated[
        str | None, typer.Option(help="Shown in lists; the model's name unless the config gives one.")
    ] = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Higher goes first.")] = 0,
    key: Annotated[str | None, typer.Option("--key", help="Idempotency key: the same key gives the same job.")] = None,
    watch: Watch = False,
) -> None:
    """Queue a job."""
    from ray_app.cli.client import Service

    service = Service()
    body = _source(config, overrides or []) | {"priority": priority} | ({"name": name} if name else {})
    job = service.post("/jobs", body, idempotency_key=key)
    console.print(f"{job['id']}  {job['status']}")
    if watch:
        _finish(watch_job(service, job["id"]))


@app.command("list")
def list_jobs(
    status: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    as_json: AsJson = False,
) -> None:
    """Jobs, newest first."""
    from ray_app.cli.client import Service

    jobs = Service().get("/jobs", status=status, name=name, limit=limit)["jobs"]
    if as_json:
        console.print_json(json.dumps(jobs))
    elif jobs:
        show_jobs(jobs)
    else:
        console.print("No jobs. Submit one: [bold]polythink jobs submit tiny[/]")


@app.command()
def show(job_id: JobId, watch: Watch = False, as_json: AsJson = False) -> None:
    """One job, whole."""
    from ray_app.cli.client import Service, job_path

    service = Service()
    job = watch_job(service, job_id) if watch else service.get(job_path(job_id))
    if as_json:
        console.print_json(json.dumps(job))
        return
    show_jobs([job])
    facts = {
        "attempt": job["attempt"],
        "reason": job["status_reason"],
        **(job["result"] or {}),
        **{f"link to {name}": link for name, link in job["links"].items()},
    }
    for label, value in facts.items():
        if value not in (None, "", {}):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            console.print(f"[dim]{label.replace('_', ' '):20}[/] {escape(text)}", soft_wrap=True)
    _finish(job)


@app.command()
def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    tail: Annotated[int | None, typer.Option(min=1, help="Only the last lines.")] = None,
) -> None:
    """The driver's log."""
    from ray_app.cli.client import Service, job_path

    service = Service()
    if not follow:
        print(printable(service.text(job_path(job_id, "/logs"), tail=tail)), end="")
        return
    for event, data in service.events(job_path(job_id, "/logs"), follow="true", tail=tail):
        if event == "log":
            print(printable(data), flush=True)


@app.command()
def cancel(job_id: JobId) -> None:
    """Stop a job, waiting or running."""
    from ray_app.cli.client import Service, job_path

    job = Service().post(job_path(job_id, "/cancel"))
    console.print(f"{job['id']}  {job['status']}  {escape(job['status_reason'])}")


@app.command()
def resume(job_id: JobId, watch: Watch = False) -> None:
    """Queue a failed or cancelled job again, to go on from its last checkpoint."""
    from ray_app.cli.client import Service, job_path

    service = Service()
    job = service.post(job_path(job_id, "/resume"))
    console.print(f"{job['id']}  {job['status']}")
    if watch:
        _finish(watch_job(service, job_id))


def watch_job(service: Any, job_id: str) -> dict[str, Any]:
    """Shows a job's progress until it ends; returns it."""
    job: dict[str, Any] = {}
    with LiveProgress() as live:
        for job in service.watch(job_id):
            live.update(job["status"], job["progress"], job["status_reason"])
    return job


def took(job: dict[str, Any]) -> str:
    """How long a job ran."""
    from datetime import datetime

    if not job["started_at"] or not job["ended_at"]:
        return ""
    return duration(
        (datetime.fromisoformat(job["ended_at"]) - datetime.fromisoformat(job["started_at"])).total_seconds()
    )


def _source(config: str, overrides: list[str]) -> dict[str, Any]:
    """The request's part that says what to run. A preset goes by name; a file is read here, with its paths made absolute."""
    from training.config import load_config, presets

    if config not in presets():
        return {"config": load_config(config, overrides).model_dump(mode="json", exclude_unset=True)}
    load_config(config, overrides)  # a fault is told before anything is sent
    return {"preset": config, "overrides": _parsed(overrides)}


def _parsed(overrides: list[str]) -> dict[str, Any]:
    from training.config import parse_override

    values = dict(map(parse_override, overrides))
    parsed: dict[str, Any] = json.loads(json.dumps(values, default=str))  # YAML's dates are texts in JSON
    return parsed


def _finish(job: dict[str, Any]) -> None:
    """Says how a job ended; a failed one ends this command with 1."""
    from ray_app.cli.client import ApiError

    if job["status"] == "FAILED":
        error = job["error"] or {"message": job["status_reason"]}
        raise ApiError(
            error["message"], hint=error.get("hint") or f"polythink jobs logs {job['id']}", field=error.get("field")
        )
    if job["status"] in {"SUCCEEDED", "CANCELLED"}:
        console.print(f"{job['status']} after {took(job)}" if took(job) else job["status"])
