"""Versions of the job store's tables: an older database is upgraded when it is opened, a newer one is refused."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from training.errors import StorageError

MIGRATIONS = Path(__file__).parent / "migrations"
UPGRADE_LOCK = 7_021_950_333
"""Number of PostgreSQL's advisory lock for upgrades; any that nobody else uses."""


def upgrade(engine: Engine, to: str = "head") -> None:
    """Brings the database to revision `to`; one process at a time does it.

    Raises:
        StorageError: a newer Polythink has upgraded it.
    """
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    with engine.connect() as connection:
        if _revision(connection) == scripts.as_revision_number(to):
            return
    with engine.execution_options(writes=True).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": UPGRADE_LOCK})
        current = _revision(connection)
        if current is not None and current not in {script.revision for script in scripts.walk_revisions()}:
            raise StorageError(
                f"the job store {engine.url.render_as_string()} has schema revision {current}, which this version of "
                f"Polythink does not know (its newest is {scripts.get_current_head()})",
                hint="A newer version has upgraded it: run that one, or restore a copy from before.",
            )
        config.attributes["connection"] = connection
        command.upgrade(config, to)


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
