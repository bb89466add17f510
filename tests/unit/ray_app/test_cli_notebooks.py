"""`polythink run` and `migrate` up to where Ray would start."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ray_app.cli.main import app
from training.config import load_config, parse_config

SCRIPT = """
AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b")
load_dataset("HuggingFaceH4/Multilingual-Thinking", split="train")
LoraConfig(r=8, lora_alpha=16)
SFTConfig(learning_rate=2e-4, overwrite_output_dir=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_migrate_prints_the_configuration_alone_on_standard_output(script: Path) -> None:
    result = CliRunner().invoke(app, ["migrate", str(script), "--gpus", "8"])
    assert result.exit_code == 0, result.output
    config = parse_config(yaml.safe_load(result.stdout))
    assert (config.optim.learning_rate, config.scaling.workers) == (2e-4, 8)
    assert "overwrite_output_dir" in result.stderr
    assert "transformers 5 dropped it" in " ".join(result.stderr.split())


def test_migrate_writes_a_file_that_loads_but_over_none(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours.yaml"
    assert CliRunner().invoke(app, ["migrate", str(script), "--out", str(out)]).exit_code == 0
    assert load_config(out).model.path == "openai/gpt-oss-20b"
    again = CliRunner().invoke(app, ["migrate", str(script), "--out", str(out)])
    assert again.exit_code == 2
    assert "exists" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "is not module:function"),
        ([":train"], "is not module:function"),
        (["nowhere.py:train"], "cannot import"),
        (["no_such_module:train"], "cannot import no_such_module"),
        (["json:nothing"], "json has no function 'nothing'"),
        (["json:dumps", "obj"], "is not key=value"),
        (["json:dumps", "--gpus", "0"], "nothing to run on"),
    ],
)
def test_run_refuses_what_it_cannot_run(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_what_a_worker_raised_is_shown_with_its_rank_and_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers are left out: `workers.run` raises what it raises after them."""

    def raise_as_rank_1(*_: object) -> None:
        error = ValueError("no data shard")
        error.add_note("\nRaised by rank 1 of 2:\nFile cell, line 3, in train")
        raise error

    monkeypatch.setattr("ray_app.functions.workers.run", raise_as_rank_1)
    (tmp_path / "mine.py").write_text("def train(): ...\n")
    result = CliRunner().invoke(app, ["run", f"{tmp_path / 'mine.py'}:train", "--gpus", "2"])
    assert result.exit_code == 1
    assert "ValueError: no data shard" in result.stderr
    assert "Raised by rank 1 of 2:\nFile cell, line 3, in train" in result.stderr
