"""What a run was made with: package versions and the revision of this code."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("polythink", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "ray", "mlflow")


def describe_environment() -> dict[str, str]:
    """MLflow tags: `version.PACKAGE`, `version.python`, and `mlflow.source.git.commit` in a checkout."""
    tags = {f"version.{name}": found for name in PACKAGES if (found := package_version(name))}
    tags["version.python"] = platform.python_version()
    commit = git_revision()
    return tags | ({"mlflow.source.git.commit": commit} if commit else {})


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """The commit of the checkout that this file lies in, `+changes` when it differs; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return f"{commit}+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
