"""`polythink evaluate` and `polythink compare`: the reasoning language of models, measured on prompts, and of jobs, side by side."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from ray_app.cli.console import console, counted, percent
from training.errors import ConfigError
from training.run_dir import RunDir, polythink_home, write_json

if TYPE_CHECKING:
    from training.evaluate import Settings
    from training.reasoning.compare import Line
    from training.rows.prompt_sets import Prompt

Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Merged models: directories, or hub ids.")]
Job = Annotated[str, typer.Argument(help="A job's id, or its run directory.")]


def add_to(app: typer.Typer) -> None:
    app.command()(evaluate)
    app.command()(compare)


def evaluate(
    models: Models,
    prompt_set: Annotated[Path, typer.Option("--set", help="Prompts: JSONL, or MGSM's .tsv with answers.")],
    languages: Annotated[str, typer.Option(help="Languages to think in, by name or code, with commas between.")],
    prompts: Annotated[int, typer.Option(min=1, help="Spread over the languages.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 512,
    seed: Annotated[int, typer.Option(min=0)] = 42,
    device: Annotated[Literal["cpu", "cuda"], typer.Option()] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Directory for answers, figures and picture; a second call goes on from it.")
    ] = None,
) -> None:
    """How often models think in the language they are asked to, all on the same prompts, with 95 % intervals."""
    from training.evaluate import Settings
    from training.reasoning.figures import heat_maps
    from training.rows.prompt_sets import cross, read_questions

    asked = cross(read_questions(prompt_set), [name.strip() for name in languages.split(",")], prompts, seed)
    cuda = device == "cuda"
    settings = Settings(
        max_new_tokens=max_new_tokens,
        seed=seed,
        device=device,
        weights="mxfp4" if cuda else "bf16",
        precision="bf16" if cuda else "fp32",
    )
    reports = {}
    for number, model in enumerate(models, start=1):
        name = f"{number}: {Path(model).name}"
        reports[name] = _measure(model, asked, settings, out / f"model-{number}" if out else None)
        console.print(_figures_table(name, reports[name]))
    if len(reports) == 2:
        from training.reasoning.compare import compare

        console.print(_comparison_table(list(reports), compare(*reports.values())))
    if out:
        console.print(f"[dim]{heat_maps(reports, out / 'trace_match.png')}[/]", soft_wrap=True)


def compare(
    first: Job,
    second: Job,
    figure: Annotated[
        Path | None, typer.Option(help="Where the picture goes; default: comparisons/ in POLYTHINK_HOME.")
    ] = None,
) -> None:
    """Two jobs' models side by side: every figure with its difference, and a picture by question language."""
    from training.reasoning.compare import compare_runs

    runs = [_run(name) for name in (first, second)]
    names = [run.id for run in runs]
    picture = figure or polythink_home() / "comparisons" / f"{'-'.join(names)}.png"
    console.print(_comparison_table(names, compare_runs(runs, picture)))
    console.print(f"[dim]{picture}[/]", soft_wrap=True)


def _run(name: str) -> RunDir:
    """The run directory of a job.

    Raises:
        ConfigError: there is none on this machine.
    """
    runs = polythink_home() / "runs"
    for root in (Path(name).expanduser().absolute(), runs / name.removeprefix("job:")):
        if (root / "config.json").is_file():
            return RunDir.open(root)
    known = [path.parent.name for path in runs.glob("*/config.json")]
    near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
    raise ConfigError(
        f"there is no run {name!r} in {runs}", hint=f"There are {', '.join(near)}." if near else "No job ran here yet."
    )


def _measure(model: str, prompts: "Sequence[Prompt]", settings: "Settings", out: Path | None) -> dict[str, Any]:
    """The figures of one model; its answers go to `out`.jsonl, its figures to `out`.json."""
    from training.config import ModelConfig
    from training.evaluate import evaluate as measure
    from training.model.base import fetch

    path = Path(model).expanduser()
    directory = path.resolve() if path.is_dir() else fetch(ModelConfig(path=model))
    responses = out.with_suffix(".jsonl") if out else None
    with counted(model, len(prompts)) as tell:
        result = measure(directory, prompts, settings, responses, lambda done, _: tell(done))
    figures = result.as_dict()
    if out:
        write_json(out.with_suffix(".json"), figures)
    return figures


def _figures_table(title: str, report: dict[str, Any]) -> Table:
    from training.language import language_name

    table = Table(box=None, header_style="bold", title=escape(title), title_justify="left")
    for column in ("thinking in", "prompts", "trace match", "95 %", "every sentence", "answer language", "accuracy"):
        first = column == "thinking in"
        table.add_column(column, justify="left" if first else "right", no_wrap=first)
    rows = [(language_name(code), figures) for code, figures in report["by_language"].items()]
    for name, figures in [*rows, ("all but English", report)]:
        interval = f"{percent(figures['trace_match_low'])} to {percent(figures['trace_match_high'])}"
        rates = [percent(figures[key]) for key in ("strict_match", "answer_language_match", "accuracy")]
        table.add_row(name, str(figures["prompts"]), percent(figures["trace_match"]), interval, *rates)
    return table


def _comparison_table(names: Sequence[str], lines: "Sequence[Line]") -> Table:
    """Every figure of two models, with its difference; bold where the difference's 95 % interval leaves out zero."""
    table = Table(box=None, header_style="bold")
    table.add_column(no_wrap=True)
    for column in (*map(escape, names), "difference", "95 %"):
        table.add_column(column, justify="right", overflow="fold")
    for line in lines:
        shown = _number if line.name == "completion tokens" else percent
        interval = "" if line.low is None else f"{percent(line.low)} to {percent(line.high)}"
        table.add_row(
            line.name, shown(line.first), shown(line.second), shown(line.difference), interval,
            style="bold" if line.is_clear else "",
        )  # fmt: skip
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
