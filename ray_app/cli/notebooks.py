"""Commands for those who come from notebooks and other trainers: run, migrate."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ray_app.cli.console import console, errors
from training.errors import ConfigError


def add_to(app: typer.Typer) -> None:
    for command in (run, migrate):
        app.command()(command)


def run(
    function: Annotated[str, typer.Argument(help="module:function or file.py:function.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="key=value, passed to it; values are YAML.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Workers with a GPU each; 0 for CPU.")] = None,
    gpu_type: Annotated[str | None, typer.Option(help="Such as H100; `any` takes what there is.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Workers on CPU.")] = None,
    remote: Annotated[bool | None, typer.Option(help="Submit a Ray Job to RAY_ADDRESS.")] = None,
) -> None:
    """Run a function on the workers of a Ray cluster, a GPU each, as torchrun would; prints what each returns.

    The options override what the function's @distributed says.
    """
    from ray_app.distributed import Distributed
    from ray_app.functions.hardware import Hardware

    found = _function(function)
    hardware = found.hardware if isinstance(found, Distributed) else Hardware()
    options = {"gpus": gpus, "gpu_type": gpu_type, "workers": workers, "remote": remote}
    hardware = hardware.overridden(",".join(f"{key}={value}" for key, value in options.items() if value is not None))
    target = Distributed(found.function if isinstance(found, Distributed) else found, hardware)
    values = target.distributed(**_arguments(arguments or []))
    for rank, value in enumerate(values):
        console.print(f"[dim]rank {rank}[/] {escape(repr(value))}", soft_wrap=True)


def migrate(
    source: Annotated[
        Path, typer.Argument(help="A Python script or notebook with SFTConfig; Axolotl's or LLaMA-Factory's YAML.")
    ],
    gpus: Annotated[int | None, typer.Option(min=1, help="Workers, where the source does not say.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the configuration goes; default: standard output.")] = None,
) -> None:
    """Turn another trainer's configuration into ours, and say what became of every key."""
    from training.config import parse_config
    from training.migrate.convert import migrate as read

    result = read(source, gpus)
    parse_config(result.values)  # what is printed can be loaded
    _show(result)
    if out is None:
        print(result.yaml(), end="")
        return
    if out.exists():
        raise ConfigError(f"{out} exists", hint="Give another --out.", field="out")
    out.write_text(result.yaml(), encoding="utf-8")
    errors.print(f"Written to {escape(str(out))}. Next: [bold]polythink plan {escape(str(out))}[/]", soft_wrap=True)


def _function(name: str) -> Any:
    """The object that `module:function` or `file.py:function` names; the working directory is looked in first.

    Raises:
        ConfigError: there is no such module or function.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r} is not module:function", hint="For example train.py:train", field="function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = _file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ConfigError(f"cannot import {module_name}: {error}", field="function") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{module_name} has no function {attribute!r}", field="function")
    return found


def _file(path: Path) -> Any:
    """The module in the file `path`, under its own name, which its functions are pickled with."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _arguments(pairs: list[str]) -> dict[str, Any]:
    import yaml

    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"argument {pair!r} is not key=value", field="arguments")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"argument {key}: {text!r} is not a YAML value: {error}", field="arguments") from None
    return values


def _show(result: Any) -> None:
    """What became of every key, on standard error: standard output holds the configuration."""
    for moved in result.moved:
        note = f" [dim]({escape(moved.note)})[/]" if moved.note else ""
        _line(moved, f"[green]{moved.to}[/]: {_short(moved.new_value)}{note}")
    for lost in result.gone:
        _line(lost, f"[yellow]no key[/]: {escape(lost.reason)}")
    for lost in result.unread:
        _line(lost, f"[red]look at it[/]: {escape(lost.reason)}")
    for note in result.notes:
        errors.print(f"[dim]{escape(note)}[/]", soft_wrap=True)


def _line(key: Any, text: str) -> None:
    errors.print(f"[bold]{escape(key.key)}[/] [dim]{_short(key.value)}[/] → {text}", soft_wrap=True)


def _short(value: Any) -> str:
    text = str(value)
    return escape(text if len(text) <= 60 else f"{text[:57]}...")
