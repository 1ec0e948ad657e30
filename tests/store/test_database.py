"""Databases as they are found: none, empty, in use, damaged, of another version or program."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from testkit.stores import held, sql, stored_runtime

from agentcache import ConfigError, Store, StoreDamaged, StoreUnavailable, StoreVersion
from agentcache.store import database
from agentcache.store.database import HEAD, VERSION_TABLE, upgrade
from agentcache.store.schema import Base

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("", "empty"),
        ("mysql://host/name", "mysql"),
        ("nosuch://x", "nosuch"),
        ("sqlite://", "memory"),
        ("sqlite:///:memory:", "memory"),
        ("postgresql://host:port/name", "no database URL"),
        ("://", "no database URL"),
        ("postgresql+nosuchdriver://host/name", "nosuchdriver"),
    ],
)
def test_what_is_no_url_of_a_store_is_refused_by_name(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Store(url)


def test_a_password_is_not_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        Store("postgresql+nosuchdriver://user:secret@host/name")
    assert "secret" not in str(caught.value)


def test_an_empty_file_becomes_a_store_with_the_tables_of_this_version(path: Path) -> None:
    path.touch()
    upgrade(path)
    assert sql(path, f"SELECT version_num FROM {VERSION_TABLE}") == [(HEAD,)]
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        options = {"version_table": VERSION_TABLE, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_the_newest_revision_is_the_one_that_stores_are_brought_to() -> None:
    folder = database.Path(database.__file__).with_name("migrations")
    assert ScriptDirectory(str(folder)).get_heads() == [HEAD]


def test_upgrading_a_store_of_this_version_changes_nothing(path: Path) -> None:
    upgrade(path)
    before = sql(path, "SELECT sql FROM sqlite_master")
    upgrade(path)
    assert sql(path, "SELECT sql FROM sqlite_master") == before


def test_programs_that_make_the_same_store_at_once_agree(target: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: upgrade(target), range(4)))
    with Store(target, create=False) as store:
        assert store.sessions() == []


def test_a_store_of_a_later_version_is_left_alone(path: Path) -> None:
    upgrade(path)
    sql(path, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(StoreVersion, match=r"9999.*update agentcache"):
        Store(path)


def test_another_programs_tables_are_left_alone(path: Path) -> None:
    sql(path, "CREATE TABLE sessions (cookie TEXT)")
    with pytest.raises(StoreVersion, match="'sessions' that is no store's"):
        Store(path)
    assert sql(path, "SELECT count(*) FROM sqlite_master") == [(1,)]


def test_a_file_that_is_no_database_is_not_overwritten(path: Path) -> None:
    path.write_bytes(b"my thesis, the only copy\n" * 100)
    with pytest.raises(StoreDamaged, match="damaged or no database"):
        Store(path)
    assert path.read_bytes() == b"my thesis, the only copy\n" * 100


def test_a_corrupt_store_is_told_at_start(path: Path) -> None:
    upgrade(path)
    data = bytearray(path.read_bytes())
    data[100:4096] = b"\xff" * 3996  # the page with the names of the tables
    path.write_bytes(data)
    with pytest.raises(StoreDamaged):
        Store(path)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="unable to open"):
        Store(tmp_path / "none" / "runs.db")


def test_readers_make_no_database(path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="there is no database"):
        Store(path, create=False)
    assert not path.exists()
    path.touch()
    with pytest.raises(StoreVersion, match="holds no store"):
        Store(path, create=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is writable for this user")
def test_a_file_that_may_not_be_written_is_told(path: Path) -> None:
    path.touch(mode=0o444)
    with pytest.raises(StoreUnavailable):
        Store(path)


def test_a_new_store_that_another_program_holds_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_S", 0.05)
    sql(path, "PRAGMA journal_mode=WAL")
    with held(path), pytest.raises(StoreUnavailable, match="locked"):
        Store(path)


def test_a_runtime_says_so_at_start_and_leaves_no_thread_behind(path: Path) -> None:
    import threading

    path.write_bytes(b"no database" * 1000)
    before = threading.active_count()
    with pytest.raises(StoreDamaged):
        stored_runtime(path)
    assert threading.active_count() == before
