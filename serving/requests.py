"""From a request to the one resolved configuration that a job runs, and what a client may not reach with it."""

import re
from dataclasses import dataclass
from pathlib import Path

from serving.errors import RequestError
from serving.schemas import ID_PATTERN, JobRequest, PlanRequest
from training.config import TrainConfig, apply_override, is_local_path, load_config, parse_config, presets
from training.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True)
class PathPolicy:
    """What paths of a request may name: the hub, uploads, and files under `roots` (POLYTHINK_DATA_ROOTS).

    Under a root that is POLYTHINK_HOME or holds it, only models and MLflow's store of what lies in there.
    """

    roots: tuple[Path, ...]
    files: Path
    """Where uploads lie."""

    def check(self, config: TrainConfig) -> None:
        """
        Raises:
            RequestError: `field` names the path that is not allowed.
        """
        self._check_path("model.path", config.model.path)
        self._check_path("data.path", config.data.path)
        if config.data.held_out_path:
            self._check_path("data.held_out_path", config.data.held_out_path)
        self._check_uri("tracking.uri", config.tracking.uri)
        self._check_uri("tracking.registry_uri", config.tracking.registry_uri)

    def _check_path(self, field: str, path: str) -> None:
        if path.startswith("file:") and field != "model.path":
            self._check_upload(field, path.removeprefix("file:"))
        elif is_local_path(path):
            self._check_local(field, path)
        elif not _HUB_ID.fullmatch(path) or ".." in path:
            raise RequestError(
                f"{field}={path!r} is neither a hub id nor a path",
                hint="A hub id looks like openai/gpt-oss-20b; a path starts with /; uploaded rows are file:ID.",
                field=field,
            )

    def _check_upload(self, field: str, file_id: str) -> None:
        if not re.fullmatch(ID_PATTERN, file_id) or not (self.files / f"{file_id}.jsonl").is_file():
            raise RequestError(
                f"{field}: there is no uploaded file {file_id!r}", hint="POST /files answers the id.", field=field
            )

    def _check_local(self, field: str, path: str) -> None:
        roots = ", ".join(map(str, self.roots)) or "none"
        if not path.startswith(("/", "~/")):
            raise RequestError(
                f"{field}={path!r} is relative, which means nothing over HTTP",
                hint=f"Give the whole path, under one of: {roots}; or upload rows with POST /files.",
                field=field,
            )
        try:
            resolved = Path(path).expanduser().resolve()  # follows links, so that none leads out
            there = resolved.exists()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL byte, an unknown user
            raise RequestError(f"{field}={path[:100]!r} is no path: {error}", field=field) from None
        if not any(resolved.is_relative_to(root.resolve()) for root in self.roots):
            raise RequestError(
                f"{field}={path!r} lies outside of the directories that the service may read",
                hint=f"Allowed (POLYTHINK_DATA_ROOTS): {roots}. Or upload rows with POST /files.",
                field=field,
            )
        if not there:
            raise RequestError(
                f"{field}={path!r} does not exist on the service's machine", hint="Check the path.", field=field
            )
        if field == "model.path" and not resolved.is_dir():
            raise RequestError(f"{field}={path!r} is a file", hint="Give the directory of a model.", field=field)
        if self._is_services_own(field, resolved):
            raise RequestError(
                f"{field}={path!r} is where the service keeps its own and other users' files",
                hint="Name your upload as file:ID, or put rows outside of POLYTHINK_HOME, into a directory of POLYTHINK_DATA_ROOTS."
                if field.startswith("data.")
                else "Leave it out to take the service's MLflow.",
                field=field,
            )

    def _is_services_own(self, field: str, path: Path) -> bool:
        """Whether `path` lies in POLYTHINK_HOME, in no root of its own there, and is none of what `field` is for: jobs'
        models, MLflow's store."""
        home = self.files.parent.resolve()
        if field == "model.path" or (field.startswith("tracking.") and path.is_relative_to(home / "mlflow")):
            return False
        named = [root for root in map(Path.resolve, self.roots) if home in root.parents]
        return path.is_relative_to(home) and not any(path.is_relative_to(root) for root in named)

    def _check_uri(self, field: str, uri: str | None) -> None:
        scheme, _, path = (uri or "").partition(":")
        kind = scheme.lower().partition("+")[0]  # sqlite+pysqlite is sqlite
        if uri and (not path or kind in {"file", "sqlite"}):
            if scheme.startswith("databricks"):  # a profile's name, no path
                return
            self._check_local(field, "/" + path.lstrip("/") if path else uri)


def resolve_config(request: PlanRequest, policy: PathPolicy) -> TrainConfig:
    """The configuration that `request` describes, with nothing left open.

    Raises:
        ConfigError: no such preset, an unknown key, a value out of range.
        RequestError: a path that clients may not name.
    """
    if request.preset is not None and request.preset not in presets():
        raise ConfigError(
            f"there is no preset {request.preset!r}", hint=f"Presets: {', '.join(presets())}.", field="preset"
        )
    config = load_config(request.preset) if request.preset is not None else request.config
    assert config is not None  # the request's validator: one of the two is there
    values = config.model_dump(exclude_unset=True)
    for key, value in request.overrides.items():
        values = apply_override(values, key, value)
    if isinstance(request, JobRequest) and request.name:
        values["name"] = request.name
    if isinstance(request, JobRequest) and request.deploy:
        values["deploy"] = True
    config = parse_config(values)
    policy.check(config)
    return config.resolved()
