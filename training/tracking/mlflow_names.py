"""What MLflow accepts as the address of a store and as names in it, checked before anything is spent. Loads without MLflow.

The rules are MLflow 3.17's (`mlflow.utils.validation`, `mlflow.utils.uri`, the schemes that its store registries know).
"""

import os
import re
from importlib.metadata import entry_points
from urllib.parse import urlparse

from training.errors import ConfigError

MAX_EXPERIMENT_CHARACTERS = 500
MAX_MODEL_CHARACTERS = 256  # the column's width in MLflow's databases
MAX_ALIAS_CHARACTERS = 255
DATABASES = ("postgresql", "mysql", "sqlite", "mssql")
_FORMS = "Such as http://host:5000, sqlite:////data/mlflow.db, postgresql://user@host/mlflow, databricks or databricks://PROFILE."


def check_uri(uri: str) -> str:
    """`uri`, if MLflow can read it as a tracking URI.

    Raises:
        ConfigError: it cannot, or it names a kind of store without saying which.
    """
    if uri == "databricks":
        return uri
    kind, rest = _parts(uri)
    plugins = {plugin.name for plugin in entry_points(group="mlflow.tracking_store")}
    if kind not in {*DATABASES, "http", "https", "file", "databricks", *plugins}:
        raise ConfigError("is no address of an MLflow store", hint=_FORMS)
    if not rest:
        raise ConfigError(f"says {kind}, and not where", hint=_FORMS)
    if kind == "file" and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        raise ConfigError("is a directory, and MLflow 3 keeps its runs in databases", hint=_FORMS)
    return uri


def check_registry_uri(uri: str) -> str:
    """`uri`, if MLflow can read it as a registry URI: Unity Catalog's forms as well.

    Raises:
        ConfigError: see `check_uri`.
    """
    kind, rest = _parts(uri)
    if uri == "databricks-uc" or (kind in ("databricks-uc", "uc") and rest):
        return uri
    return check_uri(uri)


def _parts(uri: str) -> tuple[str, str]:
    """The kind of store, and what follows it; a path is a `file`."""
    if uri.startswith(("/", "./", "../", "~/")):
        return "file", uri
    scheme = urlparse(uri).scheme
    return scheme.partition("+")[0], uri[len(scheme) + 1 :].strip("/ ")


def check_experiment(name: str) -> str:
    """
    Raises:
        ConfigError: blank, over 500 characters, or with control characters.
    """
    return _check_text(name, MAX_EXPERIMENT_CHARACTERS)


def check_model_name(name: str) -> str:
    """A registered model's name, as far as it does not depend on the registry.

    Raises:
        ConfigError: blank, over 256 characters, with control characters, or one that file systems read as a path.
    """
    if name in (".", ".."):
        raise ConfigError("is a path, no name", hint="Use letters, digits, '-' and '_'.")
    return _check_text(name, MAX_MODEL_CHARACTERS)


def check_model_fits_registry(name: str, registry_uri: str | None) -> None:
    """
    Raises:
        ConfigError: not `catalog.schema.name` on Unity Catalog, or a `/` or `:` elsewhere.
    """
    if (registry_uri or "").startswith("databricks-uc"):
        if not re.fullmatch(r"[^./\s:]+\.[^./\s:]+\.[^./\s:]+", name):
            raise ConfigError(
                f"tracking.registered_model={name!r}: Unity Catalog names are catalog.schema.name",
                hint="Give all three parts.",
                field="tracking.registered_model",
            )
    elif re.search(r"[/:]", name):
        raise ConfigError(
            f"tracking.registered_model={name!r}: MLflow's names hold no '/' and no ':'",
            hint="Unity Catalog's catalog.schema.name goes with tracking.registry_uri=databricks-uc.",
            field="tracking.registered_model",
        )


def check_alias(alias: str) -> str:
    """
    Raises:
        ConfigError: characters that aliases do not have, or a name that MLflow keeps for itself.
    """
    if not re.fullmatch(rf"[A-Za-z0-9_-]{{1,{MAX_ALIAS_CHARACTERS}}}", alias):
        raise ConfigError(f"must be 1 to {MAX_ALIAS_CHARACTERS} letters, digits, '_' or '-'", hint="Such as champion.")
    if alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias):
        raise ConfigError("is a name that MLflow keeps for versions", hint="Use another alias, such as champion.")
    return alias


def _check_text(text: str, longest: int) -> str:
    if not text.strip():
        raise ConfigError("is blank", hint="Leave it out, or give a name.")
    if len(text) > longest:
        raise ConfigError(f"has {len(text)} characters; MLflow takes {longest}", hint="Give a shorter name.")
    if not text.isprintable():
        raise ConfigError("holds a line break or another character that cannot be shown", hint="Give it in one line.")
    return text
