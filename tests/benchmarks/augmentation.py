"""Whether the options for training rows help, on the small base: `python -m tests.benchmarks.augmentation [--steps N] [--json FILE]`.

Each option meets the fault that it is for, made in the bundled rows, and is trained on with and without it; what counts is trace match on
the bundled held-out prompts, English left out. Eight runs, of a minute or two each on a quiet core. `augmentation.json` holds the last ones.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from training.config import DataConfig, TrainConfig, load_config
from training.data import Row, held_out_rows, load_rows, tokenize
from training.generate import generate
from training.harmony import Renderer, with_reasoning_language
from training.language import NAMES, language_name
from training.merge import merge
from training.model.load import load
from training.reasoning.judge import judge
from training.reasoning.metrics import report
from training.rows.augment import augment
from training.rows.prompt_sets import prompts_for
from training.run_dir import RunDir
from training.worker import PROBE, train_loop

Wording = Callable[[str], str]

PROMPTS = 100
SHOWN = ("trace_match", "trace_match_low", "trace_match_high")


def english_name(code: str) -> str:
    return language_name(code)


def other_names(code: str) -> str:
    """The native name, or the code: by the parity of the code's letters, so that both occur."""
    return NAMES[code][1] if sum(map(ord, code)) % 2 and len(NAMES[code]) > 1 else code


def poisoned(rows: Sequence[Row]) -> list[Row]:
    """Every third row that does not ask for English thinks in it all the same."""
    english = [row.messages[-1]["thinking"] for row in rows if row.reasoning_language == "en"]
    choices = random.Random(0)
    return [
        replace(row, messages=[*row.messages[:-1], row.messages[-1] | {"thinking": choices.choice(english)}])
        if row.reasoning_language != "en" and number % 3 == 0
        else row
        for number, row in enumerate(rows)
    ]


def lopsided(rows: Sequence[Row]) -> list[Row]:
    """All German and English rows, but only four of each other language."""
    left = dict.fromkeys(NAMES, 4) | {"de": len(rows), "en": len(rows)}
    kept = []
    for row in rows:
        code = row.reasoning_language or "en"
        left[code] -= 1
        if left[code] >= 0:
            kept.append(row)
    return kept


def line_last(rows: Sequence[Row]) -> list[Row]:
    """The line on the language after other instructions, which every row has."""
    moved = []
    for row in rows:
        line, _, rest = row.messages[0]["content"].partition("\n\n")
        system = f"{rest or 'Be friendly.'}\n\n{line}"
        moved.append(replace(row, messages=[{"role": "system", "content": system}, *row.messages[1:]]))
    return moved


def unchanged(rows: Sequence[Row]) -> list[Row]:
    return list(rows)


CASES: list[tuple[str, Callable[[Sequence[Row]], list[Row]], dict[str, Any], Wording]] = [
    ("every third row thinks in English", poisoned, {"drop_mismatched": True}, english_name),
    ("four rows of es, fr and it each", lopsided, {"balance_languages": True}, english_name),
    ("asked for by native name or code", unchanged, {"vary_language_names": True}, other_names),
    ("the line comes last in the rows", line_last, {"language_line": "first"}, english_name),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.augmentation")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run")
    parser.add_argument("--json", type=Path, help="where the figures go as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config("tiny", [f"optim.max_steps={arguments.steps}", "scaling.workers=1"]).resolved()
    console = Console()
    table = Table("rows", "option", "without", "with", title=f"Trace match outside of English, {arguments.steps} steps")
    results: dict[str, Any] = {"steps": arguments.steps, "cases": []}
    for name, fault, option, wording in CASES:
        case: dict[str, Any] = {"rows": name, "option": option}
        for side, data in (("without", {}), ("with", option)):
            figures = measure(config, fault, data, wording)
            case[side] = {"prompts": figures["prompts"]} | {key: round(figures[key], 4) for key in SHOWN}
            console.print(json.dumps({"rows": name, side: case[side]}))
        results["cases"].append(case)
        table.add_row(name, " ".join(option), *(_shown(case[side]) for side in ("without", "with")))
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(table)


def _shown(figures: dict[str, Any]) -> str:
    share, low, high = (f"{figures[key]:.0%}" for key in SHOWN)
    return f"{share} ({low} to {high})"


def measure(
    config: TrainConfig, fault: Callable[[Sequence[Row]], list[Row]], option: dict[str, Any], wording: Wording
) -> dict[str, Any]:
    """The figures of the small base after training on `fault(rows)` with `option`."""
    data = DataConfig.model_validate(config.data.model_dump() | option)
    rows, _ = augment(fault(load_rows(config.data)), data, config.optim.seed)
    base = Path(config.model.path)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir.create(Path(folder) / "run", config)
        renderer = Renderer(AutoTokenizer.from_pretrained(base), date(2026, 1, 2))  # type: ignore[arg-type]
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(tokenize(rows, renderer, data).examples).save_to_disk(str(run_dir.data))
        (run_dir.root / PROBE).write_text("probe")
        train_loop({"run_dir": run_dir.root, "base": base, "probe": "probe"})
        merge(base, run_dir.adapter, Path(folder) / "model", progress=False)
        model = load(Path(folder) / "model")
        prompts = prompts_for(held_out_rows(config.data), None, PROMPTS, config.optim.seed)
        answers = generate(
            model,
            renderer,
            [with_reasoning_language(p.question.messages, wording(p.reasoning_language)) for p in prompts],
            max_new_tokens=96,
            batch_size=PROMPTS // 2,
        )
    return report([judge(p, a.parsed, a.completion_tokens) for p, a in zip(prompts, answers, strict=True)])


if __name__ == "__main__":
    main()
