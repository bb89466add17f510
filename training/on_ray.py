"""The driver on its Ray: joined or started, and tasks on the job's own devices, where its models lie."""

import logging
import os
from pathlib import Path
from typing import Any

from training.config import ModelConfig, TrainConfig
from training.durable.stopping import stops_with_ray
from training.durable.storage import VARIABLE, storage_url
from training.errors import ConfigError, PolythinkError, TrainingError
from training.launch import worker_environment
from training.model.base import on_this_node

TASK_RETRIES = 2
"""Of merge proofs and evaluations whose process or node dies; their own errors are not tried again."""

RAY_START_TRIES = 3
"""Ray gives the processes of a local cluster 30 s to start, which a busy machine may not keep."""

logger = logging.getLogger(__name__)


def on_device(job: TrainConfig, function: Any, base: Path, **arguments: Any) -> Any:
    """`function(base=base, **arguments)` as a Ray task on one of the job's own devices, which may be another node's where nodes
    share a disk; its PolythinkErrors arrive as they are. It is begun again where its process or node is lost."""
    import ray
    from ray.exceptions import RayTaskError

    gpus = 1 if job.scaling.device == "cuda" else 0
    task = ray.remote(num_cpus=job.scaling.cpus_per_worker, num_gpus=gpus, max_retries=TASK_RETRIES)(_with_base)
    options = {"name": function.__name__, "scheduling_strategy": where_models_lie()}
    try:
        with stops_with_ray():
            return ray.get(task.options(**options).remote(function, job.model, base, arguments))
    except RayTaskError as error:
        cause = error.cause
        raise (
            cause if isinstance(cause, PolythinkError) else TrainingError(f"{type(cause).__name__}: {cause}")
        ) from error


def where_models_lie() -> Any:
    """Ray's strategy for tasks that read the merged model: this node's, where nodes share a storage URL in the place of a disk."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if storage_url() is None:
        return "DEFAULT"
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def check_own_gpu(config: TrainConfig) -> None:
    """
    Raises:
        ConfigError: the merged model will lie on this node alone, which has no GPU to prove it with.
    """
    import ray

    if storage_url() is None or config.scaling.device == "cpu":
        return
    own = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == own and node["Resources"].get("GPU") for node in ray.nodes()):
        raise ConfigError(
            f"scaling.device=cuda, and node {os.uname().nodename}, where the driver runs, has no GPU: with {VARIABLE} the merged "
            "model lies there alone, and is proven and evaluated there",
            hint=f"Start Ray's head on a node with a GPU; or let all nodes mount POLYTHINK_HOME, and unset {VARIABLE}.",
            field="scaling.device",
        )


def _with_base(function: Any, model: ModelConfig, base: Path, arguments: dict[str, Any]) -> Any:
    return function(base=on_this_node(model, base), **arguments)


def start_ray(config: TrainConfig) -> None:
    """Joins the cluster this driver was started in, or starts one on loopback for this run alone."""
    import ray

    environment = worker_environment(config)
    os.environ.update(environment)  # Ray Train's own settings are read in the driver
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS") or "local"
    low, _ = config.scaling.worker_range
    cpus = max(os.cpu_count() or 1, int(low * config.scaling.cpus_per_worker)) + 1
    alone: dict[str, Any] = {"num_cpus": cpus} if address == "local" else {}
    for tries_left in reversed(range(RAY_START_TRIES)):
        try:
            ray.init(address=address, runtime_env={"env_vars": environment}, log_to_driver=True, **alone)
            return
        except Exception as error:  # Ray has no narrower class for it
            if "timed out during startup" not in str(error) or not tries_left:
                raise
            logger.warning("Ray did not start in time, trying again: %s", error)
            ray.shutdown()
