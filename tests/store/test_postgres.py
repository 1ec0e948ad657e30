"""What a database on a server may do that a file does not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, make_url, text
from testkit.stores import POSTGRES, postgres_schema, settled, stored_runtime, user

from agentcache import ConfigError, Store, StoreUnavailable, StoreVersion
from agentcache.store.database import VERSION_TABLE
from agentcache.store.schema import Base

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    POSTGRES not in os.environ, reason=f"{POSTGRES} gives no URL of a PostgreSQL database"
)


@pytest.fixture
def url() -> Iterator[str]:
    with postgres_schema() as made:
        yield made


def run(url: str, query: str) -> None:
    """Run a statement, as another program would."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(query))
    engine.dispose()


def test_its_tables_are_those_of_this_version(url: str) -> None:
    Store(url).close()
    engine = create_engine(url)
    with engine.connect() as connection:
        options = {"version_table": VERSION_TABLE, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_other_versions_and_other_programs_are_left_alone(url: str) -> None:
    with pytest.raises(StoreVersion, match="holds no store"):
        Store(url, create=False)
    run(url, "CREATE TABLE sessions (cookie TEXT)")
    with pytest.raises(StoreVersion, match="'sessions' that is no store's"):
        Store(url)
    run(url, "DROP TABLE sessions")
    Store(url).close()
    run(url, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(StoreVersion, match="update agentcache"):
        Store(url)


def test_connections_that_the_server_ended_are_made_anew(url: str) -> None:
    named = make_url(url).update_query_dict({"application_name": "ended"})
    with (
        Store(named.render_as_string(hide_password=False)) as store,
        stored_runtime(store) as runtime,
    ):
        session = runtime.session("task")
        session.chat([user("One.")], max_new_tokens=1)
        settled(runtime)
        run(
            url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'ended'",
        )
        session.chat([user("Two.")], max_new_tokens=1)
        assert settled(runtime) == {"written": 2, "failed": 0, "waiting": 0}
        [found] = store.sessions("task")
        assert found.turns == 2


def test_what_cannot_be_reached_is_told_without_the_password(url: str) -> None:
    elsewhere = make_url(url).set(port=1, password="hunter2").render_as_string(hide_password=False)
    with pytest.raises(StoreUnavailable, match="cannot be used") as caught:
        Store(elsewhere)
    assert "hunter2" not in str(caught.value)
    missing = make_url(url).set(database="no_such_database").render_as_string(hide_password=False)
    with pytest.raises(StoreUnavailable, match="no_such_database"):
        Store(missing)


def test_a_schema_that_may_not_be_written_is_no_damage(url: str) -> None:
    role = make_url(url).query["options"].removeprefix("-csearch_path=")
    run(url, f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
    try:
        run(url, f"GRANT USAGE ON SCHEMA {role} TO {role}")
        guest = make_url(url).set(username=role, password="secret")
        with pytest.raises(StoreUnavailable, match="permission denied"):
            Store(guest.render_as_string(hide_password=False))
    finally:
        run(url, f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_driver_that_is_missing_is_named(url: str) -> None:
    other = make_url(url).set(drivername="postgresql+asyncpg")
    with pytest.raises(ConfigError, match="asyncpg"):
        Store(other.render_as_string(hide_password=False))
