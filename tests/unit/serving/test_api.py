"""The HTTP application on a real SQLite store, through httpx's ASGI transport."""

import asyncio
import io
import json
import os
import re
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pyarrow.parquet
import pytest
from fastapi import Request

from ray_app.queue.store import SqlStore
from serving.api import create_app
from serving.errors import AuthError, UnavailableError
from serving.jobs import JobStatus
from serving.keys import KeyRing, Role, StoredKey, key_digest
from serving.routes import streams
from training.config import TrainConfig
from training.rows import records
from training.run_dir import RunDir

CONFIG = {"model": {"path": "acme/base"}, "data": {"path": "acme/rows"}, "scaling": {"device": "cpu"}}


@pytest.fixture
def store(home: Path) -> Iterator[SqlStore]:
    store = SqlStore(f"sqlite:///{home / 'jobs.db'}", str(home / "runs"))
    yield store
    store.close()


def plan(config: TrainConfig) -> dict[str, Any]:
    return {"workers": config.scaling.worker_range[0]}


class Client:
    """A blocking client of an application: tests read better without async."""

    def __init__(self, store: SqlStore, home: Path, **options: Any):
        self.app = create_app(store, home=home, data_roots=[home, home / "rows"], plan=plan, **options)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=20) as client:
            yield client

    def __call__(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.open() as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(send())


@pytest.fixture
def client(store: SqlStore, home: Path) -> Client:
    return Client(store, home)


@pytest.fixture
def rows(home: Path) -> Path:
    """A directory that is a root of its own, such as the presets' folder is where all is installed in POLYTHINK_HOME."""
    path = home / "rows"
    path.mkdir()
    return path


def fault(response: httpx.Response, status_code: int = 422) -> dict[str, Any]:
    """The error of a refused request, in the one form."""
    assert response.status_code == status_code, response.text
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"type", "message", "hint", "field"}
    return response.json()["error"]


def started(store: SqlStore, client: Client) -> tuple[str, RunDir]:
    """A job that a dispatcher has claimed, and its run directory."""
    job = store.get(client("POST", "/jobs", json={"config": CONFIG}).json()["id"])
    assert job is not None
    run_dir = RunDir.create(job.run_dir, job.train_config)
    assert store.claim(job, stale_result_at=None)
    return job.id, run_dir


def end(store: SqlStore, job_id: str, status: JobStatus, **values: Any) -> None:
    job = store.get(job_id)
    assert job is not None
    assert store.move(job, status, **values)


def nested(levels: int) -> dict[str, Any]:
    return {"a": nested(levels - 1)} if levels else {}


# submitting


def test_a_job_is_accepted_resolved_and_shown(client: Client) -> None:
    answer = client("POST", "/jobs", json={"config": CONFIG, "overrides": {"optim.seed": 7}, "name": "demo"})
    assert answer.status_code == 202
    job = answer.json()
    assert (job["status"], job["name"], job["attempt"]) == ("QUEUED", "demo", 0)
    assert job["config"]["optim"]["seed"] == 7
    assert job["config"]["deploy"] is False
    asked = client("POST", "/jobs", json={"config": CONFIG, "deploy": True}).json()
    assert asked["config"]["deploy"] is True
    client("POST", f"/jobs/{asked['id']}/cancel")
    assert job["config"]["precision"] == "fp32"  # nothing is left "auto"
    assert job["plan"] == {"workers": 1}
    assert client("GET", f"/jobs/{job['id']}").json() == job
    queued = client("GET", "/jobs?status=QUEUED").json()["jobs"]
    assert [summary["id"] for summary in queued] == [job["id"]]


def test_a_preset_takes_dotted_and_nested_overrides(client: Client) -> None:
    overrides = {"optim.learning_rate": 1e-3, "lora": {"r": 4}, "evaluation": None}
    answer = client("POST", "/jobs", json={"preset": "gpt-oss-20b", "overrides": overrides})
    config = answer.json()["config"]
    assert (config["optim"]["learning_rate"], config["optim"]["global_batch_size"]) == (1e-3, 16)
    assert (config["lora"]["r"], config["lora"]["dropout"]) == (4, 0.05)
    assert config["evaluation"] is None


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"preset": "nope"}, "preset", "no preset 'nope'"),
        ({"preset": "../../etc/passwd"}, "preset", "no preset"),
        ({"preset": "/etc/passwd.yaml"}, "preset", "no preset"),
        ({}, "preset", "either `preset`"),
        ({"preset": "gpt-oss-20b", "config": CONFIG}, "preset", "not both"),
        ({"config": CONFIG, "prioritty": 1}, "prioritty", "unknown field"),
        ({"config": CONFIG, "priority": "high"}, "priority", "'high'"),
        ({"config": CONFIG, "priority": 101}, "priority", "101"),
        ({"config": CONFIG, "name": "../x"}, "name", "letter or digit (given: '../x')"),
        ({"config": CONFIG, "name": "a\u0000b"}, "name", "NUL"),
        ({"config": CONFIG, "queue_timeout_s": -1}, "queue_timeout_s", "-1"),
        ({"config": CONFIG | {"optimm": {}}}, "config.optimm", "unknown key"),
        ({"config": CONFIG | {"optim": {"learning_rate": 7}}}, "config.optim.learning_rate", "7"),
        ({"config": CONFIG | {"optim": {"learning_rate": "fast"}}}, "config.optim.learning_rate", "'fast'"),
        ({"config": "gpt-oss-20b"}, "config", "TrainConfig"),
        ({"config": {"data": {"path": "a/b"}}}, "config.model", "required"),
        ({"config": CONFIG, "overrides": {"optim.sede": 1}}, "optim.sede", "unknown key"),
        ({"config": CONFIG, "overrides": {"optim": 3}}, "optim", "3"),
        ({"config": CONFIG, "overrides": []}, "overrides", "dictionary"),
        ({"config": CONFIG, "overrides": {"model.path": "x; touch /tmp/pwn"}}, "model.path", "neither"),
        ({"config": CONFIG, "overrides": {"model.path": "$(id)"}}, "model.path", "neither"),
        ({"config": CONFIG, "overrides": {"model.path": "../../etc"}}, "model.path", "relative"),
        ({"config": CONFIG, "overrides": {"model.path": "/etc"}}, "model.path", "outside"),
        ({"config": CONFIG, "overrides": {"data.path": "~/.ssh/id_rsa"}}, "data.path", "outside"),
        ({"config": CONFIG, "overrides": {"data.held_out_path": "/etc/passwd"}}, "data.held_out_path", "outside"),
        ({"config": CONFIG, "overrides": {"data.path": "file:../../etc/passwd"}}, "data.path", "no uploaded file"),
        ({"config": CONFIG, "overrides": {"data.path": "file:file-0"}}, "data.path", "no uploaded file"),
        ({"config": CONFIG, "overrides": {"tracking.uri": "sqlite:////etc/x.db"}}, "tracking.uri", "outside"),
        ({"config": CONFIG, "overrides": {"tracking.uri": "/etc"}}, "tracking.uri", "in databases"),
        (
            {"config": CONFIG, "overrides": {"model": {"trust_remote_code": True}}},
            "overrides.model.trust_remote_code",
            "refused",
        ),
        ({"config": CONFIG | {"name": "a\ud800"}}, "config.name", "surrogate"),
        ({"config": CONFIG, "overrides": {".".join("a" * 5000): 1}}, "overrides", "9999 characters"),
        ({"config": CONFIG, "overrides": nested(400)}, "overrides" + ".a" * 20, "20 levels"),
        ({"config": CONFIG, "overrides": {".".join("a" * 90): 1}}, "a", "unknown key"),
        ({"config": CONFIG, "overrides": {"": 1}}, "overrides", "has the key ''"),
        ({"config": CONFIG, "overrides": {"..": 1}}, "overrides", "has the key '..'"),
        ({"config": CONFIG, "overrides": {"optim.seed.": 1}}, "overrides", "has the key 'optim.seed.'"),
        ({"config": CONFIG, "overrides": {"optim": {" ": 1}}}, "overrides.optim", "has the key ' '"),
        ({"config": CONFIG | {"": 1}}, "config", "has the key ''"),
        ({"": 1}, "body", "has the key ''"),
        ([1], "body", "dictionary"),
        ("x", "body", "dictionary"),
        (None, "body", "required"),
    ],
)
def test_what_is_wrong_is_said_with_its_field(
    client: Client, store: SqlStore, body: Any, field: str | None, words: str
) -> None:
    content = json.dumps(body).encode()  # httpx would refuse half a surrogate pair itself
    error = fault(client("POST", "/jobs", content=content, headers={"Content-Type": "application/json"}))
    assert error["field"] == field, error
    assert words in error["message"], error
    assert client("GET", "/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{not json", "the body: not JSON"),
        (b"", "the body: is required"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 200_000, "cannot be read"),
        (b'{"priority": ' + b"9" * 5000 + b"}", "cannot be read"),
        (b'{"config": {}, "priority": NaN}', "given: nan"),
    ],
)
def test_bodies_that_are_no_json_are_refused(client: Client, content: bytes, words: str) -> None:
    error = fault(client("POST", "/jobs", content=content, headers={"Content-Type": "application/json"}))
    assert words in error["message"], error
    assert error["field"] == ("config.model" if b"config" in content else "body")


def test_the_content_type_is_asked_for(client: Client) -> None:
    error = fault(client("POST", "/jobs", content=b"{}", headers={"Content-Type": "text/plain"}))
    assert "application/json" in error["hint"]


def test_huge_bodies_are_413(store: SqlStore, home: Path) -> None:
    client = Client(store, home, max_body_mib=0.01, max_upload_mib=0.02)
    fault(client("POST", "/jobs", content=b" " * 20_000, headers={"Content-Type": "application/json"}), 413)
    fault(client("POST", "/files", content=b"x" * 30_000), 413)
    assert list((home / "files").iterdir()) == []


@pytest.mark.parametrize("job_id", ["..%2F..%2Fetc", "a.b", "%00", "x" * 200, "a b"])
def test_ids_that_are_no_ids_are_refused(client: Client, job_id: str) -> None:
    response = client("GET", f"/jobs/{job_id}/logs")
    assert response.status_code in {404, 422}
    assert "error" in response.json()


def test_what_the_service_keeps_is_nobodys_rows(client: Client, home: Path) -> None:
    """Other users' uploads lie in it, and what other jobs wrote."""
    for folder in ("files", "runs/job-1/evaluation", "mlflow", "mine"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    (home / "jobs.db-wal").touch()
    for name in ("", "files", "runs", "runs/job-1/evaluation", "mine/../files", "mine", "jobs.db", "jobs.db-wal"):
        path = home / name
        for field in ("data.path", "data.held_out_path"):
            body = {"config": CONFIG, "overrides": {field: str(path)}}
            error = fault(client("POST", "/jobs", json=body))
            assert (error["field"], "other users' files" in error["message"]) == (field, True), error
            assert "file:ID" in error["hint"]


def test_of_the_services_databases_jobs_may_log_to_mlflows(client: Client, home: Path) -> None:
    """MLflow would make its tables in the job store."""
    (home / "mlflow").mkdir()
    (home / "mlflow/mlflow.db").touch()
    body = {"config": CONFIG, "overrides": {"tracking.uri": f"sqlite:///{home}/jobs.db"}}
    error = fault(client("POST", "/jobs", json=body))
    assert (error["field"], "MLflow" in error["hint"]) == ("tracking.uri", True)
    body["overrides"] = {"tracking.uri": f"sqlite:///{home}/mlflow/mlflow.db", "model.path": f"{home}/mlflow"}
    assert client("POST", "/jobs", json=body).status_code == 202


def test_a_file_is_no_model(client: Client, home: Path) -> None:
    (home / "jobs.db").touch()
    error = fault(client("POST", "/jobs", json={"config": CONFIG, "overrides": {"model.path": f"{home}/jobs.db"}}))
    assert (error["field"], error["hint"]) == ("model.path", "Give the directory of a model.")
    assert "is a file" in error["message"]


def test_links_that_lead_out_of_the_roots_are_followed_before_the_check(client: Client, rows: Path) -> None:
    (rows / "escape").symlink_to("/etc")
    body = {"config": CONFIG, "overrides": {"data.path": f"{rows}/escape/passwd"}}
    assert "outside" in fault(client("POST", "/jobs", json=body))["message"]
    (rows / "rows.jsonl").write_text("{}\n")
    body["overrides"] = {"data.path": f"{rows}/rows.jsonl"}
    assert client("POST", "/jobs", json=body).status_code == 202


def test_unknown_routes_methods_and_parameters_have_the_same_form(client: Client) -> None:
    fault(client("GET", "/nope"), 404)
    fault(client("GET", "/jobs/job-0"), 404)
    response = client("DELETE", "/jobs")
    assert fault(response, 405)["hint"] == "Allowed: GET, POST."
    assert response.headers["allow"] == "GET, POST"
    assert fault(client("DELETE", "/jobs/job-0"), 405)["hint"] == "Allowed: GET."
    assert fault(client("GET", "/jobs?limit=0"))["field"] == "limit"
    for path, words in (("/jobs?name=%00", "digit"), ("/jobs?cursor=x", "next_cursor"), ("/jobs/a.b", "letters")):
        message = fault(client("GET", path))["message"]
        assert words in message
        assert "[" not in message, "a pattern is shown"
    assert fault(client("GET", "/jobs?limt=3"))["hint"] == "Did you mean limit?"
    assert fault(client("GET", "/jobs?status=DONE"))["field"].startswith("status")


def test_the_same_key_gives_the_same_job_and_another_body_a_conflict(client: Client) -> None:
    key = {"Idempotency-Key": "k-1"}
    first = client("POST", "/jobs", json={"config": CONFIG}, headers=key)
    assert (
        client("POST", "/jobs", json={"config": CONFIG, "priority": 0}, headers=key).json()["id"] == first.json()["id"]
    )
    error = fault(client("POST", "/jobs", json={"config": CONFIG, "priority": 1}, headers=key), 409)
    assert error["field"] == "Idempotency-Key"
    assert len(client("GET", "/jobs").json()["jobs"]) == 1
    error = fault(client("POST", "/jobs", json={"config": CONFIG}, headers={"Idempotency-Key": "a b"}))
    assert "without spaces (given: 'a b')" in error["message"]


def test_pages_end(client: Client) -> None:
    ids = [client("POST", "/jobs", json={"config": CONFIG, "name": f"n{i}"}).json()["id"] for i in range(5)]
    seen, cursor = [], ""
    while cursor is not None:
        page = client("GET", f"/jobs?limit=2{cursor and '&cursor=' + cursor}").json()
        seen += [job["id"] for job in page["jobs"]]
        cursor = page["next_cursor"]
    assert seen == ids[::-1]


# watching and changing


def test_cancel_and_resume(client: Client, store: SqlStore) -> None:
    job_id = client("POST", "/jobs", json={"config": CONFIG}).json()["id"]
    assert client("POST", f"/jobs/{job_id}/cancel").json()["status"] == "CANCELLED"
    assert client("POST", f"/jobs/{job_id}/cancel").status_code == 202
    assert client("POST", f"/jobs/{job_id}/resume").json()["status"] == "QUEUED"
    assert "QUEUED" in fault(client("POST", f"/jobs/{job_id}/resume"), 409)["message"]
    fault(client("POST", "/jobs/job-0/cancel"), 404)
    fault(client("POST", "/jobs/job-0/resume"), 404)


def test_logs_are_text_and_may_be_cut(client: Client, store: SqlStore) -> None:
    job_id, run_dir = started(store, client)
    assert client("GET", f"/jobs/{job_id}/logs").text == ""
    run_dir.log_path.write_text("one\ntwo\nthree\n")
    assert client("GET", f"/jobs/{job_id}/logs").text == "one\ntwo\nthree\n"
    assert client("GET", f"/jobs/{job_id}/logs?tail=2").text == "two\nthree\n"
    run_dir.log_path.write_bytes(b"one\n1%\r2%\r3%\nthree\n")
    assert client("GET", f"/jobs/{job_id}/logs?tail=2").content == b"1%\r2%\r3%\nthree\n"


def events(text: str) -> list[tuple[str, str, str | None]]:
    """(event, data, id) of each server-sent event."""
    found = []
    for block in filter(None, text.split("\n\n")):
        lines = [line.partition(": ") for line in block.split("\n")]
        data = "\n".join(value for name, _, value in lines if name == "data")
        fields = {name: value for name, _, value in lines}
        found.append((fields["event"], data, fields.get("id")))
    return found


def test_logs_are_followed_to_the_end_and_from_where_a_client_was(client: Client, store: SqlStore) -> None:
    job_id, run_dir = started(store, client)
    run_dir.log_path.write_text("one\ntwo\n")

    async def follow() -> str:
        async with client.open() as http:
            request = asyncio.create_task(http.get(f"/jobs/{job_id}/logs?follow=true"))
            await asyncio.sleep(0.7)
            with run_dir.log_path.open("a") as file:
                file.write("three\n")
            end(store, job_id, JobStatus.SUCCEEDED)
            return (await request).text

    assert events(asyncio.run(follow())) == [
        ("log", "one\ntwo", "8"),
        ("log", "three", "14"),
        ("end", '{"offset": 14}', None),
    ]
    again = client("GET", f"/jobs/{job_id}/logs?follow=true", headers={"Last-Event-ID": "8"})
    assert again.headers["content-type"].startswith("text/event-stream")
    assert [event[:2] for event in events(again.text)] == [("log", "three"), ("end", '{"offset": 14}')]
    tail = client("GET", f"/jobs/{job_id}/logs?follow=true&tail=2")
    assert events(tail.text)[0] == ("log", "two\nthree", "14")
    again = client("GET", f"/jobs/{job_id}/logs?follow=true&tail=2", headers={"Last-Event-ID": "8"})
    assert events(again.text)[0] == ("log", "three", "14")  # where it was counts for more
    for last_id in ("9" * 30, "9" * 5000, "-1", "x"):  # not one of ours
        again = client("GET", f"/jobs/{job_id}/logs?follow=true", headers={"Last-Event-ID": last_id})
        assert events(again.text)[0] == ("log", "one\ntwo\nthree", "14")


def test_a_carriage_return_ends_no_event_field(client: Client, store: SqlStore) -> None:
    """To a client of server-sent events it ends a line as a line feed does: what follows would be of no field."""
    job_id, run_dir = started(store, client)
    run_dir.log_path.write_bytes(b"1%\r2%\r\nthree\n")
    end(store, job_id, JobStatus.SUCCEEDED)
    text = client("GET", f"/jobs/{job_id}/logs?follow=true").content.decode()
    assert text.startswith("id: 13\nevent: log\ndata: 1%\ndata: 2%\ndata: three\n\n")


async def test_an_idle_stream_is_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "POLL_S", 0.01)
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.03)
    over = iter([False] * 10 + [True])
    seen = [event async for event in streams.follow(streams.log_events(tmp_path / "none", lambda: next(over)))]
    assert seen == [": still here\n\n"] * 3 + ['event: end\ndata: {"offset": 0}\n\n']


def test_numbers_that_json_lacks_are_null(client: Client, store: SqlStore) -> None:
    job_id, run_dir = started(store, client)
    run_dir.append_metrics({"step": 1, "loss": float("nan")})
    end(store, job_id, JobStatus.FAILED, progress={"loss": float("nan")})
    assert client("GET", f"/jobs/{job_id}/metrics").json()["metrics"] == [{"step": 1, "loss": None}]
    data = events(client("GET", f"/jobs/{job_id}/events").text)[0][1]
    assert json.loads(data, parse_constant=pytest.fail)["progress"]["loss"] is None


def test_events_tell_each_change_and_the_end(client: Client, store: SqlStore) -> None:
    job_id, _ = started(store, client)

    async def follow() -> str:
        async with client.open() as http:
            request = asyncio.create_task(http.get(f"/jobs/{job_id}/events"))
            await asyncio.sleep(0.7)
            end(store, job_id, JobStatus.RUNNING, progress={"step": 3})
            await asyncio.sleep(0.7)
            end(store, job_id, JobStatus.FAILED, error={"type": "X", "message": "boom"})
            return (await request).text

    seen = [(event, json.loads(data)) for event, data, _ in events(asyncio.run(follow()))]
    statuses = [(event, job["status"]) for event, job in seen]
    assert statuses == [("job", "STARTING"), ("job", "RUNNING"), ("job", "FAILED"), ("end", "FAILED")]
    assert seen[1][1]["progress"]["step"] == 3
    assert seen[-1][1]["error"]["message"] == "boom"


def test_metrics_and_adapter_come_from_the_run_directory(client: Client, store: SqlStore) -> None:
    job_id, run_dir = started(store, client)
    assert client("GET", f"/jobs/{job_id}/metrics").json() == {"metrics": []}
    run_dir.append_metrics({"step": 1, "loss": 2.0})
    run_dir.append_metrics({"step": 2, "loss": 1.5})
    assert client("GET", f"/jobs/{job_id}/metrics?after_step=1").json()["metrics"] == [{"step": 2, "loss": 1.5}]
    assert "no adapter yet" in fault(client("GET", f"/jobs/{job_id}/adapter"), 404)["message"]
    run_dir.adapter.mkdir()
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 4000}
    for name, content in files.items():
        (run_dir.adapter / name).write_bytes(content)
    answer = client("GET", f"/jobs/{job_id}/adapter")
    assert int(answer.headers["content-length"]) == len(answer.content)
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == files


def test_models_are_those_of_jobs_that_made_one(client: Client, store: SqlStore) -> None:
    for result in ({"model": "/m/1", "registered_model": "demo/1", "registration": "registered"}, {}):
        job_id, _ = started(store, client)
        end(store, job_id, JobStatus.SUCCEEDED, result=result)
    models = client("GET", "/models").json()["models"]
    assert [(model["path"], model["registered_model"]) for model in models] == [("/m/1", "demo/1")]


def test_plans_start_nothing(client: Client) -> None:
    assert client("POST", "/plans", json={"preset": "gpt-oss-120b"}).json() == {"workers": 8}
    assert fault(client("POST", "/plans", json={"preset": "gpt-oss-120b", "priority": 1}))["field"] == "priority"
    assert client("GET", "/jobs").json()["jobs"] == []


# uploads


def test_uploaded_rows_are_counted_kept_and_usable(client: Client, rows_file: Path, home: Path) -> None:
    body = rows_file.read_bytes()
    answer = client("POST", "/files", content=body)
    assert answer.status_code == 201, answer.text
    file = answer.json()
    assert file["rows"] == 4
    assert (home / "files" / f"{file['id']}.jsonl").read_text().count("\n") == 4
    job = client("POST", "/jobs", json={"config": CONFIG, "overrides": {"data.path": f"file:{file['id']}"}})
    assert job.status_code == 202
    assert {path.suffix for path in (home / "files").iterdir()} == {".jsonl"}  # no scratch is left


def test_a_key_keeps_an_upload_from_happening_twice(client: Client, rows_file: Path, home: Path) -> None:
    key = {"Idempotency-Key": "k"}
    first = client("POST", "/files", content=rows_file.read_bytes(), headers=key)
    assert client("POST", "/files", content=rows_file.read_bytes(), headers=key).json() == first.json()
    fault(client("POST", "/files", content=rows_file.read_bytes() + b"\n", headers=key), 409)
    fault(client("POST", "/files?name=rows.csv", content=rows_file.read_bytes(), headers=key), 409)
    assert len(list((home / "files").iterdir())) == 1


def test_faulty_rows_are_refused_with_the_whole_report(client: Client, home: Path) -> None:
    rows = [{"user": "a", "analysis": "b"}, {"messages": "none"}, {"messages": [{"role": "x", "content": "y"}]}]
    body = "\n".join(json.dumps(row) for row in rows).encode()
    error = fault(client("POST", "/files?name=mine.jsonl", content=body))
    assert error["type"] == "DataError"
    assert all(f"mine.jsonl:{line}" in error["message"] for line in (1, 2, 3)), error
    assert list((home / "files").iterdir()) == []


@pytest.mark.parametrize("form", ["columns", "messages"])
def test_a_small_parquet_file_that_is_large_as_rows_is_refused(
    client: Client, home: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    text = "x" * 10_000  # stored once, in a dictionary
    row: dict[str, Any] = {"user": text, "final": text}
    if form == "messages":
        row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 200), file)
    assert len(file.getvalue()) < 50_000
    assert client("POST", "/files", content=file.getvalue()).json()["rows"] == 200
    monkeypatch.setattr(records, "PARQUET_LIMIT", 2_000_000)
    error = fault(client("POST", "/files", content=file.getvalue()))
    assert "holds more than 0.00186265 GiB" in error["message"]
    monkeypatch.setattr(records, "PARQUET_LIMIT", 20_000)  # by what the file says of itself
    fault(client("POST", "/files", content=file.getvalue()))
    assert len(list((home / "files").iterdir())) == 1


def test_an_upload_whose_key_cannot_be_kept_leaves_nothing(
    client: Client, store: SqlStore, rows_file: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> dict[str, Any]:
        raise UnavailableError("the job store does not answer")

    monkeypatch.setattr(store, "remember", away)
    fault(client("POST", "/files", content=rows_file.read_bytes(), headers={"Idempotency-Key": "k"}), 503)
    assert list((home / "files").iterdir()) == []


async def test_an_upload_whose_client_goes_leaves_nothing(
    client: Client, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = iter([{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}])
    headers = [(b"host", b"127.0.0.1:8000")]
    scope = {"type": "http", "method": "POST", "path": "/files", "query_string": b"", "headers": headers}

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 499) == 499

    await client.app(scope, receive, send)
    assert list((home / "files").iterdir()) == []
    assert caplog.records == []


def test_scratch_of_uploads_that_were_killed_is_swept(client: Client, rows_file: Path, home: Path) -> None:
    old, new = home / "files" / ".upload-old", home / "files" / ".upload-new"
    for scratch in (old, new):
        scratch.mkdir(parents=True)
        (scratch / "body").write_text("half of it")
    os.utime(old, (0, 0))
    assert client("POST", "/files", content=rows_file.read_bytes()).status_code == 201
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("body", [b"", b"\n \n", b"\x00\x01\x02", b"{", b"[1, 2", b"PAR1 broken", b'{"a": 1}'])
def test_broken_uploads_are_refused(client: Client, home: Path, body: bytes) -> None:
    fault(client("POST", "/files", content=body))
    assert list((home / "files").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [("../../etc/a b.jsonl", "a_b.jsonl"), ("ü" * 190 + ".JSONL", "_.JSONL"), ("kept.jsonl", "kept.jsonl")],
)
def test_any_name_will_do(client: Client, home: Path, name: str, shown: str) -> None:
    assert f"{shown}:1" in fault(client("POST", "/files", params={"name": name}, content=b"{}"))["message"]
    row = {"user": "hi", "final": "ho"}
    answer = client("POST", "/files", params={"name": name}, content=json.dumps(row).encode())
    assert answer.status_code == 201
    assert [path.name for path in (home / "files").iterdir()] == [f"{answer.json()['id']}.jsonl"]


def test_a_name_must_say_the_format(client: Client) -> None:
    assert fault(client("POST", "/files?name=rows.xlsx", content=b"x"))["field"] == "name"


# health and keys


def test_health(client: Client, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client("GET", "/healthz").json() == {"status": "ok"}
    assert client("GET", "/").headers["location"] == "/docs"
    assert client("GET", "/readyz").json() == {"status": "ready"}

    def away() -> None:
        raise OSError("disk is gone")

    monkeypatch.setattr(store, "ping", away)
    response = client("GET", "/readyz")
    assert "disk is gone" in fault(response, 503)["message"]
    assert response.headers["retry-after"]
    assert client("GET", "/healthz").status_code == 200


def test_the_documentation_needs_nothing_from_elsewhere_and_a_users_key(store: SqlStore, home: Path) -> None:
    client = Client(store, home, authenticate=KeyRing([StoredKey(Role.USER, key_digest("k"))]).authenticate)
    headers = {"Authorization": "Bearer k"}
    page = client("GET", "/docs", headers=headers).text
    assert "//" not in re.sub("<!--.*?-->", "", page), "an address of another host"
    addresses = re.findall(r"""(?:src|href)="([^"]+)"|url: '([^']+)'""", page)
    assert len(addresses) == 4
    for address in map("".join, addresses):
        assert client("GET", address, headers=headers).status_code == 200, address


@pytest.mark.parametrize(
    ("method", "headers", "field"),
    [
        ("GET", {"Host": "localhost:8000"}, None),
        ("GET", {"Host": "[::1]:8000"}, None),
        ("GET", {"Host": "127.0.0.1"}, None),
        ("GET", {"Host": "evil.example"}, "Host"),
        ("GET", {"Host": "127.0.0.1.evil.example:8000"}, "Host"),
        ("GET", {"Host": "192.168.0.7:8000"}, "Host"),
        ("GET", {"Host": ""}, "Host"),
        ("GET", {"Origin": "http://evil.example"}, None),  # changes nothing, and the page cannot read the answer
        ("POST", {"Origin": "http://evil.example"}, "Origin"),
        ("POST", {"Origin": "http://127.0.0.1:3000"}, "Origin"),
        ("POST", {"Origin": "null"}, "Origin"),
        ("POST", {"Origin": "http://127.0.0.1:8000"}, None),
        ("POST", {}, None),
    ],
)
def test_without_keys_pages_from_elsewhere_are_refused(
    client: Client, method: str, headers: dict[str, str], field: str | None
) -> None:
    answer = client(method, "/jobs", headers=headers, json={"config": CONFIG} if method == "POST" else None)
    if field is None:
        assert answer.is_success, answer.text
    else:
        error = fault(answer, 403)
        assert (error["type"], error["field"]) == ("ForbiddenError", field)
        assert "polythink keys add" in error["hint"]
    assert client("GET", "/healthz", headers={"Host": "10.0.0.7"}).is_success  # a probe of the node


def test_with_keys_any_name_is_answered(store: SqlStore, home: Path) -> None:
    async def anybody(request: Request) -> None:
        return

    client = Client(store, home, authenticate=anybody)
    assert client("GET", "/jobs", headers={"Host": "polythink.example"}).is_success


def test_every_path_but_health_asks_for_the_key_before_it_reads_a_body(store: SqlStore, home: Path) -> None:
    async def refuse(request: Request) -> None:
        raise AuthError("no key", hint="Send Authorization: Bearer KEY.")

    client = Client(store, home, authenticate=refuse)
    assert client("GET", "/healthz").status_code == client("GET", "/readyz").status_code == 200
    response = client("GET", "/jobs")
    fault(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/docs", "/redoc", "/openapi.json", "/nothing"):
        fault(client("GET", path), 401)
    fault(client("POST", "/jobs", content=b"{not json", headers={"Content-Type": "application/json"}), 401)
    fault(client("POST", "/files", content=b"x"), 401)
    openai_error = client("POST", "/v1/chat/completions", content=b"{").json()["error"]
    assert openai_error["type"] == "authentication_error"
