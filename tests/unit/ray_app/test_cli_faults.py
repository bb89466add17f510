"""Paths and names that cannot be: every command says what and the way out, and none shows Python's own words."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_app.cli.main import app
from training.__main__ import main

LONG = "x" * 300
"""Longer than file systems take."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a_file"
    path.write_text("not a directory")
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "tiny", "model.path=/nowhere"], "there is no directory /nowhere (model.path)"),
        (["plan", "tiny", "model.path={file}"], "is a file (model.path)"),
        (["plan", "tiny", "data.path=/nowhere.jsonl"], "there is no file /nowhere.jsonl (data.path)"),
        (["plan", "tiny", "data.held_out_path=/nowhere.jsonl"], "there is no file /nowhere.jsonl (data.held_out_path)"),
        (["plan", "tiny", "data.path=file:unheard-of"], "there is no uploaded file 'unheard-of' (data.path)"),
        (["plan", "tiny", f"data.path=/{LONG}"], "there is no file"),
        (["plan", "tiny", f"model.path=/{LONG}"], "there is no directory"),
        (["plan", LONG], "there is no preset"),
        (["plan", f"{LONG}.yaml"], "File name too long (preset)"),
        (["train", LONG], "there is no preset"),
        (["train", "{file}"], "there is no preset"),
        (["merge", "{file}", "{file}", "{file}.out"], "is a file (model.path)"),
        (["merge", "{base}", "{file}", "{file}.out"], "is not an adapter"),
        (["export", "{base}", "{file}/out", "--bf16"], "Not a directory"),
        (["export", "{file}", "{file}.out", "--adapter"], "is not an adapter"),
        (["migrate", "{script}", "--out", "{file}/out.yaml"], "Not a directory"),
    ],
)
def test_a_command_names_what_cannot_be(
    arguments: list[str], message: str, file: Path, home: Path, tiny_base: Path
) -> None:
    script = tiny_base.parents[1] / "notebooks" / "gpt_oss_20b.py"
    places = {"{file}": str(file), "{base}": str(tiny_base), "{script}": str(script)}
    for mark, place in places.items():
        arguments = [argument.replace(mark, place) for argument in arguments]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert "Errno" not in result.stderr
    assert len(result.stderr.strip().splitlines()[-1]) > 10, "the way out"


def test_a_home_that_is_a_file_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTHINK_HOME", str(file))
    result = CliRunner().invoke(app, ["train", "tiny"])
    assert result.exit_code == 1
    assert "Not a directory" in result.stderr
    assert "POLYTHINK_HOME must be a directory" in result.stderr


@pytest.mark.parametrize("source", [LONG, f"{LONG}.yaml", f"/{LONG}"])
def test_the_driver_takes_no_name_that_no_file_system_takes(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([source]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("ConfigError: ")
    assert len(shown) < 500
