"""Schema versions: upgraded from any older one, refused from a newer one, and equal to what the code says."""

import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from ray_app.queue.schema import upgrade
from ray_app.queue.store import SqlStore
from ray_app.queue.tables import metadata, open_engine
from training.errors import StorageError


def test_the_revisions_make_what_the_code_says(database_url: str) -> None:
    engine = open_engine(database_url)
    upgrade(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_an_older_database_is_upgraded_and_keeps_its_jobs(database_url: str) -> None:
    engine = open_engine(database_url)
    upgrade(engine, "0001")
    columns = "id, name, status, config, created_at, queued_at, priority, queue_timeout_s, max_preemptions, attempt, "
    columns += "preemptions, overtaken, run_dir, status_reason, progress"
    row = "'job-1', 'old', 'SUCCEEDED', '{}', 1, 1, 0, 60, 3, 1, 0, 0, '/r', '', '{}'"
    with engine.execution_options(writes=True).begin() as connection:
        connection.execute(text(f"INSERT INTO jobs ({columns}) VALUES ({row})"))
    assert "jobs_by_ray_job" not in {index["name"] for index in inspect(engine).get_indexes("jobs")}
    engine.dispose()
    store = SqlStore(database_url, "/runs")
    assert "jobs_by_ray_job" in {index["name"] for index in inspect(store.engine).get_indexes("jobs")}
    job = store.get("job-1")
    assert job is not None
    assert job.name == "old"
    store.close()


def test_a_newer_database_is_refused_and_left_as_it_is(database_url: str) -> None:
    SqlStore(database_url, "/runs").close()
    engine = open_engine(database_url)
    with engine.execution_options(writes=True).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StorageError, match="revision 9999") as caught:
        SqlStore(database_url, "/runs")
    assert "newer version" in caught.value.hint
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    engine.dispose()


def test_several_replicas_may_open_a_fresh_database_at_once(database_url: str) -> None:
    barrier = threading.Barrier(4)
    failures: list[Exception] = []

    def open_store() -> None:
        barrier.wait()
        try:
            SqlStore(database_url, "/runs").close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=open_store) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
