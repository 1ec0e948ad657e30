"""Runs the revisions on the connection that `upgrade` brings."""

from __future__ import annotations

from alembic import context

from agentcache.store.database import VERSION_TABLE
from agentcache.store.schema import Base


def run() -> None:
    """Within the transaction that the connection is in."""
    context.configure(
        connection=context.config.attributes["connection"],
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        render_as_batch=True,
    )
    context.run_migrations()


if __name__ == "env_py":  # what alembic loads it as; imported, it does nothing
    run()
