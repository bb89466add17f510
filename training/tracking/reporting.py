"""What a run says while it trains: progress and metrics in the run directory, and in MLflow. Rank 0 alone."""

import math
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.errors import TrainingError
from training.run_dir import Phase, RunDir
from training.tracking.measures import Measures

PROGRESS_INTERVAL_S = 0.5
"""How often `progress.json` is replaced at most."""

_KEPT = ("loss", "learning_rate", "grad_norm", "epoch", "mean_token_accuracy", "entropy")


class Reporter(TrainerCallback):
    """Turns the trainer's log lines into `metrics.jsonl`, `progress.json` and MLflow metrics.

    Args:
        run_dir: of this run.
        log_metrics: called with `(metrics, step)`; must not raise for a failed line.
    """

    def __init__(self, run_dir: RunDir, log_metrics: Callable[[dict[str, float], int], None]):
        self.run_dir = run_dir
        self._log_metrics = log_metrics
        self._on_begin: Callable[[], None] = lambda: None
        self._clock = _Clock()
        self._written_at = 0.0
        self._tokens_before = 0.0  # of the attempts that this one goes on from

    def watch(
        self,
        measures: Measures,
        *,
        world_size: int,
        mfu: Callable[[float], float | None],
        load: dict[str, float],
        on_begin: Callable[[], None],
    ) -> None:
        """What to report of the trainer.

        Args:
            measures: of the trainer, read before each log line.
            mfu: model FLOPs utilisation at so many tokens/s per GPU.
            load: seconds, bytes and memory of loading, logged with the first line.
            on_begin: called once all is set up.
        """
        self._measures, self._world_size, self._mfu, self._load = measures, world_size, mfu, dict(load)
        self._on_begin = on_begin

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._on_begin()
        self._tokens_before = next(
            (line["num_tokens"] for line in reversed(self.run_dir.metrics()) if line["step"] <= state.global_step), 0.0
        )
        self._clock.start(state.global_step, self._measures.tokens)
        self._log_metrics(self._load, state.global_step)
        self._write_progress(state, {}, message="training")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        values = {name: float(logs[name]) for name in _KEPT if logs and logs.get(name) is not None}
        if "loss" not in values:
            return
        if not math.isfinite(values["loss"]) or not math.isfinite(values.get("grad_norm", 0.0)):
            raise TrainingError(
                f"step {state.global_step}: loss {values['loss']}, gradient norm {values.get('grad_norm')}",
                hint="Lower optim.learning_rate, or look for broken rows.",
            )
        values |= self._speed(state.global_step) | self._measures.last
        self.run_dir.append_metrics({"step": state.global_step, "time": time.time(), **values, **self._load})
        self._load = {}
        self._log_metrics(values, state.global_step)
        self._write_progress(state, values)

    def _speed(self, step: int) -> dict[str, float]:
        tokens = self._measures.tokens
        rate = self._clock.tick(step, tokens, self._measures.ended_s)
        found = {"num_tokens": self._tokens_before + tokens, "step_s": self._clock.step_s}
        if rate is not None:
            found["tokens_per_s_per_gpu"] = rate / self._world_size
            utilisation = self._mfu(found["tokens_per_s_per_gpu"])
            found |= {} if utilisation is None else {"mfu": utilisation}
        return found

    def _write_progress(self, state: TrainerState, values: dict[str, float], **more: Any) -> None:
        last = state.global_step >= state.max_steps
        if time.monotonic() - self._written_at < PROGRESS_INTERVAL_S and not last:
            return
        self._written_at = time.monotonic()
        shown = ("loss", "tokens_per_s_per_gpu", "peak_gpu_gib")
        self.run_dir.write_progress(
            Phase.RUNNING,
            step=state.global_step,
            total_steps=state.max_steps,
            percent=round(100 * state.global_step / max(state.max_steps, 1), 1),
            eta_s=self._clock.eta_s(state.max_steps - state.global_step),
            **{name: values[name] for name in shown if name in values},
            **more,
        )


class _Clock:
    """Step times and token rates; the first step, which compiles and warms up, is left out."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._last = (time.monotonic(), 0, 0)
        self._warm: tuple[float, int] | None = None

    def start(self, step: int, tokens: int) -> None:
        self._last, self._warm = (time.monotonic(), step, tokens), None

    def tick(self, step: int, tokens: int, now: float) -> float | None:
        """Tokens per second since the last tick; None at the first. `now` is when `step` ended, by `time.monotonic`."""
        then, before, counted = self._last
        self._last = (now, step, tokens)
        self.step_s = (now - then) / max(step - before, 1)
        if self._warm is None:
            self._warm = (now, step)
            return None
        return (tokens - counted) / max(now - then, 1e-9)

    def eta_s(self, remaining: int) -> float | None:
        """Seconds until `remaining` steps are done, at the mean of the warm ones."""
        if self._warm is None or self._last[1] <= self._warm[1]:
            return None
        return round((self._last[0] - self._warm[0]) / (self._last[1] - self._warm[1]) * remaining, 1)
