"""Alembic runs this file to apply revisions, on the connection that `ray_app.queue.schema` hands over."""

from alembic import context

from ray_app.queue.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
