"""Runtimes that store their turns, and what may happen to a database."""

from __future__ import annotations

import sqlite3
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
