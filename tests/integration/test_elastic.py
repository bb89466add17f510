"""An elastic run through nodes that join, are drained and vanish: the losses are those of one worker, no step is lost, and
each row is trained on exactly once an epoch."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.integration.counting import all_rows, rows_of_epochs
from tests.integration.drivers import Driver, driving, wait_until, write_job
from tests.integration.test_driver import assert_equals_one_worker
from training.run_dir import RunDir, read_json

COUNTING = "tests.integration.counting"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 300
MEMORY = {"object_store_memory": 100 * 1024**2}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A head with room for as many training workers as the test asks for, one by default."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": getattr(request, "param", 1), **MEMORY})
    yield cluster
    cluster.shutdown()


def elastic_job(directory: Path, base: Path, strategy: str, workers: tuple[int, int], steps: int = STEPS) -> Path:
    return write_job(
        directory,
        base,
        optim={"max_steps": steps, "learning_rate": 1e-3},
        scaling={"workers": list(workers), "strategy": strategy, "resize_check_s": 3},
        checkpoint={"every_steps": 50},
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_two_one_workers(cluster: Cluster, home: Path, tmp_path: Path, random_base: Path, strategy: str) -> None:
    job = elastic_job(tmp_path, random_base, strategy, (1, 2))
    with driving(home, job, address=cluster.address, module=COUNTING) as driver:
        driver.wait_for_step(5)
        assert workers(driver) == 1
        second = cluster.add_node(num_cpus=1, **MEMORY)
        wait_for_workers(driver, 2)
        at_resize = steps(driver)
        assert at_resize == list(range(1, len(at_resize) + 1)), "a resize saves first: no step is done twice"

        driver.wait_for_step(len(at_resize) + 5)
        drain(cluster, second.node_id)
        wait_for_workers(driver, 1)
        at_drain = steps(driver)
        assert len(at_drain) - len(set(at_drain)) <= 1, "while a node is drained, every step is saved"
        cluster.remove_node(second)
        assert driver.wait(900) == 0, driver.text()
    assert_nothing_lost(driver.run_dir, STEPS)
    assert_equals_one_worker(driver.run_dir, random_base, tmp_path)


@pytest.mark.parametrize("cluster", [2], indirect=True)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_to_four_workers(cluster: Cluster, home: Path, tmp_path: Path, random_base: Path, strategy: str) -> None:
    total = 400  # a step takes 0.1 s on a quiet machine, and Ray half a minute to see a new node
    job = elastic_job(tmp_path, random_base, strategy, (2, 4), total)
    with driving(home, job, address=cluster.address, module=COUNTING) as driver:
        driver.wait_for_step(5)
        assert workers(driver) == 2
        cluster.add_node(num_cpus=2, **MEMORY)
        wait_for_workers(driver, 4)
        assert driver.wait(900) == 0, driver.text()
    assert len(steps(driver)) - total <= 2, "a resize saves first: what is done twice began before the workers ended"
    assert_nothing_lost(driver.run_dir, total)
    assert_equals_one_worker(driver.run_dir, random_base, tmp_path)


def assert_nothing_lost(run_dir: RunDir, total: int) -> None:
    """Every step was taken, and each row once in every epoch; the last epoch may end early."""
    assert {line["step"] for line in run_dir.metrics()} == set(range(1, total + 1))
    *whole, last = rows_of_epochs(run_dir)
    expected = all_rows(run_dir)
    assert len(whole) >= 10
    assert all(epoch == expected for epoch in whole)
    assert last <= expected


def workers(driver: Driver) -> int:
    """How many train at the moment."""
    return int((read_json(driver.run_dir.effective_path) or {}).get("workers", 0))


def wait_for_workers(driver: Driver, count: int) -> None:
    def reached() -> bool:
        assert driver.process.poll() is None, driver.text()
        return workers(driver) == count

    wait_until(reached, f"{count} workers")


def steps(driver: Driver) -> list[int]:
    return [line["step"] for line in driver.run_dir.metrics()]


def drain(cluster: Cluster, node_id: str) -> None:
    """As a cloud does before it takes a machine back."""
    command = ["drain-node", "--address", cluster.address, "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "taken back"]
    command += ["--deadline-remaining-seconds", "10"]
    subprocess.run([str(Path(sys.executable).parent / "ray"), *command], check=True, env=os.environ, timeout=120)
