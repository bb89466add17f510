"""The same service with its queue on a real PostgreSQL whose connections are cut, and which crashes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgres
from tests.integration.faults import driver
from tests.integration.faults.invariants import Outcome
from tests.integration.faults.kinds import POSTGRES, Fault, parameters
from tests.integration.faults.play import PLAIN, play, submit
from tests.integration.service import Service, running

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(postgres.binaries() is None, reason="no PostgreSQL server here"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home: Path = tmp_path_factory.mktemp("postgres")
    with (
        postgres.server() as server,
        running(
            home,
            POLYTHINK_DATABASE_URL=postgres.new_database(server, "queue"),
            POLYTHINK_DRIVER_COMMAND=json.dumps([sys.executable, driver.__file__]),
            POLYTHINK_MAX_RUNNING_JOBS="2",
        ) as service,
    ):
        yield service


@pytest.mark.parametrize("fault", parameters(POSTGRES))
def test_the_service_survives(fault: Fault, service: Service, outcomes: list[Outcome]) -> None:
    play(fault, service, outcomes)
    key = f"again-{fault.id}"
    assert submit(service, PLAIN, key) == submit(service, PLAIN, key)
    assert not (service.home / "jobs.db").exists()
