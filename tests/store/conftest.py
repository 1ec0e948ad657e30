"""A runtime that stores its turns, and what it stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from testkit.stores import settled, stored_runtime

from agentcache import Runtime, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agentcache.store.trajectories import StoredCall


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as opened:
        yield opened


@pytest.fixture
def runtime(store: Store) -> Iterator[Runtime]:
    with stored_runtime(store) as made:
        yield made


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("store") / "runs.db") as opened:
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
