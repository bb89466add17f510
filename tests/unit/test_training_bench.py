"""The training bench's own parts, at small sizes: nobody should find them broken on a borrowed GPU."""

import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.training.attention_candidates import compare
from tests.benchmarks.training.kernels import profile, profile_table
from tests.benchmarks.training.recipes import RECIPES, Recipe, configuration
from tests.benchmarks.training.report import plot, table, with_ratios


def config_of(recipe: Recipe, device: str):  # type: ignore[no-untyped-def]
    return configuration(recipe, device=device, strategy="ddp", workers=2, length=2048, steps=3, rows=None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_recipe_is_a_configuration(device: str) -> None:
    for recipe in RECIPES.values():
        config = config_of(recipe, device)
        assert config.optim.accumulation_steps(2) == 1
        assert config.recompute == recipe.changes["recompute"]
        assert config.compile is (device == "cuda" and recipe.changes.get("compile", True))


def test_the_first_recipe_is_the_notebooks() -> None:
    config = config_of(next(iter(RECIPES.values())), "cuda")
    found = (config.weights, config.attention, config.experts, config.optim.per_device_batch_size)
    assert found == ("bf16", "eager", "eager", 1)


@pytest.mark.parametrize("gib", [None, 20.5])
def test_table_and_plot(tmp_path: Path, gib: float | None) -> None:
    results = [
        {"recipe": name, "rows": 1, "tokens_per_s_per_gpu": rate, "mfu": gib and 0.5, "peak_gpu_gib": gib}
        | {"planned_gpu_gib": gib, "load_s": 3.0, "first_step_s": 40.0, "losses": [12.0, 11.5]}
        for name, rate in (("slow", 800.0), ("fast", 24_000.0))
    ]
    assert [result["ratio"] for result in with_ratios(results)] == [1, 30]
    lines = table(results).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1, "columns stand below each other"
    assert plot(results, "title", tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_profile_covers_an_expert_layer() -> None:
    lines = profile("tiny", "cpu", 16)
    assert all(line["ms"] > 0 for line in lines)
    assert {"layer, forward and backward", "candidate A: dequantise, grouped_mm"} <= {line["part"] for line in lines}
    assert len(profile_table(lines).splitlines()) == len(lines) + 1


def test_a_kernel_without_sinks_is_given_some() -> None:
    lines = compare(1, 160, "cpu", ("eager",))
    assert {line["layer"] for line in lines} == {"full", "sliding"}
    assert all(line["right"] for line in lines)


def test_the_script_is_a_script() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    names = script.read_text().split("recipes=(", 1)[1].split(")", 1)[0].split('"')[1::2]
    assert names
    assert set(names) <= set(RECIPES)
