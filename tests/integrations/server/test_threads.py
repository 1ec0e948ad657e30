"""What becomes of work whose caller goes away."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("aiohttp")
from agentcache.integrations.server.threads import Threads


@pytest.fixture
def threads():
    made = Threads()
    yield made
    made.close()


async def leave(coroutine, when: threading.Event | None = None) -> None:
    """Begin something, and have its caller go away."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    if when is not None:
        await asyncio.to_thread(when.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("name", ["run", "make"])
def test_what_has_not_begun_never_does(threads, busy, name):
    done: list[str] = []

    async def ask() -> None:
        work = lambda: done.append("ran")  # noqa: E731
        if name == "run":
            await threads.run(work)
        else:
            await threads.make(work, lambda _: done.append("undone"))

    with busy(threads):
        asyncio.run(leave(ask()))
    threads.close()

    assert done == []


def test_what_has_begun_is_undone_when_it_is_there(threads):
    begun, gate, undone = threading.Event(), threading.Event(), []

    def work() -> str:
        begun.set()
        gate.wait(20)
        return "made"

    asyncio.run(leave(threads.make(work, undone.append), begun))
    assert undone == []
    gate.set()
    threads.close()

    assert undone == ["made"]


def test_what_is_waited_for_is_not_undone(threads):
    undone: list[str] = []

    assert asyncio.run(threads.make(lambda: "made", undone.append)) == "made"
    assert undone == []
