"""Where a base model comes from: a directory, or the hub, fetched once per node."""

import os
from pathlib import Path

from training.config import ModelConfig
from training.errors import ModelError, StorageError

_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "LICENSE*", "USAGE_POLICY"]


def fetch(model: ModelConfig, *, progress: bool = True) -> Path:
    """The local directory of `model`; a hub id is downloaded to the hub client's cache first, with its progress bars.

    The hub client locks per file, so several processes of a node fetch once.

    Raises:
        ModelError: no such directory or repository, no network (`HF_HUB_OFFLINE`), or no weights in it.
    """
    return checked(Path(model.path).expanduser() if model.is_local else _from_hub(model, progress))


def on_this_node(model: ModelConfig, directory: Path, *, progress: bool = False) -> Path:
    """What `fetch` gave in `directory` on the driver's node, as this node has it: a hub model at the same commit.

    Raises:
        ModelError: as `fetch`.
        StorageError: a local model that this node does not have.
    """
    if model.is_local:
        if not directory.is_dir():
            raise StorageError(
                f"node {os.uname().nodename} has no directory {directory}, where the driver's node has the base",
                hint="Put the model there on every node, or give its hub id.",
                field="model.path",
            )
        return directory
    # Also where the directory is there: another process of this node may still be filling it. Its name is the commit.
    try:
        return fetch(model.model_copy(update={"revision": directory.name}), progress=progress)
    except ModelError:
        if directory.is_dir():  # brought here by other means than the hub client, and there is no network
            return directory
        raise


def checked(directory: Path) -> Path:
    """`directory` in full, if it looks like a model's.

    Raises:
        ModelError: it is not there, a file, or has no configuration or weights.
    """
    if not os.path.isdir(directory):  # unlike Path.is_dir, also for names that no file system takes
        kind = f"{directory} is a file" if os.path.isfile(directory) else f"there is no directory {directory}"
        raise ModelError(kind, hint="Give the directory of a model, or a hub id.", field="model.path")
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} holds no config.json", hint="Give the directory of a model.", field="model.path")
    if not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{directory} holds no *.safetensors", hint="Convert the weights to safetensors.", field="model.path"
        )
    return directory.resolve()


def _from_hub(model: ModelConfig, progress: bool) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=_FILES))
    except HFValidationError:
        raise ModelError(
            f"{model.path!r} is neither a hub id nor a path",
            hint="Write a relative path with a leading ./",
            field="model.path",
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, OSError) as error:
        raise ModelError(
            f"cannot fetch {model.path} from the model hub: {str(error).splitlines()[0]}",
            hint="Fetch it where there is network and give its directory as model.path, or unset HF_HUB_OFFLINE; "
            "a gated model needs HF_TOKEN.",
            field="model.path",
        ) from None
