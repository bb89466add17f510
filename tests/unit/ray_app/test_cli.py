"""The command line: exit codes, errors in two lines, and its calls of a real API over a real store."""

import fcntl
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
import yaml
from typer.testing import CliRunner, Result

from ray_app.cli import console
from ray_app.cli.main import app
from ray_app.cluster.processes import free_ports
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
    assert re.search(r"size +[\d.]+ GB\n", result.output)
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
    assert polythink("keys", "add", "root").exit_code == 2


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
    output = console.SafeConsole(file=io.StringIO(), width=80)
    output.print(console.job_table(jobs))
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
