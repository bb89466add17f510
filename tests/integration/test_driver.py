"""One run as a program of its own: to the registered model, through killed workers, through being told to stop."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

from tests.integration.drivers import driving, wait_until, write_job
from tests.unit.training import runs
from training.run_dir import RunDir, write_json

pytestmark = pytest.mark.timeout(1200)  # each starts Ray; a machine that does much else takes minutes for that


def mlflow_runs(home: Path) -> list[Any]:
    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    return list(client.search_runs(experiments))


def assert_equals_one_worker(run_dir: RunDir, base: Path, tmp_path: Path) -> None:
    """Trains the same rows anew, on one worker and without interruption."""
    config = json.loads(run_dir.config_path.read_text())
    again = RunDir(tmp_path / "again")
    write_json(again.config_path, config | {"scaling": config["scaling"] | {"workers": 1, "max_failures": 0}})
    (again.root / "data").symlink_to(run_dir.data)
    (again.root / ".probe").write_text("probe")
    runs.train(again, base)
    assert runs.losses(run_dir) == pytest.approx(runs.losses(again), abs=1e-5)
    assert runs.largest_difference(runs.adapter(run_dir), runs.adapter(again)) < 1e-4


def test_to_a_merged_proven_evaluated_registered_model(home: Path, tmp_path: Path, random_base: Path) -> None:
    job = write_job(tmp_path, random_base, evaluation={"prompts": 4, "languages": ["de"], "max_new_tokens": 12})
    with driving(home, job, "name=renamed") as driver:
        assert driver.wait() == 0, driver.text()
        run_dir = driver.run_dir
        assert driver.left_over() == []
    result = run_dir.result()
    assert result is not None
    assert result["status"] == "SUCCEEDED"
    assert (result["registered_model"], result["registration"]) == ("renamed/1", "registered")
    assert (result["effective"]["workers"], result["effective"]["strategy"]) == (2, "fsdp2")
    assert result["proof"]["merged"]["kl_median"] < result["proof"]["base"]["kl_median"]
    assert result["evaluation"]["after"]["prompts"] >= 1
    data = result["data"]
    assert (data["rows"], data["held_out"], data["dropped"], data["truncated"]) == (30, 1, 0, 0)
    progress = run_dir.progress()
    assert (progress["phase"], progress["step"], progress["total_steps"], progress["attempt"]) == ("SUCCEEDED", 6, 6, 1)

    (run,) = mlflow_runs(home)
    assert (run.info.status, run.info.run_id) == ("FINISHED", result["mlflow_run_id"])
    assert run.data.metrics["loss"] == pytest.approx(runs.losses(run_dir)[-1])

    model = AutoModelForCausalLM.from_pretrained(
        result["model"], quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    saved, declared = (json.loads((Path(path) / "config.json").read_text()) for path in (result["model"], random_base))
    for flag in ("router_aux_loss_coef", "output_router_logits", "use_cache", "eos_token_id"):
        assert saved.get(flag) == declared.get(flag), flag
    assert AutoTokenizer.from_pretrained(result["model"]).chat_template
    assert torch.isfinite(model(input_ids=torch.arange(20)[None]).logits).all()
    assert_equals_one_worker(run_dir, random_base, tmp_path)


def test_a_killed_worker_is_replaced_and_the_losses_are_those_of_a_run_without_it(
    home: Path, tmp_path: Path, random_base: Path
) -> None:
    job = write_job(tmp_path, random_base, optim={"max_steps": 40}, scaling={"max_failures": 1})
    with driving(home, job) as driver:
        driver.wait_for_step(5)
        driver.train_workers()[-1].kill()
        assert driver.wait() == 0, driver.text()
        run_dir = driver.run_dir
    steps = [line["step"] for line in run_dir.metrics()]
    assert sorted(set(steps)) == list(range(1, 41))
    assert steps.count(1) == 1, "it resumed from a checkpoint, not from the start"
    assert_equals_one_worker(run_dir, random_base, tmp_path)


def test_a_killed_worker_fails_the_run_within_a_minute(home: Path, tmp_path: Path, random_base: Path) -> None:
    job = write_job(tmp_path, random_base, optim={"max_steps": 10_000})
    with driving(home, job) as driver:
        driver.wait_for_step(3)
        driver.train_workers()[-1].kill()
        killed_at = time.monotonic()
        wait_until(lambda: driver.look() or driver.run_dir.result(), "the result")
        assert time.monotonic() - killed_at < 60
        assert driver.wait() == 1, driver.text()
        result = driver.run_dir.result()
        assert driver.left_over() == []
    assert result is not None
    assert result["status"] == "FAILED"
    assert result["error"]["type"] == "TrainingError"
    assert "max_failures" in result["error"]["hint"]
    assert [run.info.status for run in mlflow_runs(home)] == ["FAILED"]


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_attempt_after_the_timeout_and_the_run_goes_on(
    home: Path, tmp_path: Path, random_base: Path
) -> None:
    """It is alive and says nothing, like one whose GPU or network is stuck. The default timeout is 10 minutes."""
    job = write_job(tmp_path, random_base, optim={"max_steps": 40}, scaling={"max_failures": 1, "timeout_s": 20})
    with driving(home, job) as driver:
        driver.wait_for_step(5)
        hung = driver.train_workers()[-1]
        hung.suspend()
        since = time.monotonic()
        wait_until(lambda: driver.look() or not hung.is_running(), "the end of the attempt")
        assert time.monotonic() - since < 20 + 60
        assert driver.wait() == 0, driver.text()
        run_dir = driver.run_dir
        assert driver.left_over() == []
    steps = [line["step"] for line in run_dir.metrics()]
    assert set(steps) == set(range(1, 41))
    assert steps.count(1) == 1, "it resumed from a checkpoint"
    assert_equals_one_worker(run_dir, random_base, tmp_path)


def test_stopped_then_resumed_and_never_driven_twice(home: Path, tmp_path: Path, random_base: Path) -> None:
    job = write_job(tmp_path, random_base, optim={"max_steps": 60})
    with driving(home, job) as driver:
        driver.wait_for_step(5)
        root = driver.run_dir.root
        second_driver_is_refused(home, root)
        driver.process.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 143, driver.text()
        assert driver.left_over() == []
    run_dir = RunDir.open(root)
    assert run_dir.result() is None
    assert [run.info.status for run in mlflow_runs(home)] == ["KILLED"]

    with driving(home, root) as driver:
        assert driver.wait() == 0, driver.text()
    assert run_dir.progress()["attempt"] == 2
    assert [run.info.status for run in mlflow_runs(home)] == ["FINISHED"], "the same MLflow run"
    steps = [line["step"] for line in run_dir.metrics()]
    assert steps.count(1) == 1
    assert_equals_one_worker(run_dir, random_base, tmp_path)

    with driving(home, root) as driver:  # everything is there: nothing is trained or merged again
        assert driver.wait() == 0, driver.text()
    assert [line["step"] for line in run_dir.metrics()] == steps
    result = run_dir.result()
    assert result is not None
    assert result["registered_model"] == "small/1"


def second_driver_is_refused(home: Path, root: Path) -> None:
    with driving(home, root) as second:
        assert second.wait() == 1
        assert "another driver" in second.text()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nothing-like-it"], "no preset"),
        (["/nowhere/job.yaml"], "cannot read '/nowhere/job.yaml'"),
        (["JOB", "optim.learning_rat=1"], "optim.learning_rate"),
        (["JOB", "optim.learning_rate"], "key=value"),
        (["JOB", "optim.learning_rate=fast"], "given: 'fast'"),
    ],
)
def test_what_cannot_start_says_why(
    home: Path, tmp_path: Path, random_base: Path, arguments: list[str], part: str
) -> None:
    job = write_job(tmp_path, random_base)
    with driving(home, *[str(job) if word == "JOB" else word for word in arguments]) as driver:
        assert driver.wait() == 2
        assert part in driver.text()
        assert "Traceback" not in driver.text()
    assert not (home / "runs").exists()


def test_faulty_rows_fail_the_run_with_the_whole_report(home: Path, tmp_path: Path, random_base: Path) -> None:
    job = write_job(tmp_path, random_base)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"user": "x"}\nnot json\n')
    with driving(home, job) as driver:
        assert driver.wait() == 1
        result = driver.run_dir.result()
    assert result is not None
    assert result["error"]["type"] == "DataError"
    assert "rows.jsonl:31" in result["error"]["message"]
    assert "rows.jsonl:32" in result["error"]["message"]
    assert [run.info.status for run in mlflow_runs(home)] == ["FAILED"]
