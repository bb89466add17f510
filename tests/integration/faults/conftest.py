"""The harness's table, printed when the session ends, and kept where POLYTHINK_FAULTS_TABLE says."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.faults.invariants import Outcome, keep, table
from tests.integration.faults.kinds import SEED

TABLE = os.environ.get("POLYTHINK_FAULTS_TABLE")  # read now: an installation in a test sees no such variables
OUTCOMES = pytest.StashKey[list[Outcome]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = []


@pytest.fixture
def outcomes(pytestconfig: pytest.Config) -> Iterator[list[Outcome]]:
    """Where a test puts what it found; it is kept at once, whatever happens to the session."""
    found: list[Outcome] = []
    yield found
    pytestconfig.stash[OUTCOMES] += found
    if TABLE:
        keep(found, Path(TABLE))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if outcomes := config.stash.get(OUTCOMES, []):
        terminalreporter.section(f"faults, seed {SEED}")
        terminalreporter.write_line(table(outcomes))
