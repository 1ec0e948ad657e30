"""Runtimes that store their turns, and what may happen to a database."""

from __future__ import annotations

import os
import sqlite3
import uuid
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from agentcache import CacheConfig, Runtime
from testkit.models import micro_model, tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def stored_runtime(store: Any, **options: Any) -> Runtime:
    """The micro model with a store."""
    cache = CacheConfig(budget="16MiB", page_size=4, prefill_chunk=32)
    return Runtime(micro_model(), tokenizer(), cache=cache, store=store, **options)


def settled(runtime: Runtime) -> dict[str, int]:
    """The store's counts once nothing waits any more."""
    assert runtime.recorder is not None
    runtime.recorder.flush()
    counts = runtime.recorder.counts()
    assert counts["waiting"] == 0
    return counts


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


POSTGRES = "AGENTCACHE_TEST_POSTGRES"
"""The variable with the URL of a PostgreSQL database that tests may make schemas in."""


@contextmanager
def postgres_schema() -> Iterator[str]:
    """The URL of a schema that is empty, and gone at the end."""
    from sqlalchemy import create_engine, make_url, text

    name = f"test_{uuid.uuid4().hex}"
    engine = create_engine(os.environ[POSTGRES])
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    url = make_url(os.environ[POSTGRES]).update_query_dict({"options": f"-csearch_path={name}"})
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
        engine.dispose()


def sql(path: Path, query: str) -> list[Any]:
    """Run a statement on the file, as another program would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA legacy_alter_table=ON")
        return other.execute(query).fetchall()


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Another program writes to the database, and is not done."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")
