"""Threads for what would block the event loop: rendering, encoding, waiting for the engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Threads"]

T = TypeVar("T")


class Threads:
    """A few threads. What was begun is done, also where nobody waits for it any more."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="agentcache-server")

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function; to be awaited on the event loop."""
        return asyncio.get_running_loop().run_in_executor(self._pool, function)

    def later(self, function: Callable[[], object]) -> None:
        """Run a function some time soon."""
        self._pool.submit(function)

    def close(self) -> None:
        """End, when all that was given is done."""
        self._pool.shutdown()
