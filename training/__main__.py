"""`python -m training CONFIG_OR_RUN_DIR [key=value…]`: one training run; the same program for people, Ray Jobs and the service."""

import json
import logging
import os
import secrets
import sys
from pathlib import Path

from training.config import load_config
from training.durable.run_mirror import RunMirror
from training.errors import ConfigError, PolythinkError
from training.run_dir import RunDir, polythink_home

USAGE = "usage: python -m training CONFIG_OR_RUN_DIR [key=value ...]"


def main(arguments: list[str]) -> int:
    """Exit status: 0 SUCCEEDED, 1 FAILED, 2 usage, 143 told to stop (128 + SIGTERM, as shells say it)."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    source, *overrides = arguments
    try:
        run_dir = open_or_create(source, overrides)
        print(f"Run directory: {run_dir.root}", flush=True)
        from training.driver import run
        from training.durable.stopping import Stopped

        try:
            result = run(run_dir)
        except Stopped as stop:
            print(f"{stop}; `python -m training {run_dir.root}` goes on from its last checkpoint", file=sys.stderr)
            return 143
    except PolythinkError as error:
        print(f"{type(error).__name__}: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"Hint: {error.hint}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(json.dumps({key: result[key] for key in ("model", "registered_model", "registration")}, indent=1))
    return 0


def open_or_create(source: str, overrides: list[str]) -> RunDir:
    """The run directory `source`, or a fresh one under POLYTHINK_HOME for the configuration or preset `source`.

    Raises:
        ConfigError: no such preset, a faulty configuration, or overrides for a run that has its configuration already.
    """
    run_dir = RunDir(Path(source))
    if run_dir.root.is_absolute() and not os.path.exists(run_dir.root) and (mirror := RunMirror.of(run_dir)):
        mirror.bring_config()
    if os.path.isfile(run_dir.config_path):  # unlike Path.is_file, also for names that no file system takes
        if overrides:
            raise ConfigError(f"{source} is a run with its own config.json; overrides do not apply", field="overrides")
        return run_dir
    config = load_config(source, overrides).resolved()
    return RunDir.create(polythink_home() / "runs" / new_run_id(), config)


def new_run_id() -> str:
    """The Ray job's submission id when this is a Ray job's driver, else a fresh one."""
    settings = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    submission_id: str | None = (settings.get("metadata") or {}).get("job_submission_id")
    return submission_id or f"job-{secrets.token_hex(6)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
