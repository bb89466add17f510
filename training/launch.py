"""Starts the workers on Ray: placement, process group, restarts; and turns what went wrong into one clear error."""

import secrets
from contextlib import nullcontext
from pathlib import Path

from ray.exceptions import RayActorError, WorkerCrashedError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import PreemptingState, RestartingState
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2.api.config import ScalingConfig as RayScalingConfig
from ray.train.v2.api.exceptions import PreemptionError

from training.config import ModelConfig, ScalingConfig, TrainConfig
from training.durable.preemption import EVERY_STEP, request_checkpoint, save_on_sigterm, wait_for_checkpoint
from training.durable.run_mirror import RunMirror
from training.durable.stopping import stops_with_ray
from training.durable.storage import storage_url
from training.errors import PolythinkError, TrainingError
from training.plan import check_memory
from training.planning.sizes import find_sizes
from training.run_dir import Phase, RunDir
from training.worker import PROBE, Setup, train_loop

_DIED = (RayActorError, WorkerCrashedError)

START_TIMEOUT_S = 120
"""How long Ray Train waits for its workers to start before it tries again."""
ELASTIC_START_TIMEOUT_S = 60
"""The same for an elastic run: after a node is lost, the first try still counts on it."""


def worker_environment(config: TrainConfig) -> dict[str, str]:
    """Environment of every process of the run."""
    low, high = config.scaling.worker_range
    environment = {
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # its patched print confuses dill, which datasets fingerprints with
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(START_TIMEOUT_S if low == high else ELASTIC_START_TIMEOUT_S),
        "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": str(config.scaling.timeout_s),  # unset, a barrier waits for ever
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(config.scaling.timeout_s),  # a process that stands still
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }
    if config.scaling.device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment


def launch(config: TrainConfig, run_dir: RunDir, base: Path, mlflow: tuple[str | None, str | None]) -> None:
    """Trains in Ray workers and returns when `run_dir.adapter` is written.

    Args:
        base: directory of the base model on this node.
        mlflow: run id and tracking URI that rank 0 logs to.

    Raises:
        ConfigError: by the plan, a worker does not fit the GPU that was asked for.
        TrainingError: a worker failed; the message is its own. A PolythinkError of a worker is raised as it is.
    """
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.config import FailureConfig, RunConfig
    from ray.train.v2.api.exceptions import TrainingFailedError

    check_memory(config, find_sizes(ModelConfig(path=str(base.absolute()))))
    mirror = RunMirror.of(run_dir)
    setup = Setup(run_dir.root, base, secrets.token_hex(16), *mlflow, storage_url())
    (run_dir.root / PROBE).write_text(setup.probe)
    if mirror:
        mirror.push_inputs(run_dir.root / PROBE)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=vars(setup),
        scaling_config=ray_scaling(config.scaling),
        torch_config=TorchConfig(
            backend="gloo" if config.scaling.device == "cpu" else "nccl", timeout_s=int(config.scaling.timeout_s)
        ),
        run_config=RunConfig(  # type: ignore[arg-type]  # Ray's stub names the class of its first version
            name=f"attempt-{secrets.token_hex(4)}",  # a name used before would make Ray continue that run's state
            storage_path=f"{mirror.url if mirror else run_dir.root}/ray_train",
            failure_config=FailureConfig(
                max_failures=config.scaling.max_failures,
                max_preemption_failures=-1
                if config.scaling.max_preemptions is None
                else config.scaling.max_preemptions,
            ),
            callbacks=[_CheckpointBeforeEnd(run_dir.root)],  # type: ignore[list-item]  # Ray takes its own kinds too
        ),
    )
    run_dir.write_progress(Phase.STARTING, message=f"waiting for {_workers(config.scaling)}")
    try:
        with stops_with_ray(), mirror.followed() if mirror else nullcontext():
            trainer.fit()
    except TrainingFailedError as error:
        raise worker_error(error) from error


def _workers(scaling: ScalingConfig) -> str:
    low, high = scaling.worker_range
    number = str(low) if low == high else f"{low} to {high}"
    return f"{number} workers with {'a GPU' if scaling.device == 'cuda' else f'{scaling.cpus_per_worker:g} CPU'} each"


def ray_scaling(scaling: ScalingConfig) -> RayScalingConfig:
    """`scaling` in Ray Train's words; a range of workers is elastic."""
    low, high = scaling.worker_range
    gpus = {"GPU": 1} if scaling.device == "cuda" else {}
    return RayScalingConfig(
        num_workers=low if low == high else (low, high),  # type: ignore[arg-type]  # Ray's annotation lacks the elastic pair
        use_gpu=scaling.device == "cuda",
        accelerator_type=scaling.accelerator_type,
        resources_per_worker={"CPU": scaling.cpus_per_worker, **gpus},
        placement_strategy=scaling.placement,
        elastic_resize_monitor_interval_s=scaling.resize_check_s,
    )


class _CheckpointBeforeEnd(WorkerGroupCallback, ControllerCallback):
    """In Ray Train's controller: asks for a checkpoint before an attempt ends that need not fail.

    Ray's public callbacks have no such hooks; these are the ones its own parts use.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._training = False

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        worker_group.execute(save_on_sigterm, self._run_dir)

    def after_worker_group_training_start(self, worker_group: WorkerGroup) -> None:
        self._training = True

    def before_worker_group_shutdown(self, worker_group: WorkerGroup) -> None:
        self._training = False

    def before_controller_execute_resize_decision(self, resize_decision: object) -> None:
        if self._training:
            request_checkpoint(self._run_dir)
            wait_for_checkpoint(self._run_dir)

    def after_controller_state_update(self, previous_state: object, current_state: object) -> None:
        if isinstance(current_state, PreemptingState):
            request_checkpoint(self._run_dir, EVERY_STEP)
        elif isinstance(current_state, RestartingState):
            error = current_state.training_failed_error
            # Otherwise a worker is dead: the others wait for it, and no step would end to save after.
            self._training = isinstance(error, PreemptionError) and error.drain_timed_out


def worker_error(error: BaseException) -> PolythinkError:
    """The first worker's own error, found inside Ray's; a PolythinkError is kept, anything else becomes a TrainingError."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    for rank, failure in sorted(failures.items(), key=lambda item: _secondary(item[1])):
        cause = _root(failure)
        if isinstance(cause, PolythinkError):
            return cause
        return TrainingError(f"worker {rank}: {type(cause).__name__}: {cause}", hint=_hint(cause))
    cause = _root(error)
    if isinstance(cause, PolythinkError):
        return cause
    return TrainingError(f"{type(cause).__name__}: {cause}", hint=_hint(cause))


def _root(error: BaseException) -> BaseException:
    """The error inside the wrappers that Ray puts around a worker's."""
    while True:
        inner = getattr(error, "cause", None) or getattr(error, "health_check_failure", None) or error.__cause__
        if not isinstance(inner, BaseException) or inner is error:
            return error
        error = inner


def _secondary(error: BaseException) -> bool:
    """Whether a failure is likely the echo of another worker's: its peers' connections break."""
    root = _root(error)
    text = str(root)
    return not isinstance(root, _DIED) and ("Connection" in text or "gloo" in text.lower() or "NCCL" in text)


def _hint(cause: BaseException) -> str:
    text = f"{type(cause).__name__} {cause}"
    if "OutOfMemory" in text or "out of memory" in text:
        return "Lower optim.per_device_batch_size or data.max_length, set recompute=full, or use strategy=fsdp2."
    if isinstance(cause, _DIED):
        return "A worker process was killed; scaling.max_failures restarts from the last checkpoint."
    return "The driver's log has the worker's traceback."
