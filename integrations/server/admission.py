"""Who may run: places, back-pressure, and the end of the server."""

from __future__ import annotations

import asyncio
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentcache.integrations.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Admission"]


class Admission:
    """Counts calls from the moment they are taken to the moment they have given everything back.

    All on the event loop. num_places: calls that the runtime may compute at once; max_queue: how
    many more may wait for it.
    """

    def __init__(self, num_places: int, max_queue: int) -> None:
        self.num_places = num_places
        self.max_queue = max_queue
        self.draining = False
        self._running: dict[object, Callable[[ApiError], None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_s = 1.0

    @property
    def num_calls(self) -> int:
        """Calls under way, waiting ones included."""
        return len(self._running)

    @contextmanager
    def place(self, stop: Callable[[ApiError], None]) -> Iterator[None]:
        """Hold a place; `stop` ends the call early, with the error to tell.

        Raises ApiError: 503 once the server is told to end, 429 where too many wait.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
        if len(self._running) >= self.num_places + self.max_queue:
            raise ApiError(
                429,
                f"{len(self._running)} requests run or wait, the limit of this server is "
                f"{self.num_places + self.max_queue}; try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(self.retry_after_s)},
            )
        place = object()
        self._running[place] = stop
        self._idle.clear()
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        try:
            yield
        finally:
            del self._running[place]
            self._mean_s += 0.1 * (loop.time() - begun_at - self._mean_s)
            if not self._running:
                self._idle.set()

    @property
    def retry_after_s(self) -> int:
        """About when a place is free: whole seconds, from 1 to 60."""
        return max(1, min(60, math.ceil(self._mean_s)))

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; let running calls finish for `grace_s`, then end them."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for stop in list(self._running.values()):
                stop(ApiError(503, "the server is shutting down; the call was ended"))
            await self._idle.wait()
