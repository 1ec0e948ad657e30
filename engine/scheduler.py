"""Who computes next: one prompt at a time in chunks, and one token for everybody who decodes.

Extending one prompt at a time lets an equal prompt behind it reuse what the first one publishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentcache.engine.request import Request

__all__ = ["Scheduler"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one request: positions [start, stop), captures at `captures`."""

    request: Request
    start: int
    stop: int
    captures: tuple[int, ...]


class Scheduler:
    """Queues. `waiting` hold nothing; `running` hold a lease, in order of arrival."""

    def __init__(self, chunk_len: int, max_captures: int) -> None:
        self._chunk_len = chunk_len
        self._max_captures = max_captures
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._blocked = False

    def add(self, request: Request) -> None:
        """Queue a request behind those of its priority."""
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: (-r.spec.priority, r.arrival))

    def next_waiting(self) -> Request | None:
        """Who should be acquired next, if anyone should be now.

        Nobody while a prompt is being computed, or while memory is short and someone runs.
        """
        if not self.waiting or self.extending() is not None or (self._blocked and self.running):
            return None
        return self.waiting[0]

    def start(self, request: Request) -> None:
        """The request has its lease."""
        self.waiting.remove(request)
        self.running.append(request)
        self.running.sort(key=lambda r: r.arrival)

    def remove(self, request: Request) -> None:
        """The request is over, wherever it is queued; memory may have become free."""
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self._blocked = False

    def suspend(self, request: Request) -> None:
        """The request gave its lease back for lack of memory and starts again later."""
        self.running.remove(request)
        self.add(request)
        self.block()

    def block(self) -> None:
        """Acquire nothing more until somebody is done."""
        self._blocked = True

    def victim(self) -> Request:
        """Who gives way when memory is short: the latest of the lowest priority."""
        return min(self.running, key=lambda r: (r.spec.priority, -r.arrival))

    def extending(self) -> Request | None:
        """The running request that has more than one token to absorb, or a prompt to begin."""
        return next((r for r in self.running if not r.decoding), None)

    def next_chunk(self) -> Chunk | None:
        """The next piece of the prompt in progress.

        Ends after at most as many captures as there are staging rows. A recorded answer joins the
        tokens only after the prompt, so the first token never waits for it.
        """
        request = self.extending()
        if request is None:
            return None
        start = request.absorbed
        stop = min(start + self._chunk_len, len(request.tokens))
        assert request.lease is not None
        inside = [at for at in request.lease.plan if start < at <= stop]
        if len(inside) > self._max_captures:
            inside = inside[: self._max_captures]
            stop = inside[-1]
        return Chunk(request, start, stop, tuple(inside))

    def decoding(self) -> list[Request]:
        """Everybody with one sampled token to absorb, by row, so that rows are neighbours."""
        ready = [r for r in self.running if r.decoding]
        return sorted(ready, key=lambda r: r.lease.row if r.lease else 0)
