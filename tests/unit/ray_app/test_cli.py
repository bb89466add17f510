"""The command line: exit codes, errors in two lines, and its calls of a real API over a real store."""

import fcntl
import io
import json
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn
import yaml
from typer.testing import CliRunner, Result

from ray_app.cli import console
from ray_app.cli.client import ApiError, Service
from ray_app.cli.main import app
from ray_app.cluster.processes import Process, free_ports
from ray_app.cluster.state import Cluster
from ray_app.queue.store import SqlStore
from serving.api import create_app
from serving.jobs import JobFilter, JobStatus
from tests.unit.training.adapters import make_adapter
from tests.unit.training.test_evaluate import ENGLISH, GERMAN, judged
from training.config import parse_config
from training.reasoning.metrics import report
from training.run_dir import Phase, RunDir, write_json

CONFIG = {"name": "demo", "model": {"path": "acme/base"}, "data": {"path": "acme/rows"}, "scaling": {"device": "cpu"}}


def polythink(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.fixture
def store(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlStore]:
    """The store behind an API that listens on a free port and that the command line finds."""
    store = SqlStore(f"sqlite:///{home / 'jobs.db'}", str(home / "runs"))
    [port] = free_ports(1)
    api = create_app(store, home=home, plan=lambda config: {"gpu_gib": 0})
    server = uvicorn.Server(uvicorn.Config(api, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    monkeypatch.setenv("POLYTHINK_URL", f"http://127.0.0.1:{port}")
    yield store
    server.should_exit = True
    thread.join()
    store.close()


def test_help_names_every_command() -> None:
    result = polythink("--help")
    assert result.exit_code == 0
    for command in (
        "up",
        "down",
        "join",
        "status",
        "train",
        "jobs",
        "data",
        "plan",
        "merge",
        "evaluate",
        "compare",
        "generate",
        "keys",
        "quickstart",
    ):
        assert f"│ {command} " in result.output


@pytest.mark.parametrize("arguments", [(), ("train",), ("jobs", "show"), ("up", "--port", "x"), ("nothing",)])
def test_a_wrong_command_line_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert polythink(*arguments).exit_code == 2


def test_a_device_that_is_none_is_refused_before_anything_is_read() -> None:
    result = polythink("evaluate", "model", "--set", "nowhere", "--languages", "de", "--device", "gpu")
    assert result.exit_code == 2
    assert "'gpu' is not one of 'cpu'" in " ".join(result.stderr.split())


def test_the_status_of_a_node_that_ended_is_an_error(home: Path) -> None:
    ended = Process(name="ray", pid=2**22, started_s=0, log=home / "ray.log")  # above Linux's largest pid
    Cluster(joined="10.0.0.1:6379", processes={"ray": ended}).save()
    result = polythink("status")
    assert "ray        ended" in result.stdout
    assert result.exit_code == 1


def test_a_faulty_configuration_ends_with_2_and_says_the_way_out(home: Path, config_file: Path) -> None:
    result = polythink("train", str(config_file), "optim.learning_rat=1e-3")
    assert result.exit_code == 2
    assert "optim.learning_rat: unknown key" in result.output
    assert "Did you mean optim.learning_rate?" in result.output
    assert "Traceback" not in result.output
    assert "Traceback" in polythink("--debug", "train", "no-such-preset").output


def test_without_a_service_jobs_say_how_to_start_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTHINK_PORT", str(free_ports(1)[0]))
    result = polythink("jobs", "list")
    assert result.exit_code == 1
    assert "no service answers at http://127.0.0.1:" in result.output
    assert "polythink up" in result.output


def test_a_preset_goes_by_name_with_its_overrides(store: SqlStore) -> None:
    sent = ["data.current_date=2026-01-02", "optim={epochs: 2, max_steps: null}"]
    result = polythink("jobs", "submit", "gpt-oss-20b", *sent)
    assert result.exit_code == 0, result.output
    config = store.list_jobs(JobFilter())[0].train_config
    assert str(config.data.current_date) == "2026-01-02"
    assert (config.optim.epochs, config.optim.max_steps) == (2, None)


def test_jobs_are_submitted_listed_shown_and_cancelled(store: SqlStore, config_file: Path) -> None:
    assert "No jobs" in polythink("jobs", "list").output
    result = polythink("jobs", "submit", str(config_file), "optim.learning_rate=1e-3", "--name", "mine", "--key", "k1")
    assert result.exit_code == 0, result.output
    [job] = store.list_jobs(JobFilter())
    assert job.name == "mine"
    assert job.train_config.optim.learning_rate == 1e-3
    again = polythink("jobs", "submit", str(config_file), "optim.learning_rate=1e-3", "--name", "mine", "--key", "k1")
    assert again.output.split()[0] == job.id
    assert job.id in polythink("jobs", "list").output
    assert json.loads(polythink("jobs", "show", job.id, "--json").output)["config"]["name"] == "mine"
    assert "CANCELLED" in polythink("jobs", "cancel", job.id).output
    assert "QUEUED" in polythink("jobs", "resume", job.id).output
    unknown = polythink("jobs", "show", "job-unknown")
    assert unknown.exit_code == 1
    assert "job-unknown" in unknown.output


@pytest.mark.parametrize("width", [20, 45, 80, 300])
def test_ids_and_statuses_are_whole_on_any_terminal(width: int) -> None:
    jobs = [
        {"id": f"raysubmit_{i:016}", "name": "a name " * 9, "status": "EVALUATING", "error": None, "progress": {},
         "status_reason": "waits for GPUs " * 9, "created_at": "2026-01-02T03:04:05"}
        for i in range(3)
    ]  # fmt: skip
    output = console.SafeConsole(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.show_jobs(jobs, output)
    _, *lines = output.file.getvalue().splitlines()
    assert len(lines) == len(jobs)
    for job, line in zip(jobs, lines, strict=True):
        assert {job["id"], "EVALUATING", "2026-01-02"} <= set(line.split())


def test_without_a_terminal_a_job_is_listed_whole(
    store: SqlStore, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a-name-of-some-length-to-its-end"
    assert polythink("jobs", "submit", str(config_file), "--name", name).exit_code == 0
    monkeypatch.setenv("COLUMNS", "30")
    [job] = store.list_jobs(JobFilter())
    _, line = polythink("jobs", "list").output.splitlines()
    assert line.split()[0] == job.id
    assert f"{name}  QUEUED  " in line
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", line.rstrip())


@pytest.mark.parametrize("command", ["show", "logs", "cancel", "resume"])
@pytest.mark.parametrize("job_id", ["", "."])
def test_an_id_that_is_none_is_named(store: SqlStore, command: str, job_id: str) -> None:
    result = polythink("jobs", command, job_id)
    assert result.exit_code == 2
    assert f"JOB={job_id!r} is not the id of a job" in result.stderr
    assert "polythink jobs list" in result.stderr


def test_rows_are_uploaded_and_trained_on_by_their_id(
    store: SqlStore, rows_file: Path, config_file: Path, tmp_path: Path
) -> None:
    result = polythink("data", "upload", str(rows_file))
    assert result.exit_code == 0, result.output
    file_id, rows = re.fullmatch(r"(file-\w+)  (\d+) rows\n", result.stdout).groups()  # type: ignore[union-attr]
    assert rows == "4"
    assert f"data.path=file:{file_id}" in result.stderr
    assert polythink("jobs", "submit", str(config_file), f"data.path=file:{file_id}").exit_code == 0
    [job] = store.list_jobs(JobFilter())
    assert job.train_config.data.path == f"file:{file_id}"

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": []}\n{"user": "hi", "final": "ho"}\nnot json\n')
    refused = polythink("data", "upload", str(bad))
    assert refused.exit_code == 1
    assert "2 of 3 rows are faulty" in refused.stderr
    assert "bad.jsonl:1" in refused.stderr
    assert "bad.jsonl:3" in refused.stderr
    assert "Mend or remove these rows" in refused.stderr
    nothing = polythink("data", "upload", str(tmp_path))
    assert nothing.exit_code == 2
    assert f"there is no file {tmp_path}" in nothing.stderr


class Answers(BaseHTTPRequestHandler):
    """A server that says `body`, whatever it is asked."""

    body = b"<html>MLflow</html>"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body) + self.missing))
        self.end_headers()
        self.wfile.write(self.body)

    missing = 0

    def log_message(self, *_: object) -> None:
        pass


class Breaks(Answers):
    missing = 1


@pytest.mark.parametrize(
    ("handler", "message"), [(Answers, "it is not the service"), (Breaks, "the connection broke: peer closed")]
)
def test_what_is_not_the_service_or_breaks_off_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, handler: type[Answers], message: str
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("POLYTHINK_URL", f"http://127.0.0.1:{server.server_port}")
        result = polythink("jobs", "list")
        server.shutdown()
        thread.join()
    assert result.exit_code == 1
    assert message in result.stderr
    assert "POLYTHINK_URL" in result.stderr or "polythink status" in result.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("POLYTHINK_URL", "localhost:8000"),
        ("POLYTHINK_URL", "http://localhost:api"),
        ("POLYTHINK_PORT", "http"),
        ("POLYTHINK_PORT", "70000"),
    ],
)
def test_an_address_that_cannot_be_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    result = polythink("jobs", "logs", "job-1", "--follow")
    assert result.exit_code == 2
    assert f"{variable}='{value}'" in result.stderr


def test_a_stream_goes_on_where_it_broke_once_the_service_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = free_ports(1)
    seen = []

    class Stream(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Last-Event-ID"))
            self.send_response(404 if len(seen) == 2 else 200)  # of a proxy that knows no application yet
            self.end_headers()
            if len(seen) != 2:
                event = "log" if len(seen) == 1 else "end"
                self.wfile.write(f"event: {event}\nid: {len(seen)}\ndata: x\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    def serve(server: HTTPServer, requests: int) -> None:
        with server:
            for _ in range(requests):
                server.handle_request()

    def serve_again() -> None:
        serve(HTTPServer(("127.0.0.1", port), Stream), 2)

    first = threading.Thread(target=serve, args=(HTTPServer(("127.0.0.1", port), Stream), 1), daemon=True)
    first.start()
    events = Service(f"http://127.0.0.1:{port}").events("/stream")
    assert next(events) == ("log", "x")
    first.join()
    second = threading.Timer(1.5, serve_again)  # nothing listens for a while
    second.daemon = True
    second.start()
    assert list(events) == [("end", "x")]
    second.join()
    assert seen == [None, "1", "1"]


def test_a_stream_that_never_stood_is_not_waited_for() -> None:
    with pytest.raises(ApiError, match="no service answers"):
        next(Service(f"http://127.0.0.1:{free_ports(1)[0]}").events("/stream"))


def test_a_reader_that_has_seen_enough_is_no_error(store: SqlStore, config_file: Path) -> None:
    polythink("jobs", "submit", str(config_file))
    [job] = store.list_jobs(JobFilter())
    RunDir.create(Path(job.run_dir), job.train_config).log_path.write_text(("a line of the log, " * 5 + "\n") * 5_000)
    assert store.move(job, JobStatus.CANCELLED)
    command = [sys.executable, "-m", "ray_app.cli.main", "jobs", "logs", job.id, "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline().startswith("a line of the log")
        process.stdout.close()  # as `head -1` does
        assert process.stderr.read() == ""


def test_a_failed_job_is_watched_to_its_end_and_shows_its_own_error(store: SqlStore, config_file: Path) -> None:
    polythink("jobs", "submit", str(config_file))
    [job] = store.list_jobs(JobFilter())
    run_dir = RunDir.create(Path(job.run_dir), job.train_config)
    run_dir.log_path.write_text("first line\nlast line\n")
    assert polythink("jobs", "logs", job.id, "--tail", "1").output == "last line\n"
    error = {"type": "DataError", "message": "2 of 9 rows are faulty", "hint": "Mend them.", "field": None}
    assert store.move(job, JobStatus.FAILED, error=error)
    result = polythink("jobs", "show", job.id, "--watch")
    assert result.exit_code == 1
    assert "2 of 9 rows are faulty" in result.output
    assert "Mend them." in result.output
    assert polythink("jobs", "logs", job.id, "--follow").output == "first line\nlast line\n"


def test_logs_and_events_hold_any_character_and_the_terminal_obeys_none(store: SqlStore, config_file: Path) -> None:
    polythink("jobs", "submit", str(config_file))
    [job] = store.list_jobs(JobFilter())
    run_dir = RunDir.create(Path(job.run_dir), job.train_config)
    run_dir.log_path.write_text("one\ntwo\x1b[2J\n a\u2028b\x85c\n")
    error = {"type": "DataError", "message": "row \u2028 is \x85 faulty", "hint": "", "field": None}
    assert store.move(job, JobStatus.FAILED, error=error)
    shown = "two␛[2J\n a\u2028b�c\n"
    assert polythink("jobs", "logs", job.id).output == f"one\n{shown}"
    assert polythink("jobs", "logs", job.id, "--follow", "--tail", "2").output == shown
    result = polythink("jobs", "show", job.id, "--watch")
    assert "faulty" in result.output
    assert "JSON" not in result.output


def test_data_check_counts_colours_and_judges(home: Path, rows_file: Path, random_base: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG | {"model": {"path": str(random_base)}}))
    fine = polythink("data", "check", str(rows_file), "--config", str(config))
    assert fine.exit_code == 0, fine.output
    assert "4 rows are well-formed" in fine.output
    assert "German" in fine.output
    assert "0 are cut, 0 dropped" in fine.output
    assert "Gefragt ist nach der Hauptstadt" in " ".join(fine.output.split())
    short = polythink("data", "check", str(rows_file), "--config", str(config), "--max-length", "16")
    assert short.exit_code == 1
    assert "4 of 4 rows are longer than data.max_length=16" in short.output


def test_data_check_reports_every_fault_with_its_line(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    path.write_text('{"messages": []}\n{"user": "hi", "final": "ho"}\nnot json\n')
    result = polythink("data", "check", str(path), "--config", str(config))
    assert result.exit_code == 1
    assert "2 of 3 rows are faulty" in result.output
    assert "bad.jsonl:1" in result.output
    assert "bad.jsonl:3" in result.output


def test_a_plan_says_its_tokens_once() -> None:
    output = polythink("plan", "gpt-oss-20b").output
    assert len(re.findall("^tokens ", output, re.M)) == 1
    assert re.search(r"throughput +[\d,]+ tokens/s for each worker\n", output)
    assert re.search(r"disk +[1-9]\d* MiB\n", polythink("plan", "tiny").output)


def test_a_plan_says_what_a_preset_needs_and_where_it_fits() -> None:
    result = polythink("plan", "gpt-oss-20b")
    assert result.exit_code == 0, result.output
    assert "20,914,757,184" in result.output
    assert re.search(r"host memory +[\d.]+ GiB\n", result.output)
    assert "Fits:" in result.output
    assert polythink("plan", "gpt-oss-20b", "optim.epochs=none").exit_code == 2


def test_a_merge_says_in_words_what_it_did(random_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(random_base, tmp_path / "adapter")
    result = polythink("merge", str(random_base), str(adapter), str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert re.search(r"size +0\.[1-9]\d MB\n", result.output)
    assert re.search(
        r"update of attention and other weights +\d+\.\d% kept, [\d.]+% of it rounded off\n", result.output
    )


@pytest.mark.parametrize("options", [(), ("--bf16",), ("out", "--bf16", "--mxfp4"), ("out",)])
def test_export_wants_one_thing(options: tuple[str, ...]) -> None:
    assert polythink("export", "model", *options).exit_code == 2


def test_keys_are_shown_once_and_kept_as_hashes(home: Path) -> None:
    result = polythink("keys", "add", "admin")
    assert result.exit_code == 0
    key = result.stdout.strip()
    kept = (home / "api_keys").read_text()
    assert kept.startswith("admin:")
    assert key not in kept
    assert f"with the fingerprint {kept[6:18]}." in result.stderr
    assert polythink("keys", "add", "root").exit_code == 2


def test_keys_are_listed_by_fingerprint_and_removed_one_by_one(home: Path) -> None:
    path = home / "api_keys"
    assert "no API keys" in polythink("keys", "list").stderr
    keys = [polythink("keys", "add", role).stdout.strip() for role in ("admin", "user")]
    admin, user = path.read_text().splitlines()
    path.write_text(f"# Ann's\r\n{admin}\n\n# Ben's: admin:1\n  {user}  ")
    path.chmod(0o640)
    shown = polythink("keys", "list")
    assert shown.stdout.splitlines() == [f"{admin[6:18]}  admin", f"{user[5:17]}  user"]
    assert not any(key in shown.output for key in keys)

    for wrong in ("", "admin", admin[6:17], "0" * 12, keys[0]):
        refused = polythink("keys", "remove", wrong)
        assert refused.exit_code == 2
        assert "has the fingerprint" in refused.stderr
    removed = polythink("keys", "remove", user[5:17])
    assert removed.exit_code == 0, removed.output
    assert path.read_bytes() == f"# Ann's\r\n{admin}\n\n# Ben's: admin:1\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert polythink("keys", "remove", admin[6:]).exit_code == 0  # the whole hash names it as well
    assert "no API keys" in polythink("keys", "list").stderr
    assert [entry.name for entry in home.iterdir()] == ["api_keys"]


def test_a_faulty_file_of_keys_is_left_as_it_is(home: Path) -> None:
    text = f"admin:{'0' * 64}\nroot:{'1' * 64}\n"
    (home / "api_keys").write_text(text)
    for arguments in (("list",), ("remove", "0" * 12)):
        result = polythink("keys", *arguments)
        assert result.exit_code == 2
        assert "line 2: not of the form role:sha256" in " ".join(result.stderr.split())
    assert (home / "api_keys").read_text() == text


def test_an_answer_is_shown_as_it_was_written() -> None:
    language = {"requested": "German", "detected": "German", "matches": True}
    answer = {"reasoning": "[red] :smile:", "answer": "so :+1: [/]", "reasoning_language": language, "model": "a/b",
              "usage": {"completion_tokens": 3}, "finish_reason": "stop", "warnings": []}  # fmt: skip
    with console.console.capture() as shown:
        console.console.print(console.generation_panels(answer))
    assert "[red] :smile:" in shown.get()
    assert "so :+1: [/]" in shown.get()


def test_progress_reads_as_one_line() -> None:
    numbers = {"step": 40, "total_steps": 150, "loss": 1.2345, "tokens_per_s_per_gpu": 5210.4, "eta_s": 80}
    assert console.progress_text("RUNNING", numbers) == "step 40/150 · loss 1.234 · 5,210 tokens/s · 1:20 left"
    assert console.progress_text("MERGING", numbers | {"message": "merging"}) == "merging"
    assert console.duration(7505) == "2:05:05"


def test_a_job_takes_one_line_of_the_table_however_much_it_says() -> None:
    error = {"message": "2 of 9 rows are faulty, " * 40}
    jobs = [
        {"id": f"job-{i:012}", "name": "a name " * i, "status": "FAILED", "error": error, "progress": {},
         "status_reason": "", "created_at": "2026-01-02T03:04:05"}
        for i in range(12)
    ]  # fmt: skip
    output = console.SafeConsole(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.show_jobs(jobs, output)
    lines = output.file.getvalue().splitlines()
    assert len(lines) == 1 + len(jobs)
    assert all(job["id"] in line and "2026-01-02 03:04:05" in line for job, line in zip(jobs, lines[1:], strict=True))
    assert "2 of 9" in lines[1]


def test_counted_work_says_how_far_it_is_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 20.0, 40.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(seconds))
    output = console.SafeConsole(file=io.StringIO(), force_terminal=False)
    with console.counted("models/[one]", 40, output) as tell:
        for done in (1, 20, 40):  # the first comes too soon to be told
            tell(done)
    assert output.file.getvalue().splitlines() == [
        "models/[one]: loading, 0 of 40",
        "models/[one]: 20 of 40 · 0:20 left",
        "models/[one]: 40 of 40 · 0:00 left",
    ]


def test_a_run_that_cannot_start_says_why_and_ends_with_1(home: Path) -> None:
    """A real driver, which finds that another one holds the run, and leaves an earlier one's result there."""
    run_dir = RunDir.create(home / "runs" / "taken", parse_config(CONFIG).resolved())
    run_dir.write_result(Phase.SUCCEEDED, model="/earlier")
    with (run_dir.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = polythink("train", str(run_dir.root))
    assert result.exit_code == 1
    assert "SUCCEEDED" not in result.output
    assert "another driver is running" in " ".join(result.output.split())


def test_data_check_names_rows_in_the_wrong_language_and_shows_no_control_characters(
    home: Path, random_base: Path, tmp_path: Path
) -> None:
    config, path = tmp_path / "config.yaml", tmp_path / "rows.jsonl"
    config.write_text(yaml.safe_dump(CONFIG | {"model": {"path": str(random_base)}}))
    english = "The user asks what\x1b[31m red is, and I know that it is a colour of the rainbow."
    german = "Der Nutzer fragt, was Rot ist, und ich weiß, dass es eine Farbe des Regenbogens ist."
    rows = [
        {"reasoning_language": "German", "user": "What is \x9b31mred?", "analysis": thought, "final": "A colour."}
        for thought in (english, german)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = polythink("data", "check", str(path), "--config", str(config), "--preview", "2")
    assert result.exit_code == 0, result.output
    assert "reason in another language than they ask for: 1;" in result.output
    assert "rows.jsonl:1 asks for German, is in English" in result.output
    assert "rows.jsonl:2 asks for" not in result.output
    assert "\x1b" not in result.output
    assert "\x9b" not in result.output
    assert "what␛[31m red is" in " ".join(result.output.split())


def test_models_are_evaluated_on_the_same_prompts_and_compared(home: Path, random_base: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Was ist die Hauptstadt von Frankreich?"}\n{"prompt": "Welche Farbe hat Schnee?"}\n')
    options = f"--set {prompts} --languages German,fr --max-new-tokens 8 --out {tmp_path / 'out'}".split()
    result = polythink("evaluate", str(random_base), f"{random_base}/", *options)
    assert result.exit_code == 0, result.output
    assert result.output.count("all but English") == 2
    assert "difference" in result.output
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"model-1.jsonl", "model-1.json", "model-2.jsonl", "model-2.json", "trace_match.png"}


def test_jobs_are_compared_by_id_or_run_directory(home: Path, tmp_path: Path) -> None:
    config = parse_config(CONFIG)
    roots = [home / "runs" / "job-a", tmp_path / "elsewhere" / "job-b"]
    for root, right in zip(roots, (2, 9), strict=True):
        figures = report([judged("de", GERMAN)] * right + [judged("de", ENGLISH)] * (10 - right))
        before = report([judged("de", ENGLISH)] * 10)
        write_json(RunDir.create(root, config).evaluation / "evaluation.json", {"before": before, "after": figures})
    result = polythink("compare", "job-a", str(roots[1]))
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.output.splitlines() if line.split()[:2] == ["trace", "match"]]
    assert line.split()[2:5] == ["20%", "90%", "70%"]
    assert (home / "comparisons" / "job-a-job-b.png").stat().st_size > 1000
    unknown = polythink("compare", "job-a", "job-aa")
    assert unknown.exit_code == 2
    assert "no run 'job-aa'" in " ".join(unknown.output.split())
    assert "There are job-a." in unknown.output
