"""Handing a result on: a model in another form, an adapter for others' tools, or either on the model hub."""

import shutil
from pathlib import Path
from typing import Any, Literal

from training.errors import ConfigError, MergeError, StorageError
from training.merge import MergeReport, convert
from training.merging.adapter import CONFIG, PROVENANCE, WEIGHTS, read_config
from training.merging.workplace import refuse_existing, work_directory
from training.run_dir import read_json, write_json

_ADAPTER_FILES = (WEIGHTS, PROVENANCE, "README.md")  # beside the config


def export(
    source: Path, out: Path, kind: Literal["bf16", "mxfp4", "adapter"], *, progress: bool = True
) -> MergeReport | None:
    """Writes `source` to the new directory `out` as `kind`.

    Args:
        source: a model directory; for `adapter`, an adapter directory.
        out: must not exist.
        kind: `bf16` or `mxfp4` experts; `adapter` for one that names its base by the hub's id, as PEFT, vLLM and others
            expect, whatever directory it was trained from.
        progress: draw a bar on the terminal.

    Returns:
        what a conversion did; None for an adapter.

    Raises:
        MergeError: `source` is not what `kind` needs.
        ModelError: the model is incomplete.
        StorageError: `out` exists, or the disk is full.
    """
    refuse_existing(Path(out))
    if kind != "adapter":
        return convert(Path(source), Path(out), kind, progress=progress)
    _export_adapter(Path(source), Path(out))
    return None


def _export_adapter(source: Path, out: Path) -> None:
    config = read_config(source)
    if not (source / WEIGHTS).is_file():
        raise MergeError(f"{source} is not an adapter: it has no {WEIGHTS}")
    files = [path for name in _ADAPTER_FILES if (path := source / name).is_file()]
    provenance = read_json(source / PROVENANCE)
    base = {"base_model_name_or_path": provenance["model"], "revision": provenance["revision"]} if provenance else {}
    with work_directory(out, sum(path.stat().st_size for path in files), {}) as work:
        for path in files:
            shutil.copyfile(path, work / path.name)
        write_json(work / CONFIG, config | base)


def push(directory: Path, repo_id: str, *, private: bool = True) -> str:
    """Uploads a model or adapter directory to the model hub as `repo_id` (made if need be) and returns its address.

    HF_TOKEN and HF_ENDPOINT are the hub client's own settings.

    Args:
        directory: finished; hidden files stay here.
        repo_id: OWNER/NAME.
        private: of a repository that is made; an existing one keeps what it is.

    Raises:
        ConfigError: no HF_TOKEN, HF_HUB_OFFLINE is set, or the hub refuses.
        StorageError: not a model or adapter directory.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    directory = Path(directory)
    if not any((directory / name).is_file() for name in ("config.json", CONFIG)):
        raise StorageError(f"{directory} holds neither a model nor an adapter")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set: nothing can be pushed", hint="Unset it where there is network.")
    token = get_token()
    if token is None:
        raise ConfigError("there is no hub token", hint="Set HF_TOKEN to one that may write.")
    api = HfApi(token=token)
    try:
        repo: Any = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            folder_path=directory, repo_id=repo_id, ignore_patterns=[".*"], commit_message="Upload by Polythink"
        )
    except (HfHubHTTPError, HFValidationError, HTTPError) as error:
        raise ConfigError(f"the hub refuses {repo_id}: {str(error).splitlines()[0]}", field="push") from error
    return str(repo)
