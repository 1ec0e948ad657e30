"""The table of named sessions, without a server around it."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")
from agentcache.integrations.server.session_table import SessionTable
from agentcache.integrations.server.threads import Threads


@pytest.fixture
def table(runtime):
    threads = Threads()
    yield SessionTable(runtime, threads, 1)
    threads.close()


def test_a_fork_that_a_call_has_named_already_stays_in_use(table):
    with table.use(None, "named") as used:
        table.adopt(None, used.session)
        with table.use(None, "other"):
            assert not used.session.closed
    with table.use(None, "third"):
        assert used.session.closed


def test_a_fork_is_kept_in_place_of_a_session_that_was_closed(table, runtime):
    with table.use(None, "again") as used:
        used.session.close()
    fresh = runtime.session("again")
    table.adopt(None, fresh)

    assert table.find(None, "again") is fresh
    fresh.close()
