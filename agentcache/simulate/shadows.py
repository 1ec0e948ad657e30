"""Shadow caches: what each of `auto`'s candidates would have reused of the same requests.

Each is a whole cache of the same size over pools that only count. Requests reach it when they are
over, one after another. A runtime lets a thread of its own do that, which is always behind and
never waited for, and which begins with the first eviction: until then all orders keep the same. A
simulation does it at once, so that its result is the same every time.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import replace
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np

from agentcache.cache import HybridCache, OutOfPages
from agentcache.clock import ManualClock
from agentcache.metrics import Metrics
from agentcache.policy.auto import CANDIDATES, candidate
from agentcache.pools.base import Counting, RowAllocator
from agentcache.pools.pages import PageAllocator
from agentcache.simulate.handles import Handles
from agentcache.simulate.trace import SimRequest
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import FEW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentcache.policy.base import Costs, Served
    from agentcache.tree.radix_tree import ReuseRule

__all__ = ["Shadows", "Standings"]

_log = logging.getLogger("agentcache")

_FADING = 0.997
_LEAD = 0.01
_DOUBT, _DOUBT_OF_FIRST = 1.5, 0.5
_FIRST_LOOK = 30


class Standings:
    """Who has reused most of late, and by how much.

    Each request counts by its prompt's tokens, and a little less with every one that comes after.
    The lead changes only where somebody is ahead by a hundredth of all tokens, and by more than
    what the single requests differ by makes likely: one and a half standard errors of the sum, so
    that it takes more than two requests. Only half of one gives it back to the first of the names:
    what is expected to be best needs less to show for it.

    >>> standings = Standings(["a", "b"])
    >>> for _ in range(100):
    ...     standings.add(100, [10, 50])
    >>> standings.leader
    'b'
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._doubt = np.full(len(self._names), _DOUBT)
        self._doubt[0] = _DOUBT_OF_FIRST
        self._reused = np.zeros(len(self._names))
        self._pairs = np.zeros((len(self._names), len(self._names)))  # squared differences
        self._asked = 0.0
        self._num = 0
        self.leader = self._names[0]

    def add(self, prompt_tokens: int, reused: Sequence[int]) -> None:
        """A request and what each has reused of it."""
        now = np.asarray(reused, dtype=float)
        self._reused = _FADING * self._reused + now
        self._pairs = _FADING**2 * self._pairs + np.subtract.outer(now, now) ** 2
        self._asked = _FADING * self._asked + prompt_tokens
        self._num += 1
        if self._num < _FIRST_LOOK:
            return
        first = self._names.index(self.leader)
        leads = self._reused - self._reused[first]
        by_chance = self._doubt * np.sqrt(self._pairs[first])
        leads[leads < np.maximum(_LEAD * self._asked, by_chance)] = 0
        self.leader = self._names[int(np.argmax(leads)) if leads.any() else first]


class Shadows:
    """A contest of `auto`'s candidates on shadow caches; see `policy.auto.Contest`.

    rules: makes the components of one tree. num_pages: of the arena; limit_pages: how many of them
    may be held between requests. seconds: CPU that all of it has taken. in_background: whether a
    thread of its own does the work, from the first eviction on; `close` ends it.
    """

    def __init__(
        self,
        costs: Costs,
        rules: Callable[[], Sequence[ReuseRule]],
        *,
        num_pages: int,
        limit_pages: int,
        state_pages: int,
        in_background: bool = False,
    ) -> None:
        self.seconds = 0.0
        self._caches = [
            _Shadow(name, costs, rules(), num_pages, limit_pages, state_pages)
            for name in CANDIDATES
        ]
        self._standings = Standings(list(CANDIDATES))
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._in_background = in_background

    @property
    def leader(self) -> str:
        return self._standings.leader

    def served(self, request: Served) -> None:
        if self._closed:
            return
        if not self._in_background:
            self._serve(request)
        elif self._work.qsize() < _MOST_WAITING:
            request = replace(request, tokens=request.tokens.copy())
            self._work.put(lambda: self._serve(request))

    def evicted(self) -> None:
        """An entry has left the cache that is shadowed. The thread starts with the first."""
        if self._in_background and self._thread is None and not self._closed:
            name = "agentcache-shadows"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def over(self, session: str) -> None:
        self._later(lambda shadow: shadow.over(session))

    def expects(self, session: str, seconds: float) -> None:
        self._later(lambda shadow: shadow.expects(session, seconds))

    def close(self) -> None:
        """End the thread, if there is one. Twice is the same as once."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        self._closed = True

    def _later(self, action: Callable[[_Shadow], None]) -> None:
        """Do something with each shadow when it is its turn."""

        def for_each() -> None:
            for shadow in self._caches:
                action(shadow)

        if not self._in_background:
            for_each()
        elif self._thread is not None or self._work.qsize() < _MOST_WAITING:
            self._work.put(for_each)

    def _run(self) -> None:
        while (action := self._work.get()) is not None:
            try:
                action()
            except Exception:
                _log.exception("a shadow cache failed; what it counted of this request is left out")

    def _serve(self, request: Served) -> None:
        begin = thread_time()
        reused = [shadow.serve(request) for shadow in self._caches]
        self._standings.add(request.prompt_len, reused)
        self.seconds += thread_time() - begin


_MOST_WAITING = 256
"""What may wait for the thread, also before it starts; further requests are left out, which is a
sample as well."""


class _Shadow:
    """One candidate's cache."""

    def __init__(
        self,
        name: str,
        costs: Costs,
        rules: Sequence[ReuseRule],
        num_pages: int,
        limit_pages: int,
        state_pages: int,
    ) -> None:
        self._clock = ManualClock()
        self._pools = Counting(PageAllocator(num_pages), RowAllocator(1), state_pages)
        self._limit_pages = limit_pages
        self._cache = HybridCache(
            RadixTree(rules),
            self._pools,
            candidate(name, costs),
            self._clock,
            Metrics(),
            min_gain=FEW_TOKENS,
        )
        self._handles = Handles(self._cache)

    def serve(self, served: Served) -> int:
        """Tokens of the prompt that this cache would have reused."""
        self._clock.advance(max(0.0, served.at - self._clock.now()))
        request = SimRequest(
            served.session,
            served.at,
            served.tokens,
            served.prompt_len,
            marks=served.declared,
            passing=served.passing,
        )
        reused = self._absorb(request, served)
        while self._pools.pages.num_used > self._limit_pages and self._cache.evict_one():
            pass
        return reused

    def _absorb(self, request: SimRequest, served: Served) -> int:
        cache, prompt = self._cache, request.ids[: request.prompt_len]
        after, known_len = self._handles.stands(request)
        try:
            lease = cache.acquire(
                served.namespace,
                prompt,
                structural=request.marks,
                passing=request.passing,
                salts=served.salts,
                after=after,
                known_len=known_len,
                session=request.session,
            )
        except OutOfPages:
            return 0
        try:
            for length in (*lease.plan, len(request.ids)):
                cache.reserve(lease, length)
                cache.commit(lease, request.ids, length, lease.row)
            self._handles.finish(request, lease)
        except OutOfPages:
            pass  # it was served from what was found all the same
        finally:
            cache.release(lease)
        return lease.boundary

    def over(self, session: str) -> None:
        self._handles.close(session)

    def expects(self, session: str, seconds: float) -> None:
        self._handles.expects(session, seconds)
