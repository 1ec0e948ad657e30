"""Who computes next: chunks of prompts, and one token for everybody who decodes.

Prompts take turns chunk by chunk. First goes the higher priority, then the tenant that has been
served least, then a prompt that one chunk finishes, then who came first: a short turn does not wait
behind a long prompt, and nobody is passed over for ever.

A prompt that would compute again what another one is about to publish waits for it without a lease,
and lends it its own place in the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.engine.request import Request

__all__ = ["Chunk", "Scheduler"]

_MOST_OVERTAKEN = 4
"""So many chunks of shorter prompts may go before a longer one's."""

Place = tuple[int, int, bool, int]
"""(-priority, tokens the tenant was served, whether others may overtake, arrival)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one request: positions [start, stop), captures at `captures`."""

    request: Request
    start: int
    stop: int
    captures: tuple[int, ...]

    @property
    def inside(self) -> tuple[int, ...]:
        """Captures before its end."""
        return tuple(at for at in self.captures if at < self.stop)


class Scheduler:
    """Queues. `waiting` hold nothing; `running` hold a lease, in order of arrival.

    max_extending: how many prompts may be in progress at once, short ones not counted, so that rows
    are left for them.
    """

    def __init__(self, chunk_len: int, max_captures: int, max_extending: int) -> None:
        self._chunk_len = chunk_len
        self._max_captures = max_captures
        self._max_extending = max_extending
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._blocked = False
        self._served: dict[str | None, int] = {}
        self._followed: dict[Request, tuple[Request, int]] = {}
        self._overtaken: dict[Request, int] = {}

    def add(self, request: Request) -> None:
        """Queue a request.

        A tenant that comes back is taken to have been served as much as the least served of those
        who are there: nobody saves up turns while away (Sheng et al., OSDI 2024).
        """
        tenant = request.spec.tenant
        active = {other.spec.tenant for other in (*self.waiting, *self.running)}
        if tenant not in active:
            least = min((self._served[other] for other in active), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), least)
        self.waiting.append(request)

    def next_waiting(self) -> Iterator[Request]:
        """Who should be acquired, in order, among those who wait for nobody.

        Nobody while memory is short and someone runs.
        """
        if self._blocked and self.running:
            return
        for request in sorted(self.waiting, key=self._order):
            if self.leader(request) is None:
                yield request

    def has_room(self, num_missing: int) -> bool:
        """Whether a prompt with so many tokens to compute may begin beside those in progress."""
        long = [r for r in self.extending() if r.pending > self._chunk_len]
        return num_missing <= self._chunk_len or len(long) < self._max_extending

    def follow(self, request: Request, leader: Request, length: int) -> None:
        """The request waits until `leader` has published its first `length` tokens, or is gone."""
        self._followed[request] = leader, length

    def leader(self, request: Request) -> Request | None:
        """Whom a waiting request waits for."""
        leader, length = self._followed.get(request, (None, 0))
        if leader is None or leader.lease is None or leader not in self.running:
            return None
        if leader.decoding:  # its prompt is done: what it has not published it never will
            return None
        return leader if leader.lease.committed_len < length else None

    def start(self, request: Request) -> None:
        """The request has its lease."""
        self.waiting.remove(request)
        self._followed.pop(request, None)
        self.running.append(request)
        self.running.sort(key=lambda r: r.arrival)

    def remove(self, request: Request) -> None:
        """The request is over, wherever it is queued; memory may have become free."""
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self._forget(request)
        if not self.running and not self.waiting:
            self._served.clear()
        self._blocked = False

    def suspend(self, request: Request) -> None:
        """The request gave its lease back for lack of memory and starts again later."""
        self.running.remove(request)
        self._forget(request)
        self.add(request)
        self.block()

    def _forget(self, request: Request) -> None:
        self._followed.pop(request, None)
        self._overtaken.pop(request, None)

    def block(self) -> None:
        """Acquire nothing more until somebody is done."""
        self._blocked = True

    def victim(self) -> Request:
        """Who gives way when memory is short: the latest of the lowest priority."""
        return min(self.running, key=lambda r: (r.spec.priority, -r.arrival))

    def extending(self) -> list[Request]:
        """The running requests that have more than one token to absorb, or a prompt to begin."""
        return [r for r in self.running if not r.decoding]

    def charge(self, request: Request, num_tokens: int) -> None:
        """So many tokens were computed for the request's tenant."""
        self._served[request.spec.tenant] += num_tokens

    def next_chunks(self, max_num: int) -> list[Chunk]:
        """Pieces of prompts in progress for one pass: the next one, and beside it whole ones of
        others as long as all are no longer than one may be. At most `max_num`; an exact request's
        is alone."""
        request = self._next_extending()
        if request is None:
            return []
        chunks = [self._chunk(request)]
        if not request.spec.exact:
            others = (r for r in self.extending() if r is not request and not r.spec.exact)
            for other in sorted(others, key=self._place):
                if len(chunks) < max_num and self._fits_beside(other, chunks):
                    chunks.append(self._chunk(other))
        return chunks

    def _fits_beside(self, request: Request, chunks: list[Chunk]) -> bool:
        """Whether all that a request has to absorb fits into a pass with these chunks."""
        taken = sum(chunk.stop - chunk.start for chunk in chunks)
        if taken + request.pending > self._chunk_len:
            return False
        inside = [*self._chunk(request).inside, *(at for chunk in chunks for at in chunk.inside)]
        return len(inside) <= self._max_captures

    def _chunk(self, request: Request) -> Chunk:
        """The next piece of a prompt.

        Has at most as many captures inside as there are staging rows; at its end the state itself
        is there. A recorded answer joins the tokens only after the prompt, so the first token never
        waits for it.
        """
        start = request.absorbed
        stop = min(start + self._chunk_len, len(request.tokens))
        if request.spec.exact:  # after a pre-emption too, tokens are absorbed as they first were
            if start < request.prompt_len:
                stop = min(stop, request.prompt_len)
            elif request.is_stepwise:
                stop = start + 1
        assert request.lease is not None
        inside = [at for at in request.lease.plan if start < at < stop]
        if len(inside) > self._max_captures:
            stop = inside[self._max_captures]
        return Chunk(
            request, start, stop, tuple(at for at in request.lease.plan if start < at <= stop)
        )

    def _next_extending(self) -> Request | None:
        extending = self.extending()
        if not extending:
            return None
        places = {request: self._place(request) for request in extending}
        for follower in self.waiting:
            leader = self.leader(follower)
            if leader in places:
                places[leader] = min(places[leader], self._place(follower))
        chosen = min(extending, key=lambda r: places[r])
        for other in extending:
            if other.arrival < chosen.arrival:
                self._overtaken[other] = self._overtaken.get(other, 0) + 1
        self._overtaken.pop(chosen, None)
        return chosen

    def _order(self, request: Request) -> tuple[int, int, int]:
        spec = request.spec
        return -spec.priority, self._served[spec.tenant], request.arrival

    def _place(self, request: Request) -> Place:
        yields = request.pending > self._chunk_len
        if self._overtaken.get(request, 0) >= _MOST_OVERTAKEN:
            yields = False
        priority, served, arrival = self._order(request)
        return priority, served, yields, arrival

    def decoding(self) -> list[Request]:
        """Everybody with one sampled token to absorb, by row, so that rows are neighbours."""
        ready = [r for r in self.running if r.decoding]
        return sorted(ready, key=lambda r: r.lease.row if r.lease else 0)
