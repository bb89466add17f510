"""Reasoning language, measured: a model answers prompts that ask for it, and each answer is judged (`training.reasoning.metrics`)."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import EvaluationConfig, TrainConfig
from training.errors import ConfigError
from training.harmony import Renderer, with_reasoning_language
from training.language import language_name
from training.reasoning.judge import judge
from training.reasoning.metrics import Judged, report
from training.rows.prompt_sets import Prompt, prompts_for
from training.run_dir import Phase, RunDir, write_json

if TYPE_CHECKING:
    from training.data import Row

SAMPLE_CHARACTERS = 600

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with prompts done and prompts in all."""


@dataclass(frozen=True)
class Settings:
    """How answers are generated; the same settings and seed give the same answers."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    batch_size: int = 16
    seed: int = 42
    weights: str = "bf16"
    precision: str = "fp32"
    device: str = "cpu"
    current_date: date | None = None
    """The date that the template prints; None is today."""
    use_cache: bool = True


@dataclass(frozen=True)
class Evaluation:
    """A model's judged responses, and the settings they were made with."""

    responses: list[Judged]
    settings: Settings

    def as_dict(self) -> dict[str, Any]:
        return {**report(self.responses), "settings": json.loads(json.dumps(asdict(self.settings), default=str))}


def why_not_evaluated(wanted: EvaluationConfig | None, held_out: "Sequence[Row]") -> str | None:
    """Why the reasoning language will not be measured, said before anything is spent; None where it will be.

    Rows without a language are no fault of a job that never spoke of its evaluation.

    Raises:
        ConfigError: an evaluation was configured, and nothing names a language to ask for.
    """
    if wanted is None:
        return "evaluation is null"
    if not held_out:
        return "there are no held-out rows"
    if wanted.languages or any(row.reasoning_language for row in held_out):
        return None
    reason = (
        f"none of the {len(held_out)} held-out rows names a reasoning language, and evaluation.languages is not set"
    )
    if wanted != EvaluationConfig():  # the resolved configuration holds the defaults as well
        raise ConfigError(
            f"evaluation.languages: {reason}",
            hint="Name the languages to ask for, such as evaluation.languages=[German], or set evaluation=null.",
            field="evaluation.languages",
        )
    logger.warning("The reasoning language will not be measured: %s", reason)
    return reason


def evaluate_before_after(
    config: TrainConfig, run_dir: RunDir, base: Path, model: Path, held_out: "Sequence[Row]"
) -> dict[str, Any]:
    """Asks the base and the tuned model the same prompts; writes all responses, figures and samples to `run_dir.evaluation`.

    Takes up where an interrupted call stopped. `{before, after, samples}`, each of the first two as `training.reasoning.metrics.report`.

    Raises:
        PolythinkError: no prompts, a language that is none, a model that cannot be loaded.
    """
    from training.reasoning.figures import heat_maps

    wanted = config.evaluation or EvaluationConfig()
    seed = config.optim.seed
    prompts = prompts_for(held_out, wanted.languages, wanted.prompts, seed)
    on_date = config.data.current_date
    settings = Settings(
        max_new_tokens=wanted.max_new_tokens,
        temperature=wanted.temperature,
        batch_size=wanted.batch_size,
        seed=seed,
        # A GPU reads packed experts as they are: the same numbers as dequantised ones, in a quarter of the memory.
        weights="mxfp4" if config.scaling.device == "cuda" else "bf16",
        precision=config.precision,
        device=config.scaling.device,
        current_date=on_date if isinstance(on_date, date) else None,
    )
    evaluations = {}
    for name, directory in (("before", base), ("after", model)):
        progress = _progress_writer(run_dir, name)
        evaluations[name] = evaluate(directory, prompts, settings, run_dir.evaluation / f"{name}.jsonl", progress)
    figures = {name: evaluation.as_dict() for name, evaluation in evaluations.items()}
    result = {**figures, "samples": side_by_side(evaluations["before"], evaluations["after"])}
    write_json(run_dir.evaluation / "evaluation.json", result)
    heat_maps({f"{name} training": figure for name, figure in figures.items()}, run_dir.evaluation / "trace_match.png")
    return result


def evaluate(
    model: Path,
    prompts: Sequence[Prompt],
    settings: Settings,
    responses_path: Path | None = None,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Answers of the model in a directory to `prompts`, judged.

    Args:
        responses_path: a JSONL file that every batch is added to; batches that it holds of the same model, prompts and settings are
            taken from it, anything else in it is replaced.
    """
    made_with = {"model": _identity(model), "settings": asdict(settings), "prompts": [prompt.id for prompt in prompts]}
    record = _Record(responses_path, made_with, settings.batch_size)
    done = record.responses
    rest = list(prompts[len(done) :])
    if rest:
        from transformers import AutoTokenizer

        from training.model.load import load

        weights = settings.weights if _is_packed(model) else "bf16"
        loaded = load(model, weights=weights, precision=settings.precision, device=settings.device)  # type: ignore[arg-type]
        renderer = Renderer(AutoTokenizer.from_pretrained(model), settings.current_date)  # type: ignore[arg-type]
        while rest:
            batch, rest = rest[: settings.batch_size], rest[settings.batch_size :]
            responses = answer(loaded, renderer, batch, settings, first=len(done))
            record.add(responses)
            done += responses
            if on_progress:
                on_progress(len(done), len(prompts))
    return Evaluation(done, settings)


def answer(
    model: Any, renderer: Renderer, prompts: Sequence[Prompt], settings: Settings, first: int = 0
) -> list[Judged]:
    """Answers of a loaded model to one batch of prompts, judged; `first` counts the prompts before it, and shifts the seed."""
    from training.generate import generate

    generations = generate(
        model,
        renderer,
        [with_reasoning_language(p.question.messages, language_name(p.reasoning_language)) for p in prompts],
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        seed=settings.seed + first,
        batch_size=settings.batch_size,
        use_cache=settings.use_cache,
    )
    return [judge(p, g.parsed, g.completion_tokens) for p, g in zip(prompts, generations, strict=True)]


def side_by_side(before: Evaluation, after: Evaluation, count: int = 10) -> list[dict[str, Any]]:
    """The same prompts with both models' reasoning and answer, one of each asked language in turn, long ones cut."""
    by_id = {response.prompt_id: response for response in before.responses}
    by_language: dict[str, int] = {}
    order = []
    for response in after.responses:
        seen = by_language[response.reasoning_language] = by_language.get(response.reasoning_language, 0) + 1
        order.append((seen, response.reasoning_language, response))
    pairs = [(by_id[response.prompt_id], response) for _, _, response in sorted(order, key=lambda entry: entry[:2])]
    return [
        {
            "question": after_response.question,
            "reasoning_language": after_response.reasoning_language,
            **{name: _sample(response) for name, response in (("before", before_response), ("after", after_response))},
        }
        for before_response, after_response in pairs[:count]
    ]


def _sample(response: Judged) -> dict[str, Any]:
    return {
        "reasoning": response.reasoning[:SAMPLE_CHARACTERS],
        "answer": response.answer[:SAMPLE_CHARACTERS],
        "detected": response.detected,
        "matches": response.matches,
    }


class _Record:
    """Responses on disk, one a line under a line that says what they are answers to. Without a path nothing is kept."""

    def __init__(self, path: Path | None, made_with: dict[str, Any], batch_size: int):
        self._path = path
        self.responses: list[Judged] = []
        if path is None:
            return
        header = json.dumps(made_with, default=str)
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        if lines[:1] == [header]:
            whole = lines[1:-1]  # after the last line end stands nothing, or a line that was being written
            kept = len(whole) if len(whole) == len(made_with["prompts"]) else len(whole) // batch_size * batch_size
            self.responses = [Judged(**json.loads(line)) for line in whole[:kept]]  # whole batches: they share a seed
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.partial")
        beside.write_text(header + "\n" + _lines(self.responses), encoding="utf-8")
        beside.replace(path)

    def add(self, responses: Sequence[Judged]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_lines(responses))


def _lines(responses: Sequence[Judged]) -> str:
    return "".join(json.dumps(asdict(response), ensure_ascii=False) + "\n" for response in responses)


def _identity(model: Path) -> list[Any]:
    """Changes with the files of a model, without reading them."""
    return [str(model), *sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in model.iterdir())]


def _is_packed(model: Path) -> bool:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def _progress_writer(run_dir: RunDir, name: str) -> Progress:
    start = time.monotonic()
    asked = {"before": "the base", "after": "the tuned model"}[name]

    def write(done: int, total: int) -> None:
        eta_s = round((time.monotonic() - start) / done * (total - done), 1)
        run_dir.write_progress(Phase.EVALUATING, message=f"asking {asked}: {done} of {total} prompts", eta_s=eta_s)

    return write
