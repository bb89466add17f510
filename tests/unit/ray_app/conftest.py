"""Databases for the store's tests: each runs on SQLite and on a real PostgreSQL."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    if postgres.binaries() is None:
        pytest.skip("no PostgreSQL server here: install Debian's `postgresql` or the wheel `pgserver`")
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    return postgres.new_database(request.getfixturevalue("postgres_server"), f"test_{secrets.token_hex(4)}")
