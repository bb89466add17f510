"""What the driver waits for, and how it ends when it is told to. Whole runs are in tests/integration/test_driver.py."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError, LocalRayletDiedError, NodeDiedError
from transformers import AutoConfig

from tests.conftest import ROWS, with_messages
from training import driver
from training.config import EvaluationConfig, ModelConfig, parse_config
from training.data import parse_rows
from training.driver import _prepare, start_tracking
from training.durable.stopping import Stopped, stops_seen, stops_with_ray
from training.errors import ConfigError, StorageError
from training.evaluate import why_not_evaluated
from training.on_ray import check_own_gpu, on_device, where_models_lie
from training.run_dir import Phase, RunDir
from training.tracking.patience import RETRIES, limit_patience
from training.tracking.run import Tracking

CONFIG = parse_config({"model": {"path": "a/b"}, "data": {"path": "a/c"}, "scaling": {"device": "cpu"}}).resolved()


@pytest.fixture
def run_dir(home: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(driver, "TRACKING_PAUSE_S", 0.05)
    return RunDir.create(home / "runs" / "job", CONFIG)


def away(monkeypatch: pytest.MonkeyPatch, times: int) -> list[dict[str, object]]:
    """Makes MLflow refuse as often; returns what `progress.json` held at each try."""
    plain, seen = Tracking.start, list[dict[str, object]]()

    def start(config: object, run_dir: RunDir, run_id: object = None) -> Tracking:
        seen.append(run_dir.progress())
        if len(seen) <= times:
            raise StorageError("MLflow at http://x does not answer")
        return plain(config, run_dir, run_id)  # type: ignore[arg-type]

    monkeypatch.setattr(Tracking, "start", start)
    return seen


def test_an_mlflow_that_comes_back_is_waited_for(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = away(monkeypatch, 2)
    tracking = start_tracking(CONFIG, run_dir)
    tracking.end("FINISHED")
    assert len(tries) == 3
    assert (tries[-1]["phase"], "does not answer" in str(tries[-1]["message"])) == (Phase.STARTING, True)
    assert run_dir.progress()["mlflow_run_id"] == tracking.run_id


@pytest.mark.parametrize(("given", "retries"), [(None, str(RETRIES)), ("5", "5")])
def test_mlflow_is_asked_no_more_often_than_said(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, given: str | None, retries: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", given or "")
    if given is None:
        monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "")  # so that it is put back
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    start_tracking(CONFIG, run_dir).end("FINISHED")
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == retries
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ
    limit_patience(3)
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "3"


def test_one_that_stays_away_is_an_error(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TRACKING_WAIT_S", 0.2)
    away(monkeypatch, 10**6)
    with pytest.raises(StorageError, match="does not answer"):
        start_tracking(CONFIG, run_dir)


def test_a_stop_is_seen_inside_what_ray_makes_of_it() -> None:
    def inside() -> None:
        try:
            raise Stopped("told to stop")
        except Stopped as stop:
            raise SystemError("returned a result with an exception set") from stop

    with pytest.raises(Stopped, match="told to stop"), stops_seen():
        inside()
    with pytest.raises(ZeroDivisionError), stops_seen():
        raise ZeroDivisionError


@pytest.mark.parametrize("gone", [ActorDiedError(), LocalRayletDiedError(), NodeDiedError("its node")])
def test_a_ray_that_goes_away_is_no_failure_of_the_run(gone: Exception) -> None:
    with pytest.raises(Stopped, match="Ray went away: "), stops_with_ray():
        raise gone
    with pytest.raises(ZeroDivisionError), stops_with_ray():
        raise ZeroDivisionError


def test_held_out_prompts_that_leave_no_room_for_an_answer_are_left_out(
    tmp_path: Path, random_base: Path, rows_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = AutoConfig.from_pretrained(random_base).max_position_embeddings
    held_out = [ROWS[0] | {"user": "Why is the sky blue?"}, ROWS[1] | {"user": "Why? " * 1000}]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(with_messages(row)) + "\n" for row in held_out))
    config = parse_config(
        {
            "model": {"path": str(random_base)},
            "data": {"path": str(rows_file), "held_out_path": str(tmp_path / "held_out.jsonl")},
            "scaling": {"device": "cpu"},
            "evaluation": {"max_new_tokens": context - 1000},
        }
    ).resolved()
    _, kept, _, summary = _prepare(config, RunDir.create(tmp_path / "run", config), random_base)
    assert [row.prompt for row in kept] == ["Why is the sky blue?"]
    assert summary["held_out"] == 1
    assert "1 of 2 held-out rows are left out" in caplog.text
    assert "held_out.jsonl:2" in caplog.text


class TestWhyNotEvaluated:
    PLAIN = parse_rows([("x:1", {"user": "Why?", "final": "Because."})])
    GERMAN = parse_rows([("x:1", with_messages(ROWS[0]))])

    def test_rows_that_name_a_language_are_measured(self) -> None:
        assert CONFIG.evaluation == EvaluationConfig()
        assert why_not_evaluated(CONFIG.evaluation, [*self.PLAIN, *self.GERMAN]) is None

    def test_rows_that_name_none_are_no_fault_of_a_job_that_did_not_speak_of_it(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        reason = why_not_evaluated(CONFIG.evaluation, self.PLAIN)
        assert "none of the 1 held-out rows names a reasoning language" in str(reason)
        assert str(reason) in caplog.text

    def test_what_was_configured_is_refused_at_once(self) -> None:
        with pytest.raises(ConfigError, match=r"evaluation\.languages") as caught:
            why_not_evaluated(EvaluationConfig(prompts=4), self.PLAIN)
        assert caught.value.field == "evaluation.languages"
        assert why_not_evaluated(EvaluationConfig(prompts=4, languages=["German"]), self.PLAIN) is None

    def test_nothing_to_measure(self) -> None:
        assert why_not_evaluated(None, self.GERMAN) == "evaluation is null"
        assert why_not_evaluated(EvaluationConfig(), []) == "there are no held-out rows"


OWN = "0a" * 28
"""A node's id, in Ray's form."""


class TestPlace:
    """Where proof and evaluation run: wherever there is room, unless the merged model lies on the driver's node alone."""

    CUDA = CONFIG.model_copy(update={"scaling": CONFIG.scaling.model_copy(update={"device": "cuda"})})

    @pytest.fixture(autouse=True)
    def nodes(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = [
            {"NodeID": OWN, "Resources": {"CPU": 8.0}},
            {"NodeID": "other", "Resources": {"CPU": 8.0, "GPU": 8.0}},
        ]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: OWN))
        return nodes

    def test_with_a_shared_disk_any_node_will_do(self) -> None:
        check_own_gpu(self.CUDA)
        assert where_models_lie() == "DEFAULT"

    def test_with_a_storage_url_it_is_the_drivers(
        self, monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]]
    ) -> None:
        monkeypatch.setenv("POLYTHINK_STORAGE", "s3://bucket/runs")
        assert (where_models_lie().node_id, where_models_lie().soft) == (OWN, False)
        check_own_gpu(CONFIG)
        with pytest.raises(ConfigError, match="has no GPU") as caught:
            check_own_gpu(self.CUDA)
        assert "POLYTHINK_STORAGE" in caught.value.hint
        nodes[0]["Resources"]["GPU"] = 1.0
        check_own_gpu(self.CUDA)


def title(base: Path, asked: str) -> tuple[str, Path, str]:
    return asked, base, " ".join(psutil.Process().cmdline())


def test_a_task_is_called_by_its_function_and_gets_the_base_of_its_node(ray_cluster: None, random_base: Path) -> None:
    config = CONFIG.model_copy(update={"model": ModelConfig(path=str(random_base))})
    asked, base, shown = on_device(config, title, random_base, asked="yes")
    assert (asked, base) == ("yes", random_base)
    assert shown.startswith("ray::title")
    with pytest.raises(StorageError, match="has no directory"):
        on_device(config, title, Path("/nowhere"), asked="yes")
