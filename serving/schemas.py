"""What travels over HTTP for jobs, plans and files. Unknown fields are refused; times are ISO 8601 in UTC."""

from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from serving.jobs import JobRecord, JobStatus
from training.config import TrainConfig, parse_config
from training.errors import ConfigError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"
"""Ids become names of directories: no dot, no slash."""
CURSOR_PATTERN = r"^[0-9]{1,18}$"
KEY_PATTERN = r"^[\x21-\x7e]+$"

IN_WORDS = {
    NAME_PATTERN: "1 to 100 letters from A to Z, digits, '.', '_' or '-', of which the first is a letter or digit",
    ID_PATTERN: "1 to 100 letters from A to Z, digits, '_' or '-', of which the first is a letter or digit",
    CURSOR_PATTERN: "the next_cursor of the page before",
    KEY_PATTERN: "printable ASCII characters without spaces",
}
"""What each pattern allows, for the errors of those who do not read patterns."""


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


MAX_DEPTH = 20
MAX_KEY_CHARACTERS = 200


def _check_json(value: Any, where: str = "", depth: int = 0) -> None:
    """Refuses, anywhere in a JSON value, what databases and files cannot hold and what no configuration has."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{where} is nested more than {MAX_DEPTH} levels deep", field=where)
    if isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_key(key, where)
            _check_json(inner, f"{where}.{key}" if where else key, depth + 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_json(inner, f"{where}.{index}", depth + 1)


def _check_key(key: str, where: str) -> None:
    _check_text(key, where)
    path = f"{where}.{key}" if where else key
    if not all(part.strip() for part in key.split(".")):
        raise ConfigError(
            f"{where or 'the body'} has the key {key[:MAX_KEY_CHARACTERS]!r}",
            hint="A key is a name such as optim, or several joined by single dots such as optim.seed.",
            field=where or None,
        )
    if len(key) > MAX_KEY_CHARACTERS:
        raise ConfigError(f"{where or 'the body'} has a key of {len(key)} characters", field=where or None)
    if path.endswith("trust_remote_code"):
        raise ConfigError(
            f"{path} is refused: the service runs no code that comes with a model or data set",
            hint="Leave it out; gpt-oss needs none.",
            field=path,
        )


def _check_text(text: str, where: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(
            f"{where or 'the body'} holds a NUL or half a surrogate pair",
            hint="Send Unicode text.",
            field=where or None,
        )


class PlanRequest(Request):
    """A configuration: a preset by name or a whole one, with overrides on top."""

    preset: str | None = Field(default=None, min_length=1, max_length=100, examples=["tiny"])
    config: Annotated[TrainConfig, BeforeValidator(parse_config)] | None = None
    overrides: dict[str, Any] = Field(default_factory=dict, max_length=200, examples=[{"optim.learning_rate": 1e-3}])
    """Dotted or nested keys of the configuration."""

    @model_validator(mode="before")
    @classmethod
    def _plain_text(cls, values: Any) -> Any:
        _check_json(values)
        return values

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.preset is None) == (self.config is None):
            raise ConfigError(
                "give either `preset` (a name) or `config` (a whole configuration), and not both", field="preset"
            )
        return self


class JobRequest(PlanRequest):
    """A job to run."""

    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Shown in lists, and the registered model's name unless the configuration gives one; need not be unique."""
    deploy: bool = False
    """Sets the configuration's `deploy`: the model is to answer once it is registered, unless it misses its gate."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Higher goes first; equal ones by age."""
    queue_timeout_s: float | None = Field(default=None, gt=0, le=90 * 86_400)
    """Longest wait in the queue before the job fails; None takes the service's."""
    max_preemptions: int = Field(default=3, ge=0, le=1000)
    """How often the job goes on from its checkpoint after its driver was lost through no fault of its own."""


class JobQuery(Request):
    """Filters and place of `GET /jobs`."""

    status: list[JobStatus] = Field(default_factory=list)
    """Repeat for several."""
    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: str | None = Field(default=None, pattern=CURSOR_PATTERN)
    """`next_cursor` of the page before."""


class LogQuery(Request):
    follow: bool = False
    """Server-sent events until the job ends, instead of plain text of now."""
    tail: int | None = Field(default=None, ge=1, le=100_000)
    """Only the last so many lines."""


class MetricsQuery(Request):
    after_step: int = Field(default=-1, ge=-1)


class FileQuery(Request):
    name: str | None = Field(default=None, max_length=200, examples=["rows.csv"])
    """The file's name; its ending says the format. Without it the format is read off the content."""


class Error(BaseModel):
    type: str
    message: str
    hint: str = ""
    field: str | None = None


class ErrorAnswer(BaseModel):
    error: Error


class Progress(BaseModel):
    """Numbers of the moment; None before they are known."""

    step: int | None = None
    total_steps: int | None = None
    percent: float | None = None
    eta_s: float | None = None
    loss: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_gpu_gib: float | None = None
    message: str | None = None


class Links(BaseModel):
    logs: str
    events: str
    mlflow: str | None = None
    ray_dashboard: str | None = None


class JobSummary(BaseModel):
    id: str
    name: str
    status: JobStatus
    status_reason: str
    """Why it waits, or how it ended."""
    priority: int
    attempt: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    progress: Progress
    error: Error | None
    links: Links


class Job(JobSummary):
    config: dict[str, Any]
    """The resolved configuration."""
    plan: dict[str, Any] | None
    result: dict[str, Any] | None
    """adapter, model, registered_model, registration, evaluation (or not_evaluated, the reason), merge, proof, data, effective."""


class JobPage(BaseModel):
    jobs: list[JobSummary]
    next_cursor: str | None


class FileAnswer(BaseModel):
    id: str
    """Used as `data.path: file:ID`."""
    rows: int


class MetricsAnswer(BaseModel):
    metrics: list[dict[str, Any]]


class Model(BaseModel):
    """A merged model that a job made."""

    job: str
    name: str
    path: str
    registered_model: str | None
    registration: str | None
    created_at: datetime
    evaluation: dict[str, Any] | None


class ModelsAnswer(BaseModel):
    models: list[Model]


def job_summary(job: JobRecord, mlflow_url: str | None = None, ray_url: str | None = None) -> JobSummary:
    return JobSummary.model_validate(_wire(job, mlflow_url, ray_url))


def job_answer(job: JobRecord, mlflow_url: str | None = None, ray_url: str | None = None) -> Job:
    parts = {"config": job.config, "plan": job.plan, "result": job.result}
    return Job.model_validate(_wire(job, mlflow_url, ray_url) | parts)


def model_answer(job: JobRecord) -> Model:
    result = job.result or {}
    return Model(
        job=job.id,
        name=job.name,
        path=result["model"],
        registered_model=result.get("registered_model"),
        registration=result.get("registration"),
        created_at=_time(job.ended_at) or datetime.now(UTC),
        evaluation=result.get("evaluation"),
    )


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _wire(job: JobRecord, mlflow_url: str | None, ray_url: str | None) -> dict[str, Any]:
    run_id = (job.result or {}).get("mlflow_run_id") or job.progress.get("mlflow_run_id")
    links = Links(
        logs=f"/jobs/{job.id}/logs",
        events=f"/jobs/{job.id}/events",
        mlflow=f"{mlflow_url}/#/runs/{run_id}" if mlflow_url and run_id else None,
        ray_dashboard=f"{ray_url}/#/jobs/{job.ray_job_id}" if ray_url and job.ray_job_id else None,
    )
    return {
        "id": job.id,
        "name": job.name,
        "status": job.status,
        "status_reason": job.status_reason,
        "priority": job.priority,
        "attempt": job.attempt,
        "created_at": _time(job.created_at),
        "started_at": _time(job.started_at),
        "ended_at": _time(job.ended_at),
        "progress": {name: job.progress.get(name) for name in Progress.model_fields},
        "error": job.error,
        "links": links,
    }
