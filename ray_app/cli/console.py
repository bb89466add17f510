"""What the command line shows: errors, live progress, tables of jobs and of reasoning languages."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from training.errors import PolythinkError

SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | dict.fromkeys(range(0x7F, 0xA0), "�")
"""What is shown for control characters (C0 and C1)."""


def printable(text: str) -> str:
    """`text` with a symbol for each control character: those of rows, models and logs are not for a terminal to obey."""
    return text.translate(SYMBOLS)


class SafeConsole(Console):
    """Shows `printable` text, whatever it is given."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)  # before its width is measured

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


console = SafeConsole(highlight=False, emoji=False)  # a model's `:smile:` is shown as it was written
errors = SafeConsole(stderr=True, highlight=False, emoji=False)

BAR_WIDTH = 24
MAX_LINE = 10_000
"""Characters of a table's line where there is no terminal."""
PLAIN_INTERVAL_S = 10
"""Between two lines of progress where there is no terminal."""
STATUS_STYLE = {"SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "yellow", "RUNNING": "cyan", "QUEUED": "dim"}


def show_error(error: PolythinkError) -> None:
    """The message in red, and below it the way out and the notes, such as a worker's traceback."""
    where = f" [dim]({escape(error.field)})[/]" if error.field and error.field not in error.message else ""
    errors.print(f"[bold red]Error:[/] [red]{escape(error.message)}[/]{where}", soft_wrap=True)
    if error.hint:
        errors.print(f"[dim]{escape(error.hint)}[/]", soft_wrap=True)
    for note in getattr(error, "__notes__", []):
        errors.print(escape(note.strip()), soft_wrap=True)


class LiveProgress:
    """A job's progress: a bar on a terminal, a line every few seconds elsewhere. Use it in a `with` block."""

    def __init__(self, output: Console = console):
        self.output = output
        self.bar = Progress(
            TextColumn("{task.fields[phase]}", style="bold"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=output,
        )
        self.task = self.bar.add_task("", total=100, phase="", numbers="")
        self.shown: tuple[str, float] = ("", 0.0)

    def __enter__(self) -> Self:
        if self.output.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.output.is_terminal:
            self.bar.stop()

    def update(self, status: str, progress: dict[str, Any], reason: str = "") -> None:
        """
        Args:
            status: the job's status or the run's phase.
            progress: step, total_steps, percent, eta_s, loss, tokens_per_s_per_gpu, message, as far as known.
            reason: why it waits, shown while there are no numbers.
        """
        if status == "QUEUED":  # what an earlier attempt reached says nothing now
            progress = {}
        numbers = progress_text(status, progress) or reason
        if self.output.is_terminal:
            self.bar.update(
                self.task, completed=progress.get("percent") or 0, phase=f"{status:10}", numbers=escape(numbers)
            )
            return
        last_status, last_time = self.shown
        if status != last_status or time.monotonic() - last_time > PLAIN_INTERVAL_S:
            self.output.print(
                f"{status:10} {progress.get('percent') or 0:3.0f} %  {escape(numbers)}".rstrip(), soft_wrap=True
            )
            self.shown = (status, time.monotonic())


@contextmanager
def counted(title: str, total: int, output: Console = console) -> Iterator[Callable[[int], None]]:
    """Progress of work that is counted, told by calling what it yields with how many are done: a bar on a terminal, lines elsewhere."""
    if output.is_terminal:
        columns = (TextColumn(escape(title)), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=output, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    output.print(f"{escape(title)}: loading, 0 of {total}", soft_wrap=True)
    start = shown = time.monotonic()

    def tell(done: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if done and (done == total or now - shown > PLAIN_INTERVAL_S):
            left = duration((now - start) / done * (total - done))
            output.print(f"{escape(title)}: {done} of {total} · {left} left", soft_wrap=True)
            shown = now

    yield tell


def progress_text(status: str, progress: dict[str, Any]) -> str:
    """`step 40/150 · loss 1.234 · 5,210 tokens/s · 1:20 left` while it trains, else what it is at."""
    parts = []
    if status == "RUNNING" and progress.get("total_steps"):
        parts.append(f"step {progress.get('step') or 0}/{progress['total_steps']}")
        if progress.get("loss") is not None:
            parts.append(f"loss {progress['loss']:.3f}")
        if progress.get("tokens_per_s_per_gpu"):
            parts.append(f"{progress['tokens_per_s_per_gpu']:,.0f} tokens/s")
        if progress.get("peak_gpu_gib"):
            parts.append(f"{progress['peak_gpu_gib']:.1f} GiB")
        if progress.get("eta_s") is not None:
            parts.append(f"{duration(progress['eta_s'])} left")
    return " · ".join(parts) or progress.get("message") or ""


def duration(seconds: float) -> str:
    """`1:20`, `2:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_jobs(jobs: list[dict[str, Any]], output: Console = console) -> None:
    """A line for each job. Ids, statuses and times are whole however narrow the terminal; without one, everything is."""
    table = job_table(jobs)
    whole = sum((column.min_width or 0) + 2 for column in table.columns)  # 2: what stands between columns
    if not output.is_terminal:
        table.width = output.measure(table, options=output.options.update(width=MAX_LINE)).maximum
    elif whole > output.width:  # the terminal breaks the lines
        table.width = whole
    output.print(table, crop=False)


def job_table(jobs: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    whole = {name: max(len(job[name]) for job in jobs) for name in ("id", "status")} | {"created": 19}
    for column in ("id", "name", "status", "progress", "created"):
        table.add_column(column, no_wrap=column in whole, min_width=whole.get(column))
    for job in jobs:
        status = job["status"]
        numbers = (
            (job.get("error") or {}).get("message") or progress_text(status, job["progress"]) or job["status_reason"]
        )
        table.add_row(
            job["id"],
            _line(job["name"]),
            f"[{STATUS_STYLE.get(status, 'cyan')}]{status}[/]",
            _line(numbers or ""),
            job["created_at"][:19].replace("T", " "),
        )
    return table


def _line(text: str) -> Text:
    """The first line of `text`, cut where a column has no room for it: a table keeps one line for each job."""
    return Text(printable("".join(text.splitlines()[:1])), no_wrap=True, overflow="ellipsis")


def generation_panels(answer: dict[str, Any]) -> RenderableType:
    """Reasoning and answer apart, and the language that the reasoning was in."""
    language = answer["reasoning_language"]
    requested, detected, matches = (
        language["requested"],
        language["detected"] or "too little text to tell",
        language["matches"],
    )
    mark = {True: "[green]as asked[/]", False: f"[red]asked for {requested}[/]", None: ""}[matches]
    return Group(
        Panel(
            escape(answer["reasoning"]) or "[dim]none[/]", title="reasoning", title_align="left", border_style="cyan"
        ),
        Panel(escape(answer["answer"]) or "[dim]none[/]", title="answer", title_align="left", border_style="green"),
        f"Language of the reasoning: [bold]{detected}[/] {mark}   [dim]{escape(answer['model'])} · "
        f"{answer['usage']['completion_tokens']} tokens · {answer['finish_reason']}[/]",
        *(f"[yellow]Warning: {escape(warning)}[/]" for warning in answer["warnings"]),
    )


def share_table(reports: dict[str, Any]) -> Table:
    """Share of each asked language before and after, the languages other than English together, English apart.

    Args:
        reports: `before` and `after`, each as `training.reasoning.metrics.report`.
    """
    from training.language import language_name

    before, after = reports["before"], reports["after"]
    table = Table(box=None, header_style="bold")
    for column in ("thinking in", "prompts", "before", "after", ""):
        table.add_column(column, justify="left" if column in {"thinking in", ""} else "right")
    codes = sorted(code for code in after["by_language"] if code != "en")
    rows = [(language_name(code), before["by_language"][code], after["by_language"][code], "") for code in codes]
    rows.append(("all of these", before, after, "bold"))
    if after["english"]["prompts"]:
        rows.append(("English", before["english"], after["english"], "dim"))
    for name, was, now, style in rows:
        table.add_row(
            name, str(now["prompts"]), percent(was["trace_match"]), percent(now["trace_match"]), _bar(now["trace_match"]),
            style=style,
        )  # fmt: skip
    return table


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _bar(share: float | None) -> str:
    filled = round((share or 0) * BAR_WIDTH)
    return f"[green]{'█' * filled}[/][dim]{'░' * (BAR_WIDTH - filled)}[/]"
