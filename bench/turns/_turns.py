"""The calls of an agent's sessions, the cache that serves them, and the CPU time of every step."""

from __future__ import annotations

from dataclasses import dataclass
from time import thread_time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from agentcache.cache import HybridCache
from agentcache.clock import SystemClock
from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.components.swa import SwaComponent
from agentcache.metrics import Metrics
from agentcache.policy.eviction import make_policy
from agentcache.pools.base import Counting, RowAllocator
from agentcache.pools.pages import PageAllocator
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from agentcache.cache import SessionRef
    from agentcache.cache.memory import Memory
    from agentcache.components.base import Component
    from agentcache.types import IntArray

__all__ = [
    "NAMESPACE",
    "ONE_SHOT_LEN",
    "PHASES",
    "STATE_TOKENS",
    "WINDOW",
    "Agents",
    "CacheServer",
    "Evictions",
    "Served",
    "Server",
    "Step",
    "make_cache",
    "num_pages",
    "one_shots",
    "serve_all",
]

PHASES = ("acquire", "reserve", "prefill_commit", "decode_commit", "references", "release", "evict")
WINDOW = 4096
STATE_TOKENS = 256
"""A checkpoint is as large as the KV of so many tokens: 4 pages of 64."""
NAMESPACE = b"bench"
ONE_SHOT_LEN = 2000
_BACKGROUND_EVERY = 12
_OUTPUT_SHARE = 0.3
_REPLY_HEADER_LEN = 4
_VOCAB = 100_000


@dataclass(frozen=True, slots=True)
class Step:
    """One request. tokens: its prompt and its answer; session: None for a one-shot."""

    session: int | None
    tokens: IntArray
    prompt_len: int


class Agents:
    """Sessions that take turns and only append, and one-shots that nobody goes on from.

    Every 12th request (8.3 %) is a one-shot. A step's tokens are a view of its session's one
    growing buffer. history_len: tokens of each session so far.
    """

    def __init__(self, num_sessions: int, capacity: int, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)
        self._buffers = [self._ids(capacity) for _ in range(num_sessions)]
        self.history_len = 0
        self._num_steps = 0

    def turns(self, count: int, new_len: int) -> Iterator[Step]:
        """`count` turns of every session, each with `new_len` tokens more than the one before."""
        for _ in range(count):
            start, self.history_len = self.history_len, self.history_len + new_len
            prompt_len = self.history_len - int(new_len * _OUTPUT_SHARE)
            assert prompt_len > start
            for session, buffer in enumerate(self._buffers):
                self._num_steps += 1
                if self._num_steps % _BACKGROUND_EVERY == 0:
                    self._num_steps += 1
                    yield Step(None, self._ids(ONE_SHOT_LEN), ONE_SHOT_LEN - 32)
                yield Step(session, buffer[: self.history_len], prompt_len)

    def _ids(self, count: int) -> IntArray:
        return self._generator.integers(0, _VOCAB, count, dtype=np.int32)


def one_shots(count: int, prompt_len: int, output_len: int, seed: int = 0) -> Iterator[Step]:
    """Requests that have nothing in common."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        tokens = generator.integers(0, _VOCAB, prompt_len + output_len, dtype=np.int32)
        yield Step(None, tokens, prompt_len)


def num_pages(
    kinds: Sequence[Kind], page_size: int, num_tokens: int, num_turns: int | None = None
) -> int:
    """Pages of one sequence's KV, and of its last window and last two checkpoints, or of the
    windows and checkpoints of all of its turns."""
    window_len, checkpoints = min(num_tokens, WINDOW), 2
    if num_turns is not None:
        window_len, checkpoints = num_tokens, 2 * num_turns
    pages = 0
    if Kind.FULL in kinds:
        pages += -(-num_tokens // page_size)
    if Kind.SWA in kinds:
        pages += -(-window_len // page_size) + 1
    if Kind.STATE in kinds:
        pages += checkpoints * (STATE_TOKENS // page_size)
    return pages


class Evictions:
    """Counts the evictions of a cache and the CPU seconds they take, whoever needs the room."""

    def __init__(self, memory: Memory) -> None:
        self.seconds = 0.0
        self.count = 0
        self._evict_one = memory.evict_one
        memory.evict_one = self  # type: ignore[method-assign]

    def __call__(self) -> bool:
        begin = thread_time()
        done = self._evict_one()
        self.seconds += thread_time() - begin
        self.count += done
        return done


def make_cache(
    kinds: Sequence[Kind], page_size: int, pages: int, policy: str = "session-lru"
) -> HybridCache:
    """A cache of integers only, with one arena of `pages` pages for every kind."""
    components: dict[Kind, Component] = {
        Kind.FULL: FullComponent(page_size),
        Kind.SWA: SwaComponent(WINDOW, page_size),
        Kind.STATE: StateComponent(),
    }
    return HybridCache(
        RadixTree([components[kind] for kind in kinds]),
        Counting(PageAllocator(pages), RowAllocator(8), state_pages=STATE_TOKENS // page_size),
        make_policy(policy),
        SystemClock(),
        Metrics(),
    )


@dataclass(slots=True)
class Served:
    """What one step took. seconds: per phase; evictions are a phase of their own."""

    seconds: dict[str, float]
    reused_len: int
    num_evictions: int

    @property
    def total_s(self) -> float:
        """All phases together."""
        return sum(self.seconds.values())


class Server(Protocol):
    """A cache that can serve steps, in their order."""

    core: str

    def serve(self, step: Step) -> Served:
        """Do all bookkeeping of one request."""
        ...


class CacheServer:
    """Serves steps the way an engine does: match, room, a checkpoint before the reply header, one
    at the end, the session's mark moved along.
    """

    core = "agentcache"

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache
        self.evictions = Evictions(cache.memory)
        self._tips: dict[int, tuple[SessionRef, int]] = {}

    def serve(self, step: Step, *, keep: bool = False) -> Served:
        """keep: whether a one-shot's mark is kept, as if its session lived on, or left at once."""
        cache, tokens, total = self.cache, step.tokens, len(step.tokens)
        num_evictions = self.evictions.count
        prompt = tokens[: step.prompt_len]
        ref, known_len = None, 0
        if step.session is not None:
            ref, known_len = self._tips.get(step.session, (None, 0))
        watch = _Watch(self.evictions)

        passing = (max(1, len(prompt) - _REPLY_HEADER_LEN),)
        lease = cache.acquire(NAMESPACE, prompt, after=ref, known_len=known_len, passing=passing)
        watch.mark("acquire")
        cache.reserve(lease, len(prompt))
        watch.mark("reserve")
        for length in lease.plan:
            cache.commit(lease, prompt, length, lease.row)
        watch.mark("prefill_commit")
        cache.reserve(lease, total)
        watch.mark("reserve")
        # the last token was sampled and is not computed yet
        cache.commit(lease, tokens, total - 1, lease.row)
        watch.mark("decode_commit")
        filed = [node for node in lease.filed if node is not lease.locked]
        new = cache.stand(lease.locked, filed, after=ref, lease=lease)
        watch.mark("references")
        cache.release(lease)
        watch.mark("release")
        if ref is not None:
            cache.leave(ref)
        if step.session is not None:
            self._tips[step.session] = new, total
        elif not keep:
            cache.leave(new)
        watch.mark("references")
        return Served(watch.seconds, lease.boundary, self.evictions.count - num_evictions)


class _Watch:
    """CPU seconds of this thread by phase; what evictions took is a phase of its own."""

    def __init__(self, evictions: Evictions) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._evictions = evictions
        self._evict_s = evictions.seconds
        self._last = thread_time()

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        now = thread_time()
        evict_s = self._evictions.seconds - self._evict_s
        self.seconds["evict"] += evict_s
        self.seconds[phase] += now - self._last - evict_s
        self._evict_s = self._evictions.seconds
        self._last = thread_time()


def serve_all(server: Server, steps: Iterable[Step]) -> tuple[list[Served], float]:
    """Serve steps; the sessions' turns, and their hit rate.

    The evictions that a one-shot causes count as the next turn's, its other work as nobody's.
    """
    served: list[Served] = []
    evict_s, num_evictions, reused, asked = 0.0, 0, 0, 0
    for step in steps:
        done = server.serve(step)
        if step.session is None:
            evict_s += done.seconds["evict"]
            num_evictions += done.num_evictions
            continue
        done.seconds["evict"] += evict_s
        done.num_evictions += num_evictions
        evict_s, num_evictions = 0.0, 0
        reused += done.reused_len
        asked += step.prompt_len
        served.append(done)
    return served, reused / asked if asked else 0.0
