"""Threads for what would block the event loop: rendering, encoding, waiting for the engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NUM_THREADS", "Threads"]

NUM_THREADS = 4

T = TypeVar("T")


class Threads:
    """A few threads. What was begun is done, also where nobody waits for it any more; what was not
    is left, but for `later`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="agentcache-server")

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function; to be awaited on the event loop."""
        return asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def make(self, function: Callable[[], T], undo: Callable[[T], object]) -> T:
        """What a function makes. Where nobody waits for it any more it is not begun, or undone."""
        job = self._pool.submit(function)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if not job.cancel():
                job.add_done_callback(lambda done: _undo(done, undo))
            raise

    def later(self, function: Callable[[], object]) -> None:
        """Run a function some time soon."""
        self._pool.submit(function)

    def close(self) -> None:
        """End, when all that was given is done."""
        self._pool.shutdown()


def _undo(done: Future[T], undo: Callable[[T], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        undo(done.result())
