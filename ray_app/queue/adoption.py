"""Drivers that people started themselves: `ray job submit -- python -m training CONFIG_OR_RUN_DIR`."""

import shlex
from itertools import takewhile
from pathlib import Path

from ray_app.queue.ray_jobs import RayJob
from training.run_dir import RunDir


def run_dir_of(ray_job: RayJob, runs: Path) -> RunDir | None:
    """The run directory of a training driver; None for any other Ray job, or before it has made the directory."""
    argument = training_argument(ray_job.entrypoint)
    if argument is None:
        return None
    named = RunDir(Path(argument))
    if named.root.is_absolute() and named.config_path.exists():
        return named
    made = RunDir(runs / ray_job.id)
    return made if made.config_path.exists() else None


def training_argument(entrypoint: str) -> str | None:
    """The first argument of `python -m training`, wherever that stands in the command; None when it does not."""
    try:
        words = shlex.split(entrypoint)
    except ValueError:  # an unclosed quote: not a command of ours
        return None
    for index, word in enumerate(words):
        if Path(word).name.startswith("python"):
            options = list(takewhile(lambda word: word.startswith("-"), words[index + 1 :]))
            rest = words[index + 1 + len(options) :]
            if options[-1:] == ["-m"] and rest[:1] == ["training"] and len(rest) > 1:
                return rest[1]
    return None
