"""What Ray is told, and what its errors become for people."""

import json
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller.state import RestartingState, RunningState
from ray.train.v2.api.exceptions import PreemptionError, WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo

from training.config import ScalingConfig, load_config, parse_config
from training.durable.preemption import REQUEST
from training.errors import ConfigError, PolythinkError, StorageError, TrainingError
from training.launch import _CheckpointBeforeEnd, launch, ray_scaling, worker_environment, worker_error
from training.planning.sizes import KNOWN
from training.run_dir import RunDir


def scaling(**values: Any) -> ScalingConfig:
    return ScalingConfig.model_validate(values)


class TestScaling:
    def test_the_16_gpu_preset(self) -> None:
        ours = scaling(workers=16, device="cuda", accelerator_type="H100", placement="PACK")
        ray = ray_scaling(ours)
        assert (ray.num_workers, ray.use_gpu, ray.accelerator_type) == (16, True, "H100")
        assert ray.placement_strategy == "PACK"
        assert ray.resources_per_worker == {"CPU": 1, "GPU": 1}

    def test_elastic(self) -> None:
        ray = ray_scaling(scaling(workers=[8, 16], resize_check_s=5))
        assert (ray.min_workers, ray.max_workers) == (8, 16)
        assert ray.elasticity_enabled
        assert ray.elastic_resize_monitor_interval_s == 5

    def test_cpu_workers_ask_for_no_gpu(self) -> None:
        ray = ray_scaling(scaling(workers=2, device="cpu", cpus_per_worker=0.5))
        assert ray.use_gpu is False
        assert ray.resources_per_worker == {"CPU": 0.5}


def test_one_number_twice_is_not_elastic() -> None:
    assert ray_scaling(scaling(workers=[2, 2])).num_workers == 2


def test_every_wait_of_ray_train_ends() -> None:
    config = parse_config({"model": {"path": "a/b"}, "data": {"path": "a/c"}, "scaling": {"timeout_s": 90}})
    environment = worker_environment(config)
    assert environment["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] == "90.0"
    assert environment["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] == "90.0"
    assert 0 < float(environment["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"]) <= 120


def test_what_cannot_fit_is_refused_before_ray_is_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["openai/gpt-oss-120b"]))
    config = load_config("gpt-oss-120b", ["weights=bf16", "scaling.strategy=ddp"]).resolved()
    with pytest.raises(ConfigError, match=r"needs 2\d\d\.\d GiB of GPU memory .* H100 has 79\.6"):
        launch(config, RunDir(tmp_path / "run"), tmp_path, (None, None))


def failed(failures: dict[int, BaseException]) -> WorkerGroupError:
    return WorkerGroupError("training failed", failures)  # type: ignore[arg-type]


class TestErrors:
    def test_a_workers_own_error_arrives_as_itself(self) -> None:
        error = ConfigError("lora.targets: layer 0 has no q_prj", hint="…", field="lora.targets")
        assert worker_error(failed({0: error})) is error

    def test_inside_whatever_ray_wraps_around_it(self) -> None:
        inner = StorageError("the disk is full", hint="Free space.")
        outer = RuntimeError("wrapped")
        outer.__cause__ = ValueError("wrapped again")
        outer.__cause__.__cause__ = inner
        assert worker_error(failed({1: outer})) is inner

    def test_the_cause_is_found_among_its_echoes(self) -> None:
        echo = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35462")
        cause = ZeroDivisionError("division by zero")
        found = worker_error(failed({0: echo, 1: cause, 2: echo}))
        assert found.message == "worker 1: ZeroDivisionError: division by zero"

    @pytest.mark.parametrize(
        ("failure", "part"),
        [
            (MemoryError("out of memory"), "per_device_batch_size"),
            (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "per_device_batch_size"),
            (RayActorError(), "max_failures"),
            (RuntimeError("anything else"), "log"),
        ],
    )
    def test_hints(self, failure: BaseException, part: str) -> None:
        found = worker_error(failed({0: failure}))
        assert isinstance(found, TrainingError)
        assert part in found.hint

    def test_a_killed_worker_is_told_from_its_peers_broken_connections(self) -> None:
        echo = RuntimeError("Connection reset by peer")
        assert "max_failures" in worker_error(failed({0: echo, 1: RayActorError()})).hint
        noticed_by_the_controller = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError())
        assert "max_failures" in worker_error(failed({0: echo, 1: noticed_by_the_controller})).hint

    def test_without_any_worker_at_fault(self) -> None:
        found = worker_error(TimeoutError("no workers in 120 s"))
        assert isinstance(found, PolythinkError)
        assert "no workers in 120 s" in found.message


NOBODY = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={})


class TestCheckpointBeforeEnd:
    def test_a_resize_asks_first_only_while_training(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[bool] = []
        monkeypatch.setattr(
            "training.launch.wait_for_checkpoint", lambda run_dir: asked.append((run_dir / REQUEST).exists())
        )
        callback: Any = _CheckpointBeforeEnd(tmp_path)
        callback.before_controller_execute_resize_decision(None)  # the first start of the workers is a resize to Ray
        assert asked == []
        callback.after_worker_group_training_start(None)
        callback.before_controller_execute_resize_decision(None)
        assert asked == [True]
        callback.before_worker_group_shutdown(None)
        callback.before_controller_execute_resize_decision(None)
        assert asked == [True]

    @pytest.mark.parametrize(
        ("error", "asked_for"),
        [
            (failed({0: RayActorError()}), []),
            (PreemptionError(NOBODY, drain_timed_out=False), []),  # every worker has left
            (PreemptionError(NOBODY, drain_timed_out=True), [True]),
        ],
    )
    def test_a_restart_asks_only_where_all_workers_still_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, asked_for: list[bool]
    ) -> None:
        asked: list[bool] = []
        monkeypatch.setattr(
            "training.launch.wait_for_checkpoint", lambda run_dir: asked.append((run_dir / REQUEST).exists())
        )
        callback: Any = _CheckpointBeforeEnd(tmp_path)
        callback.after_worker_group_training_start(None)
        callback.after_controller_state_update(RunningState(), RestartingState(error))
        callback.before_controller_execute_resize_decision(None)
        assert asked == asked_for
