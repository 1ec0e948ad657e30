"""A runtime that stores its turns, and what it stored, in every kind of database.

Tests that look into the file take `path` and run on SQLite alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from testkit.stores import POSTGRES, postgres_schema, settled, stored_runtime

from agentcache import Runtime, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agentcache.store.trajectories import StoredCall


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


KINDS = (
    "sqlite",
    pytest.param(
        "postgresql",
        marks=pytest.mark.skipif(
            POSTGRES not in os.environ,
            reason=f"{POSTGRES} gives no URL of a PostgreSQL database to make schemas in",
        ),
    ),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in {"target", "shared_target"} & set(metafunc.fixturenames):
        metafunc.parametrize(
            name, KINDS[:1] if "path" in metafunc.fixturenames else KINDS, indirect=True
        )


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where an empty store is to be: a file at `path`, or the URL of a server's database."""
    if request.param == "sqlite":
        yield str(request.getfixturevalue("path"))
        return
    with postgres_schema() as url:
        yield url


@pytest.fixture
def store(target: str) -> Iterator[Store]:
    with Store(target) as opened:
        yield opened


@pytest.fixture
def runtime(store: Store) -> Iterator[Runtime]:
    with stored_runtime(store) as made:
        yield made


@pytest.fixture(scope="module")
def shared_target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path_factory.mktemp("store") / "runs.db")
        return
    with postgres_schema() as url:
        yield url


@pytest.fixture(scope="module")
def shared_store(shared_target: str) -> Iterator[Store]:
    with Store(shared_target) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared(shared_store: Store) -> Iterator[Runtime]:
    """One runtime for tests that use ids of their own; it stores in `shared_store`."""
    with stored_runtime(shared_store) as made:
        yield made


@pytest.fixture
def calls(runtime: Runtime, store: Store) -> Callable[[str], list[StoredCall]]:
    """The calls stored so far of the session with an id, in all its openings."""

    def read(id: str) -> list[StoredCall]:
        assert settled(runtime)["failed"] == 0
        return [call for session in store.sessions(id) for call in store.calls(session)]

    return read
