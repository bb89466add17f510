"""The command line `polythink`. Every command is a thin call of the API or of a library function.

Commands import what they need when they run: `polythink --help` answers in a third of a second.
"""

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from ray_app.cli import data as cli_data
from ray_app.cli import evaluate as cli_evaluate
from ray_app.cli import jobs as cli_jobs
from ray_app.cli import keys as cli_keys
from ray_app.cli import models as cli_models
from ray_app.cli import notebooks as cli_notebooks
from ray_app.cli.console import console, show_error
from training.errors import ConfigError, PolythinkError, StorageError

USAGE_ERROR = 2


class Commands(TyperGroup):
    """Shows errors in a line or two instead of a traceback, and ends with 1, or 2 for a faulty configuration."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolythinkError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            show_error(error)
            raise typer.Exit(USAGE_ERROR if isinstance(error, ConfigError) else 1) from None
        except (typer.Exit, typer.Abort, KeyboardInterrupt, BrokenPipeError):  # the last: `… | head` has seen enough
            raise
        except Exception as error:
            if type(error).__module__.startswith(("click", "typer")):  # usage errors, which Typer shows itself
                raise
            if ctx.params.get("debug"):
                raise
            show_error(_in_words(error))
            raise typer.Exit(1) from None


def _in_words(error: Exception) -> PolythinkError:
    """A fault that nobody put into words where it happened, with its notes."""
    if isinstance(error, OSError) and error.filename is not None:  # a file where a directory belongs, no right to write
        path = str(error.filename)[:200]
        told: PolythinkError = StorageError(f"{path}: {error.strerror}", hint="Check the path and its rights.")
    else:
        told = PolythinkError(f"{type(error).__name__}: {error}", hint="--debug before the command shows where.")
    for note in getattr(error, "__notes__", []):
        told.add_note(note)
    return told


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fine-tune gpt-oss to think in the language its users ask for, and serve the result.",
)
app.add_typer(cli_jobs.app, name="jobs")
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_keys.app, name="keys")


@app.callback()
def root(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False) -> None:
    pass


@app.command()
def up(
    host: Annotated[str, typer.Option(help="This machine's IP, to serve others; needs API keys.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="POLYTHINK_PORT", min=0, max=65535, help="Of the API; 0 takes a free one.")
    ] = 8000,
    mlflow_port: Annotated[int, typer.Option(envvar="POLYTHINK_MLFLOW_PORT", min=0, max=65535)] = 5000,
    dashboard_port: Annotated[int, typer.Option(envvar="POLYTHINK_DASHBOARD_PORT", min=0, max=65535)] = 8265,
    ray_port: Annotated[
        int, typer.Option(envvar="POLYTHINK_RAY_PORT", min=0, max=65535, help="Where nodes join.")
    ] = 6379,
    num_cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs that Ray may give away here; at least 4 by default.")
    ] = None,
    mlflow_uri: Annotated[
        str | None, typer.Option(envvar="MLFLOW_TRACKING_URI", help="Use this MLflow and start none.")
    ] = None,
) -> None:
    """Start the service: Ray (when none runs), MLflow and the API. A second call starts what is missing."""
    from ray_app.cluster import lifecycle as cluster

    ports = cluster.Ports(port=port, mlflow_port=mlflow_port, dashboard_port=dashboard_port, ray_port=ray_port)
    with console.status("starting") as status:
        running = cluster.up(ports, host, num_cpus, mlflow_uri, report=lambda text: status.update(escape(text)))
    _show_places(running)
    if running.is_open:
        console.print(
            f"\nOther machines join with [bold]polythink join {running.host}:{running.ports.ray_port}[/] after copying "
            f"{cluster.token_path()} to their POLYTHINK_HOME.\nRay's own commands need RAY_AUTH_MODE=token and "
            f"RAY_AUTH_TOKEN_PATH={cluster.token_path()}.",
            soft_wrap=True,
        )


@app.command()
def down() -> None:
    """End what `up` or `join` started on this machine, and nothing else."""
    from ray_app.cluster import lifecycle as cluster

    with console.status("stopping") as status:
        stopped = cluster.down(report=lambda text: status.update(escape(text)))
    console.print("Stopped." if stopped else "Nothing was running.")


@app.command()
def join(
    head: Annotated[str, typer.Argument(help="IP or IP:PORT of the machine that ran `up --host`.")],
    host: Annotated[str | None, typer.Option(help="This machine's IP for the others.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="The cluster's token; default: ray_token in POLYTHINK_HOME.")
    ] = None,
) -> None:
    """Make this machine a node of another's cluster."""
    from ray_app.cluster import lifecycle as cluster

    with console.status("joining") as status:
        node = cluster.join(head, host, token_file, report=lambda text: status.update(escape(text)))
    console.print(f"{node.host} is a node of {head}.")


@app.command()
def status() -> None:
    """What runs on this machine, and where."""
    from ray_app.cluster import deploy
    from ray_app.cluster import state as cluster_state

    running = cluster_state.load()
    if running is None:
        console.print("Nothing is up. Start it with [bold]polythink up[/].")
        raise typer.Exit(1)
    for name, process in running.processes.items():
        state = f"[green]running[/] (pid {process.pid})" if process.alive else f"[red]ended[/], its log: {process.log}"
        console.print(f"{name:10} {state}", soft_wrap=True)
    if running.joined:
        console.print(f"node of    {running.joined}")
        raise typer.Exit(0 if running.any_alive else 1)
    healthy = deploy.healthy(running)
    console.print(f"{'api':10} " + ("[green]answers[/]" if healthy else "[red]does not answer[/]"))
    _show_places(running)
    if not healthy:
        raise typer.Exit(1)


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="A preset's name, a YAML file, or a run directory to go on with.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as optim.learning_rate=1e-3")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the driver's log instead of a bar.")] = False,
) -> None:
    """Train, merge, prove and register one model, without the service."""
    from ray_app.cli.local_run import run

    result = run(config, overrides or [], verbose)
    console.print(f"[green]SUCCEEDED[/]  {escape(str(result['model']))}", soft_wrap=True)
    if result.get("registered_model"):
        console.print(
            f"Registered as [bold]{escape(result['registered_model'])}[/] in {escape(result['mlflow_uri'])}",
            soft_wrap=True,
        )


@app.command()
def quickstart(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the service running.")] = False,
) -> None:
    """Train the tiny model on CPU and see it think in German: the whole path, in minutes."""
    from ray_app.cli.quickstart import run

    run(keep=keep)


cli_models.add_to(app)
cli_evaluate.add_to(app)
cli_notebooks.add_to(app)


def _show_places(running: Any) -> None:
    console.print(f"API        [bold]{running.url}[/]   (docs at /docs)")
    console.print(f"MLflow     {running.mlflow_url}")
    console.print(f"Dashboard  {running.dashboard_url}")


if __name__ == "__main__":
    sys.exit(app())
