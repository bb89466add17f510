"""`polythink data …`: what a file of rows would become, before anything is spent, and its way to the service."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import progress
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ray_app.cli.console import console, errors, printable
from training.config import DataConfig, load_config
from training.errors import ConfigError, DataError

if TYPE_CHECKING:
    from training.data import Row, Tokenized
    from training.harmony import Renderer

app = typer.Typer(no_args_is_help=True, help="Training data.")
PERCENTILES = (5, 50, 90, 95, 99, 100)
MISMATCHES_SHOWN = 20


@app.callback()
def group() -> None:
    """Training data."""


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="A JSONL, JSON, Parquet or CSV file, a directory, or a hub id.")],
    config: Annotated[str, typer.Option(help="Preset or YAML file whose tokenizer and max_length apply.")] = "tiny",
    max_length: Annotated[int | None, typer.Option(min=16, help="Tokens a row may have.")] = None,
    preview: Annotated[int, typer.Option(min=0, help="Rows to show with the trained tokens coloured.")] = 1,
) -> None:
    """Validate rows: faults with line numbers, languages asked for and really used, lengths, what would be lost, which tokens
    are trained."""
    from transformers import AutoTokenizer

    from training.data import load_rows, tokenize
    from training.harmony import Renderer
    from training.model.base import fetch

    settings = load_config(config).resolved()
    data = settings.data.model_copy(
        update={"path": _as_path(file), "max_length": max_length or settings.data.max_length}
    )
    rows = load_rows(data)
    renderer = Renderer(AutoTokenizer.from_pretrained(fetch(settings.model)), data.current_date)  # type: ignore[arg-type]
    console.print(f"[green]{len(rows)} rows are well-formed.[/]")
    console.print(_languages(rows))
    _show_mismatched(rows)
    tokenized = tokenize(rows, renderer, data.model_copy(update={"max_lost_share": 1.0}))
    console.print(_lengths(tokenized))
    for row in islice((row for row in rows if row.source not in tokenized.dropped), preview):
        console.print(_preview(row, renderer, data))
    _judge_loss(tokenized, settings.data, data.max_length)


@app.command()
def upload(file: Annotated[Path, typer.Argument(help="A JSONL, JSON, Parquet or CSV file.")]) -> None:
    """Send rows to the running service, which checks all of them and keeps them under an id."""
    from ray_app.cli.client import Service

    file = file.expanduser()
    if not file.is_file():
        raise ConfigError(f"there is no file {file}", hint="Give a JSONL, JSON, Parquet or CSV file.", field="file")
    quiet = not console.is_terminal
    with progress.open(file, "rb", description="uploading", console=console, transient=True, disable=quiet) as rows:
        answer = Service().upload(rows, file.name)
    console.print(f"{answer['id']}  {answer['rows']:,} rows")
    errors.print(f"[dim]Train on them: polythink jobs submit tiny data.path=file:{answer['id']}[/]", soft_wrap=True)


def _as_path(file: str) -> str:
    """A name that exists here is a path, also without a leading `./`; anything else is a hub id."""
    return str(Path(file).expanduser().resolve()) if Path(file).expanduser().exists() else file


def _languages(rows: Sequence["Row"]) -> Table:
    from training.language import language_name

    table = Table("reasoning language", "rows", box=None, header_style="bold")
    for code, count in Counter(row.reasoning_language for row in rows).most_common():
        table.add_row(language_name(code) if code else "[dim]not asked for[/]", str(count))
    return table


def _show_mismatched(rows: Sequence["Row"]) -> None:
    """Names the rows that would teach the wrong language."""
    from training.language import language_name
    from training.rows.augment import mismatched

    found = mismatched(rows)
    if not found:
        return
    console.print(
        f"[yellow]Rows that reason in another language than they ask for: {len(found)}[/]; "
        "[bold]data.drop_mismatched=true[/] leaves them out."
    )
    for mismatch in found[:MISMATCHES_SHOWN]:
        verdict, trace = mismatch.verdict, mismatch.row.messages[-1]["thinking"]
        languages = f"asks for {language_name(verdict.requested)}, is in {language_name(verdict.detected or '')}"
        start = " ".join(trace[:200].split())[:60]
        console.print(f"  {escape(mismatch.row.source)} {languages}: [dim]{escape(start)}…[/]", soft_wrap=True)
    if len(found) > MISMATCHES_SHOWN:
        console.print(f"  [dim]and {len(found) - MISMATCHES_SHOWN} more[/]")


def _lengths(tokenized: "Tokenized") -> Table:
    ordered = sorted(tokenized.lengths)
    table = Table(*(f"p{share}" if share < 100 else "longest" for share in PERCENTILES), box=None, header_style="bold")
    table.add_row(*(f"{ordered[min(len(ordered) - 1, len(ordered) * share // 100)]:,}" for share in PERCENTILES))
    table.title, table.title_justify, table.title_style = "tokens per row", "left", "bold"
    return table


def _preview(row: "Row", renderer: "Renderer", data: DataConfig) -> Text:
    """The rendered row: trained tokens green, the others dim, what `max_length` cuts off red and struck through."""
    ids, trained = renderer.training_ids(row.messages)
    text = Text(f"{row.source}  ", style="bold")
    text.append("trained", "green").append(" · not trained · ", "dim").append("cut\n", "red strike")
    for style, run in _runs(ids, [trained[i] or data.train_on == "all" for i in range(len(ids))], data.max_length):
        text.append(printable(str(renderer.tokenizer.decode(run))), style)
    return text


def _runs(ids: Sequence[int], trained: Sequence[bool], max_length: int) -> list[tuple[str, list[int]]]:
    """Neighbouring tokens of one style together: a character may be spread over several tokens."""
    runs: list[tuple[str, list[int]]] = []
    for index, token in enumerate(ids):
        style = "red strike" if index >= max_length else "green" if trained[index] else "dim"
        if not runs or runs[-1][0] != style:
            runs.append((style, []))
        runs[-1][1].append(token)
    return runs


def _judge_loss(tokenized: "Tokenized", data: DataConfig, max_length: int) -> None:
    """Says how many rows would be dropped or cut.

    Raises:
        DataError: more than a job would accept.
    """
    summary = tokenized.summary()
    lost = summary["dropped"] + summary["truncated"]
    console.print(
        f"At {max_length:,} tokens: {summary['trained']} rows train on {summary['trained_tokens']:,} tokens, "
        f"{summary['truncated']} are cut, {summary['dropped']} dropped."
    )
    for source in (tokenized.dropped + tokenized.truncated)[:10]:
        console.print(f"  [yellow]{escape(source)}[/]")
    if lost > data.max_lost_share * summary["rows"]:
        raise DataError(
            f"{lost} of {summary['rows']} rows do not fit; a job accepts {data.max_lost_share:.0%}",
            hint="Raise data.max_length, shorten the rows, or raise data.max_lost_share.",
        )
