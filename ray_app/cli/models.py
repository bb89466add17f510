"""Commands about models: plan, merge, export, generate."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from ray_app.cli.console import console, duration, generation_panels
from training.errors import ConfigError


def add_to(app: typer.Typer) -> None:
    for command in (plan, merge, export, generate):
        app.command()(command)


def plan(
    config: Annotated[str, typer.Argument(help="A preset's name or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value")] = None,
) -> None:
    """What a run would need: GPU and host memory, disk, time. Starts nothing."""
    from training.config import load_config
    from training.plan import check_local_paths
    from training.plan import plan as make_plan

    resolved = load_config(config, overrides or []).resolved()
    check_local_paths(resolved)
    _show_plan(make_plan(resolved).as_dict())


def merge(
    base: Annotated[str, typer.Argument(help="Hub id, or a directory.")],
    adapter: Annotated[Path, typer.Argument(help="A directory in PEFT's layout.")],
    out: Annotated[Path, typer.Argument(help="Where the merged model goes; must not exist yet.")],
    format: Annotated[
        Literal["original", "bf16", "mxfp4"],
        typer.Option(help="How experts are written: as they are, in bf16, or packed as MXFP4."),
    ] = "original",
) -> None:
    """Add an adapter into its base, tensor by tensor, in 1 GB of memory.

    Takes any LoRA adapter in PEFT's layout, of whatever trainer. What it does not change is copied byte for byte, hashed
    and read back. OUT appears whole or not at all; a merge that was killed goes on when it is started again.

    Adapters of MXFP4 experts need --format bf16 (nothing lost, 3.5 times as large) or mxfp4 (quantised again; "survival"
    in the report says how much of the update is left).
    """
    from training.config import ModelConfig
    from training.merge import merge as merge_into
    from training.model.base import fetch

    base_path = Path(base).expanduser()
    directory = base_path.resolve() if base_path.is_dir() else fetch(ModelConfig(path=base))
    report = merge_into(directory, adapter, out, format=format)
    console.print(f"[green]Merged[/] into {escape(str(out))}", soft_wrap=True)
    _show_facts(_merge_facts(report.as_dict()))


def export(
    source: Annotated[Path, typer.Argument(help="A merged model; with --adapter, an adapter.")],
    out: Annotated[Path | None, typer.Argument(help="Where the copy goes; must not exist yet.")] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="A copy with its experts in bf16.")] = False,
    mxfp4: Annotated[bool, typer.Option("--mxfp4", help="A copy with its experts in MXFP4.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="An adapter that names its base by the hub's id.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the model hub; needs HF_TOKEN.")
    ] = None,
) -> None:
    """Hand a model or adapter on: in another form, on the model hub, or both.

    --push makes a private repository, or adds to one that exists; HF_ENDPOINT names another hub. The source stays.
    """
    from training.export import export as write_copy
    from training.export import push as upload

    kinds = [kind for kind, wanted in (("bf16", bf16), ("mxfp4", mxfp4), ("adapter", adapter)) if wanted]
    if len(kinds) > 1 or bool(kinds) != bool(out) or not (kinds or push):
        raise ConfigError("give OUT with one of --bf16, --mxfp4 and --adapter, or --push alone", hint="See --help.")
    if out:
        report = write_copy(source, out, kinds[0])  # type: ignore[arg-type]
        console.print(f"[green]Written[/] to {escape(str(out))}", soft_wrap=True)
        _show_facts(_merge_facts(report.as_dict()) if report else {})
    if push:
        console.print(f"[green]Uploaded[/] to {escape(upload(out or source, push))}", soft_wrap=True)


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    language: Annotated[str | None, typer.Option("--in", help="Language to think in: German, Deutsch, de.")] = None,
    model: Annotated[
        str | None, typer.Option(help="job:ID, models:/name/version or a path; default: what is deployed.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.6,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the API answers.")] = False,
) -> None:
    """Ask the running service; reasoning and answer apart."""
    import json

    from ray_app.cli.client import Service

    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
    body: dict[str, Any] = {"messages": messages, "max_new_tokens": max_new_tokens, "temperature": temperature}
    given = {"reasoning_language": language, "model": model, "seed": seed}
    body |= {name: value for name, value in given.items() if value is not None}
    with console.status("thinking"):
        answer = Service().generate(body)
    if as_json:
        console.print_json(json.dumps(answer))
    else:
        console.print(generation_panels(answer))


def _show_plan(plan: dict[str, Any]) -> None:
    """The plan with the numbers that belong together in one line."""
    memory, fits, advice, notes = (plan.pop(name) for name in ("gpu_memory_gib", "fits", "advice", "notes"))
    times = {name: duration(plan.pop(name)) for name in ("training_s", "total_s") if plan[name] is not None}
    if (tokens_per_s := plan.pop("tokens_per_s_per_gpu")) is not None:
        plan["throughput"] = f"{tokens_per_s:,.0f} tokens/s for each worker"
    _show_facts(plan | {name.removesuffix("_s") + " time": time for name, time in times.items()})
    if memory:
        parts = ", ".join(f"{part.replace('_', ' ')} {gib:,.2f}" for part, gib in memory.items() if gib)
        console.print(f"\nGiB of each worker's GPU: {parts}", soft_wrap=True)
        marks = [f"[green]{gpu}[/]" if fit else f"[red strike]{gpu}[/]" for gpu, fit in fits.items()]
        console.print(f"Fits: {' '.join(marks)}")
    for line in [*advice, *notes]:
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)


def _show_facts(facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        if isinstance(value, dict):
            _show_facts({f"{name} of {part}": text for part, text in value.items()})
        elif value is not None:
            label = name.removesuffix("_gib").removesuffix("_bytes").replace("_", " ")
            console.print(f"[dim]{label:28}[/] {escape(_quantity(name, value))}", soft_wrap=True)


def _quantity(name: str, value: Any) -> str:
    """`value` in the unit that the end of its name says, small ones in the next smaller."""
    if name.endswith("_bytes"):
        return f"{value / 1e9:,.2f} GB" if value >= 1e9 else f"{value / 1e6:,.2f} MB"
    if name.endswith("_gib"):
        return f"{value:,.2f} GiB" if value >= 1 else f"{value * 1024:,.0f} MiB"
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _merge_facts(report: dict[str, Any]) -> dict[str, Any]:
    """A merge's report for people: what is left of each kind of update in words."""
    kinds = {"plain": "attention and other weights", "experts": "experts"}
    survival = {
        kinds[kind]: f"{part['kept_share']:.1%} kept, {part['relative_error']:.1%} of it rounded off"
        for kind, part in report.pop("survival").items()
        if part["update_norm"]
    }
    return report | {"seconds": round(report["seconds"], 1), "update": survival}
