"""Addresses and names that MLflow would refuse after the training are refused before anything is spent."""

from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.utils import validation

from training.config import parse_config
from training.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"path": "openai/gpt-oss-20b"}, "data": {"path": "./rows.jsonl"}}


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:5000",
        "https://mlflow.example/base",
        "sqlite:////data/mlflow.db",
        "postgresql+psycopg://user:password@host/mlflow",
        "databricks",
        "databricks://PROFILE",
    ],
)
def test_addresses_of_stores_are_taken(uri: str) -> None:
    assert parse_config(MINIMAL | {"tracking": {"uri": uri}}).tracking.uri == uri


@pytest.mark.parametrize("uri", ["databricks-uc", "databricks-uc://PROFILE", "uc:http://127.0.0.1:8080", "http://a"])
def test_registries_may_be_unity_catalogs(uri: str) -> None:
    assert parse_config(MINIMAL | {"tracking": {"registry_uri": uri}}).tracking.registry_uri == uri


def test_directories_are_taken_where_mlflow_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert parse_config(MINIMAL | {"tracking": {"uri": "/data/mlruns"}}).tracking.uri == "/data/mlruns"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("uri", "", "no address"),
        ("uri", "postgresql://", "not where"),
        ("uri", "sqlite:///", "not where"),
        ("uri", "http://", "not where"),
        ("uri", "C:\\x", "no address"),
        ("uri", "databricksX", "no address"),
        ("uri", "mlruns", "no address"),
        ("uri", "file:///data/mlruns", "keeps its runs in databases"),
        ("uri", "/data/mlruns", "keeps its runs in databases"),
        ("uri", "databricks-uc", "no address"),
        ("registry_uri", "databricks-ucx", "no address"),
        ("experiment", "", "is blank"),
        ("experiment", "two\nlines", "line break"),
        ("experiment", "x" * 501, "has 501 characters; MLflow takes 500"),
        ("registered_model", " ", "is blank"),
        ("registered_model", "a/b", "hold no '/'"),
        ("registered_model", "..", "is a path"),
        ("registered_model", "x" * 257, "has 257 characters"),
        ("registered_model", "two\tparts", "line break"),
        ("alias", "", "1 to 255"),
        ("alias", "two words", "1 to 255"),
        ("alias", "latest", "keeps for versions"),
        ("alias", "Latest", "keeps for versions"),
        ("alias", "v1", "keeps for versions"),
    ],
)
def test_what_mlflow_cannot_take_is_refused_with_field_value_and_way_out(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(MINIMAL | {"tracking": {key: value}})
    assert caught.value.field == f"tracking.{key}"
    assert repr(value)[:90] in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("registry_uri", "name", "fits"),
    [
        ("databricks-uc", "main.models.thinker", True),
        ("databricks-uc", "thinker", False),
        ("databricks-uc", "main.models.thin/ker", False),
        (None, "thinker", True),
        (None, "a.b.c", True),
        (None, "a/b", False),
    ],
)
def test_a_registered_name_must_fit_its_registry(registry_uri: str | None, name: str, fits: bool) -> None:
    tracking = {"registry_uri": registry_uri, "registered_model": name}
    if fits:
        parse_config(MINIMAL | {"tracking": tracking})
        return
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL | {"tracking": tracking})
    assert caught.value.field == "tracking.registered_model"


def test_the_runs_name_must_fit_too_where_it_is_what_is_registered() -> None:
    config = parse_config(MINIMAL | {"name": "thinker", "tracking": {"registry_uri": "databricks-uc"}})
    with pytest.raises(ConfigError, match=r"catalog\.schema\.name"):
        config.resolved()


@pytest.mark.parametrize("alias", ["champion", "latest", "v1", "V12", "v1b", "version1", "two words", "latest2"])
def test_aliases_are_judged_as_mlflow_judges_them(alias: str) -> None:
    def refused(check: Any) -> bool:
        try:
            check()
        except (MlflowException, ConfigError):
            return True
        return False

    def mlflow() -> None:
        validation._validate_model_alias_name(alias)
        validation._validate_model_alias_name_reserved(alias)

    assert refused(lambda: parse_config(MINIMAL | {"tracking": {"alias": alias}})) == refused(mlflow)
