"""One training run from a run directory to a merged, proven, registered model: the path of a job, in order."""

import contextlib
import fcntl
import hashlib
import logging
import shutil
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import MAX_TOKENS, ModelConfig, TrainConfig
from training.data import Row, is_longer, load_rows, split_held_out, tokenize
from training.durable import checkpoints
from training.durable.run_mirror import RunMirror, keep_upload
from training.durable.stopping import stop_on_sigterm, stops_seen, take_sigterm
from training.errors import DataError, PolythinkError, StorageError, TrainingError
from training.harmony import Renderer
from training.launch import launch
from training.merging.adapter import write_provenance
from training.model.base import fetch
from training.on_ray import check_own_gpu, on_device, start_ray
from training.plan import check_evaluation
from training.planning.sizes import find_sizes
from training.reasoning.metrics import gate, tags
from training.run_dir import Phase, RunDir, read_json, write_json
from training.tracking.patience import limit_patience

if TYPE_CHECKING:
    from training.tracking.run import Tracking

SUMMARY = "summary.json"
"""In the data directory: what became of the rows, and their fingerprint."""

TRACKING_WAIT_S = 300.0
TRACKING_PAUSE_S = 2.0

logger = logging.getLogger(__name__)


def run(run_dir: RunDir) -> dict[str, Any]:
    """Runs the configuration in `run_dir` and returns its result, which `result.json` holds as well.

    Raises:
        PolythinkError: the run failed; `result.json` says FAILED with the same error.
        Stopped: SIGTERM; the MLflow run is ended as KILLED and no result is written.
    """
    config = run_dir.config()
    with _only_driver(run_dir), stop_on_sigterm(), _mirrored(run_dir):
        attempt = int(run_dir.progress().get("attempt", 0)) + 1
        run_dir.result_path.unlink(missing_ok=True)
        run_dir.write_progress(Phase.STARTING, attempt=attempt, message="checking")
        tracking: Tracking | None = None
        try:
            with stops_seen():
                tracking = start_tracking(config, run_dir)
                result = _run(config, run_dir, tracking)
        except PolythinkError as error:
            _fail(run_dir, error, tracking)
            raise
        except Exception as error:
            logger.error("The driver failed:\n%s", traceback.format_exc())
            failure = TrainingError(f"{type(error).__name__}: {error}", hint="The driver's log has the traceback.")
            _fail(run_dir, failure, tracking)
            raise failure from error
        except BaseException:
            if tracking:
                tracking.end("KILLED")
            raise
        tracking.end("FINISHED")
        run_dir.write_result(Phase.SUCCEEDED, **result)
        run_dir.write_progress(Phase.SUCCEEDED, percent=100.0, eta_s=0, message="done")
        return result


def start_tracking(config: TrainConfig, run_dir: RunDir) -> "Tracking":
    """The run in MLflow, begun or reopened. A server that does not answer is waited for: it may have gone down with the
    Ray head that this driver goes on from.

    Raises:
        StorageError: it did not answer within TRACKING_WAIT_S.
    """
    from training.tracking.run import Tracking

    limit_patience()
    deadline = time.monotonic() + TRACKING_WAIT_S
    while True:
        try:
            tracking = Tracking.start(config, run_dir, run_dir.progress().get("mlflow_run_id"))
        except StorageError as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("Waiting for MLflow: %s", error)
            run_dir.write_progress(Phase.STARTING, message=f"waiting for MLflow: {error.message}")
            time.sleep(TRACKING_PAUSE_S)
        else:
            run_dir.write_progress(Phase.STARTING, mlflow_run_id=tracking.run_id)
            return tracking


def _run(config: TrainConfig, run_dir: RunDir, tracking: Any) -> dict[str, Any]:
    from training.evaluate import why_not_evaluated
    from training.reasoning.watch import leave_prompts

    start_ray(config)
    take_sigterm()  # Ray's core took it when it started
    check_own_gpu(config)
    run_dir.write_progress(Phase.STARTING, message=f"fetching {config.model.path}")
    base = fetch(config.model)
    train, held_out, renderer, data = _prepare(config, run_dir, base)
    not_evaluated = why_not_evaluated(config.evaluation, held_out)
    if not not_evaluated:
        check_evaluation(config, find_sizes(ModelConfig(path=str(base))))
    leave_prompts(config, run_dir, held_out)
    tracking.log_dataset(config.data.path, config.data.revision, data["fingerprint"], data["rows"])

    if not (run_dir.adapter / "adapter_config.json").is_file():  # a run resumed after training goes on from here
        launch(config, run_dir, base, (tracking.run_id, tracking.uri))
        write_provenance(run_dir.adapter, base, model=config.model.path, revision=config.model.revision)

    model_dir = tracking.model_dir
    merged = _merge(config, run_dir, base, model_dir)
    proof = _prove(config, base, run_dir, model_dir, [*held_out, *train], renderer)

    evaluation = None if not_evaluated else _evaluate(config, run_dir, base, model_dir, held_out)
    registration = _register(config, run_dir, tracking, model_dir, merged, evaluation)
    result = {
        "adapter": str(run_dir.adapter),
        "model": str(model_dir),
        **registration,
        "evaluation": evaluation,
        "not_evaluated": not_evaluated,
        "merge": merged,
        "proof": proof,
        "data": data,
        "effective": read_json(run_dir.effective_path) or {},
        "mlflow_run_id": tracking.run_id,
        "mlflow_uri": tracking.uri,
    }
    tracking.log_result(result, tuple(run_dir.evaluation.glob("*.png")))
    return result


def _prepare(config: TrainConfig, run_dir: RunDir, base: Path) -> tuple[list[Row], list[Row], Renderer, dict[str, Any]]:
    """Checks, splits and tokenises the data into `run_dir.data`; says what became of the rows."""
    import datasets
    from transformers import AutoConfig, AutoTokenizer

    from training.rows.augment import augment, without_near_duplicates
    from training.rows.packing import pack
    from training.rows.prompt_sets import answerable

    run_dir.write_progress(Phase.STARTING, message=f"reading {config.data.path}")
    for path in filter(None, (config.data.path, config.data.held_out_path)):
        keep_upload(path)
    train, held_out = split_held_out(load_rows(config.data), config.data, config.optim.seed)
    held_out = without_near_duplicates(held_out, train)
    train, augmented = augment(train, config.data, config.optim.seed)
    renderer = Renderer(AutoTokenizer.from_pretrained(base), config.data.current_date)  # type: ignore[arg-type]
    if config.evaluation:
        context = getattr(AutoConfig.from_pretrained(base), "max_position_embeddings", None)
        held_out = answerable(held_out, renderer, context, config.evaluation.max_new_tokens)
    tokenized = tokenize(train, renderer, config.data)
    examples: list[dict[str, list[int]]] = tokenized.examples
    if config.data.packing:
        examples = pack(examples, config.data.max_length)
    digest = hashlib.sha256(repr(tokenized.examples).encode()).hexdigest()
    summary = {
        **tokenized.summary(),
        "sequences": len(examples),
        "held_out": len(held_out),
        "fingerprint": digest,
    } | augmented
    logger.info("Data: %s", summary)
    _refuse_other_data(run_dir, digest)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(examples).save_to_disk(str(run_dir.data))
    write_json(run_dir.data / SUMMARY, summary)
    return train, held_out, renderer, summary


def _refuse_other_data(run_dir: RunDir, fingerprint: str) -> None:
    """A resumed run goes on at a position in its data, which must be the same data."""
    before = read_json(run_dir.data / SUMMARY)
    if before and before["fingerprint"] != fingerprint and checkpoints.newest(run_dir.checkpoints):
        raise DataError(
            f"the rows are not those that {run_dir.id} began with",
            hint="Restore them, or start a new run.",
            field="data.path",
        )


def _merge(config: TrainConfig, run_dir: RunDir, base: Path, model_dir: Path) -> dict[str, Any]:
    """Merges, unless an earlier attempt of this run did; what is there of another adapter is replaced."""
    from training.merge import finished_merge, merge

    run_dir.write_progress(Phase.MERGING, message="merging the adapter into the base")
    arguments: dict[str, Any] = {"format": config.merge_format}
    report = finished_merge(base, run_dir.adapter, model_dir, **arguments) if model_dir.is_dir() else None
    if report is None:
        shutil.rmtree(model_dir, ignore_errors=True)
        report = merge(base, run_dir.adapter, model_dir, **arguments)
    return report.as_dict()


def _prove(
    config: TrainConfig, base: Path, run_dir: RunDir, model_dir: Path, rows: list[Row], renderer: Renderer
) -> dict[str, Any]:
    from training.proof import prove

    run_dir.write_progress(Phase.MERGING, message="proving the merged model")
    short = islice((row for row in rows if not is_longer(renderer.tokenizer, row.texts, MAX_TOKENS)), 8)
    read = [(renderer.training_ids(row.messages)[0][: config.data.max_length], row) for row in short]
    read.sort(key=lambda entry: len(entry[0]))  # the first one's prompt is answered as well
    ids = [row_ids for row_ids, _ in read]
    smoke = renderer.prompt_ids(read[0][1].messages[:-1])
    arguments = {"adapter": run_dir.adapter, "merged": model_dir, "rows_ids": ids, "smoke_ids": smoke}
    return on_device(config, prove, base, **arguments).as_dict()


def _evaluate(config: TrainConfig, run_dir: RunDir, base: Path, model_dir: Path, held_out: list[Row]) -> dict[str, Any]:
    from training.evaluate import evaluate_before_after

    run_dir.write_progress(Phase.EVALUATING, message="measuring the reasoning language")
    arguments = {"config": config, "run_dir": run_dir, "model": model_dir, "held_out": held_out}
    found: dict[str, Any] = on_device(config, evaluate_before_after, base, **arguments)
    return found


def _register(
    config: TrainConfig,
    run_dir: RunDir,
    tracking: Any,
    model_dir: Path,
    merged: dict[str, Any],
    evaluation: dict[str, Any] | None,
) -> dict[str, str | None]:
    """Registers the model with its figures as tags, unless it misses its gate."""
    miss = gate(evaluation, config.evaluation) if config.evaluation else None
    if miss:
        return {"registered_model": None, "registration": "gated", "reason": miss}
    described = {
        "job_id": run_dir.id,
        "base": config.model.path,
        "base_revision": config.model.revision or "",
        "adapter_sha256": merged["adapter_sha256"],
    }
    return tracking.register(model_dir, described | tags(evaluation))  # type: ignore[no-any-return]


def _fail(run_dir: RunDir, error: PolythinkError, tracking: Any) -> None:
    adapter = {"adapter": str(run_dir.adapter)} if (run_dir.adapter / "adapter_config.json").is_file() else {}
    run_dir.write_result(Phase.FAILED, error=error.as_dict(), **adapter)
    run_dir.write_progress(Phase.FAILED, message=error.message)
    if tracking:
        tracking.end("FAILED")


@contextlib.contextmanager
def _only_driver(run_dir: RunDir) -> Iterator[None]:
    """Holds the run directory's lock; the kernel frees it when the process ends, however it ends."""
    with run_dir.lock_path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"another driver is running {run_dir.root}", hint="Wait for it, or cancel it.") from None
        yield


@contextlib.contextmanager
def _mirrored(run_dir: RunDir) -> Iterator[None]:
    """Brings the run back from the storage URL first, and keeps there how it ended."""
    mirror = RunMirror.of(run_dir)
    if mirror:
        mirror.restore()
    try:
        yield
    finally:
        if mirror:
            mirror.push_outcome()
