"""Configurations as people write them: what YAML's readers let pass is refused with its lines."""

from pathlib import Path

import pytest

from training.config import load_config
from training.errors import ConfigError
from training.yaml_text import load_yaml

TWICE = """\
model: {path: openai/gpt-oss-20b}
data: {path: ./rows.jsonl}
optim:
  learning_rate: 1.0e-3
  epochs: 2
  learning_rate: 2.0e-3
"""


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(TWICE, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"optim\.learning_rate is given twice, in line 4 and in line 6") as caught:
        load_config(path)
    assert str(path) in caught.value.message
    assert (caught.value.field, caught.value.hint[:4]) == ("optim.learning_rate", "Keep")


def test_a_section_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="optim is given twice, in line 1 and in line 3"):
        load_yaml("optim: {epochs: 1}\nname: x\noptim: {seed: 1}\n")


def test_an_override_that_gives_a_key_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(TWICE.replace("  learning_rate: 2.0e-3\n", ""), encoding="utf-8")
    with pytest.raises(ConfigError, match="override optim: seed is given twice") as caught:
        load_config(path, ["optim={seed: 1, seed: 2}"])
    assert caught.value.field == "optim"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: {x: 1}\nb: {x: 2}\n", {"a": {"x": 1}, "b": {"x": 2}}),
        ("- {x: 1}\n- {x: 2}\n", [{"x": 1}, {"x": 2}]),
        ("base: &base {x: 1, y: 1}\na: {<<: *base, x: 2}\n", {"base": {"x": 1, "y": 1}, "a": {"x": 2, "y": 1}}),
        ("", None),
    ],
)
def test_the_same_key_in_different_mappings_is_fine(text: str, value: object) -> None:
    assert load_yaml(text) == value
