"""The reasoning language while a model trains: every so many steps a few held-out prompts, so that one sees it turn."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.config import TrainConfig
from training.evaluate import Settings, answer
from training.harmony import Renderer
from training.reasoning.metrics import report
from training.rows.prompt_sets import Prompt, Question, prompts_for
from training.run_dir import RunDir, write_json

if TYPE_CHECKING:
    from training.data import Row

LogMetrics = Callable[[dict[str, float], int], None]


def leave_prompts(config: TrainConfig, run_dir: RunDir, held_out: "Sequence[Row]") -> None:
    """Writes the prompts that workers ask while they train; the driver calls this before it launches them."""
    wanted = config.evaluation
    if wanted is None or wanted.sample_every_steps is None or not held_out:
        return
    prompts = prompts_for(held_out, wanted.languages, wanted.sample_prompts, config.optim.seed)
    write_json(_prompts_path(run_dir), [asdict(prompt) for prompt in prompts])


def watch_of(
    config: TrainConfig, run_dir: RunDir, tokenizer: Any, rank: int, log_metrics: LogMetrics
) -> "LanguageWatch | None":
    """The callback of one worker, or None when nothing is to be watched.

    With FSDP2 every rank must have one, since a forward pass gathers from all; else rank 0 alone.
    """
    wanted = config.evaluation
    path = _prompts_path(run_dir)
    alone = config.scaling.strategy == "ddp"
    if wanted is None or wanted.sample_every_steps is None or not path.exists() or (alone and rank != 0):
        return None
    entries = json.loads(path.read_text(encoding="utf-8"))
    prompts = [Prompt(Question(**entry["question"]), entry["reasoning_language"]) for entry in entries]
    date = config.data.current_date
    return LanguageWatch(
        Renderer(tokenizer, None if isinstance(date, str) else date),
        prompts,
        # One by one and without a cache: training's masks know neither padding on the left nor earlier keys.
        Settings(max_new_tokens=wanted.max_new_tokens, batch_size=1, use_cache=False, seed=config.optim.seed),
        wanted.sample_every_steps,
        run_dir.evaluation / "during.jsonl" if rank == 0 else None,
        log_metrics if rank == 0 else lambda metrics, step: None,
    )


class LanguageWatch(TrainerCallback):
    """Asks the model `prompts` before the first step and every `every_steps`, greedily.

    Args:
        path: a JSONL file that gets one line a look: the step, the figures, the first traces; None writes nothing.
        log_metrics: called with the figures and the step.
    """

    def __init__(
        self,
        renderer: Renderer,
        prompts: Sequence[Prompt],
        settings: Settings,
        every_steps: int,
        path: Path | None,
        log_metrics: LogMetrics,
    ):
        self._renderer = renderer
        self._prompts = prompts
        self._settings = settings
        self._every_steps = every_steps
        self._path = path
        self._log_metrics = log_metrics

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if state.global_step == 0:
            self._look(model, 0)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if state.global_step % self._every_steps == 0:
            self._look(model, state.global_step)

    def _look(self, model: Any, step: int) -> None:
        training = model.training
        model.eval()
        responses = [
            response for prompt in self._prompts for response in answer(model, self._renderer, [prompt], self._settings)
        ]
        model.train(training)
        figures = report(responses)
        metrics = {f"sample/{name}": figures[name] for name in ("trace_match", "purity") if figures[name] is not None}
        self._log_metrics(metrics, step)
        if self._path is not None:
            traces = [{"reasoning_language": r.reasoning_language, "reasoning": r.reasoning[:300]} for r in responses]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **metrics, "traces": traces}, ensure_ascii=False) + "\n")


def _prompts_path(run_dir: RunDir) -> Path:
    return run_dir.evaluation / "sample_prompts.json"
