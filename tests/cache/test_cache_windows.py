"""Sliding windows in the cache, alone and with attention and recurrent states beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from testkit.helpers import NAMESPACE, Agent, Shadow, absorb, check, make_cache, tick, verify_prefix

from agentcache.cache import HybridCache, Lease, OutOfPages
from agentcache.clock import ManualClock
from agentcache.components.full import FullComponent
from agentcache.components.swa import SwaComponent
from agentcache.metrics import Metrics
from agentcache.policy.eviction import make_policy
from agentcache.pools.base import RowAllocator
from agentcache.pools.pages import PageAllocator
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.types import IntArray

LAYOUTS: dict[str, dict[str, Any]] = {
    "full-swa": {"state_pages": 0},
    "swa": {"state_pages": 0, "kv": False},
    "full-swa-state": {"state_pages": 2},
    "swa-state": {"state_pages": 1, "kv": False},
}
EACH = pytest.mark.parametrize("layout", LAYOUTS)
WITHOUT_STATE = pytest.mark.parametrize("layout", ["full-swa", "swa"])


def cache_of(layout: str, *, num_pages: int = 200, window: int = 6, **sizes: int) -> HybridCache:
    """Pages of four tokens for attention and two for windows, which remember what they hold."""
    sizes = {"page_size": 4, "swa_page": 2, **sizes}
    return make_cache(num_pages=num_pages, window=window, shadow=True, **LAYOUTS[layout], **sizes)


def span(start: int, stop: int) -> IntArray:
    return np.arange(start, stop, dtype=np.int32)


def joined(*parts: IntArray) -> IntArray:
    return np.concatenate(parts)


def used(cache: HybridCache) -> dict[str, int]:
    return {kind: num for kind, num in cache.used_pages().items() if num}


def serve(
    cache: HybridCache, sequence: IntArray, *, structural: tuple[int, ...] = (), chunk: int = 99
) -> Lease:
    """A request in chunks; what it reads and writes is verified at every step."""
    tick(cache)
    lease = cache.acquire(NAMESPACE, sequence, structural=structural)
    at = lease.boundary
    stops = {*lease.plan, *range(at + chunk, len(sequence), chunk), len(sequence)}
    for stop in sorted(stops):
        cache.reserve(lease, stop)
        absorb(cache, lease, sequence, at, stop)
        at = stop
        if stop in lease.plan or stop == len(sequence):
            assert cache.commit(lease, sequence, stop, lease.row)
            check(cache)
    cache.release(lease)
    check(cache)
    return lease


def boundary(cache: HybridCache, sequence: IntArray) -> int:
    return cache.tree.match(cache.tree.root(NAMESPACE), sequence, len(sequence) - 1).boundary


@EACH
@pytest.mark.parametrize("chunk", [1, 5, 99])
@pytest.mark.parametrize(("page_size", "swa_page"), [(1, 1), (4, 2), (2, 4), (3, 5)])
def test_turn_resumes_where_the_last_one_ended(
    layout: str, chunk: int, page_size: int, swa_page: int
) -> None:
    cache = cache_of(layout, page_size=page_size, swa_page=swa_page)
    before = 0
    for length in (1, 2, 5, 6, 7, 8, 15, 24, 33):
        lease = serve(cache, span(0, length), chunk=chunk)
        assert lease.boundary == before
        before = length


@EACH
def test_prompt_that_parts_goes_on_from_the_last_boundary_whose_window_is_there(
    layout: str,
) -> None:
    cache = cache_of(layout)
    serve(cache, span(0, 40), structural=(12, 23))
    for parts_at, wanted in ((30, 23), (23, 23), (22, 12), (40, 40)):
        branch = joined(span(0, parts_at), span(100, 105))
        assert boundary(cache, branch) == wanted
    lease = serve(cache, joined(span(0, 30), span(100, 105)))
    assert lease.plan == (30,)
    assert boundary(cache, joined(span(0, 30), span(200, 205))) == 30
    match = cache.tree.match(cache.tree.root(NAMESPACE), span(0, 39), 38)
    assert match.lens[Kind.SWA] == match.boundary == 30


@WITHOUT_STATE
def test_short_sequence_is_resumed_inside_its_edge(layout: str) -> None:
    cache = cache_of(layout, window=16)
    serve(cache, span(0, 11))
    lease = serve(cache, joined(span(0, 7), span(100, 120)))
    assert lease.boundary == lease.match.boundary == 7
    assert lease.match.node.end == 11
    assert lease.plan == ()
    assert serve(cache, joined(span(0, 11), span(200, 210))).boundary == 11
    assert serve(cache, joined(span(0, 3), span(300, 310))).boundary == 3


def test_checkpoint_of_a_short_sequence_bounds_what_its_window_would_allow() -> None:
    cache = cache_of("full-swa-state", window=16)
    serve(cache, span(0, 11))
    branch = joined(span(0, 7), span(100, 120))
    assert boundary(cache, branch) == 0
    match = cache.tree.match(cache.tree.root(NAMESPACE), branch, 20)
    assert match.lens == {Kind.FULL: 7, Kind.SWA: 7, Kind.STATE: 0}
    assert match.vetoed_by is Kind.STATE


@EACH
@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_window_stays_small_while_a_long_prompt_is_computed(layout: str, chunk: int) -> None:
    cache = cache_of(layout)
    window, page = 6, 2
    lease = cache.acquire(NAMESPACE, span(0, 120))
    for at in range(0, 120, chunk):
        stop = min(at + chunk, 120)
        cache.reserve(lease, stop)
        absorb(cache, lease, span(0, 120), at, stop)
        pages = lease.windows[Kind.SWA].pages
        assert len(pages) <= -(-(window - 1 + chunk) // page) + 1
        assert used(cache)[Kind.SWA] == len(pages)
        check(cache)
    assert cache.commit(lease, span(0, 120), 120, lease.row)
    cache.release(lease)
    check(cache)
    assert used(cache)[Kind.SWA] == 3, "the last five positions"
    assert cache.peak_pages()[0][Kind.SWA] <= -(-(window - 1 + chunk) // page) + 1


@EACH
def test_window_of_a_planned_boundary_is_kept_until_it_is_filed(layout: str) -> None:
    """As where a chunk goes beyond it: the checkpoint is handed out and filed afterwards."""
    cache = cache_of(layout)
    pools, sequence = cache.pools, span(0, 30)
    assert isinstance(pools, Shadow)
    staging = pools.rows.num_rows
    pools.absorbed.append(None)
    lease = cache.acquire(NAMESPACE, sequence, structural=(9, 17))
    cache.reserve(lease, 20)
    absorb(cache, lease, sequence, 0, 20)
    cache.reserve(lease, 30)
    absorb(cache, lease, sequence, 20, 30)
    for length in (9, 17):
        pools.absorbed[staging] = tuple(range(length))
        assert cache.commit(lease, sequence, length, staging)
        check(cache)
    assert cache.commit(lease, sequence, 30, lease.row)
    cache.release(lease)
    for length in (9, 17, 30):
        branch = joined(span(0, length), span(100, 103))
        assert serve(cache, branch).boundary == length


@EACH
def test_own_next_turn_goes_on_inside_the_page_of_its_window(layout: str) -> None:
    cache = cache_of(layout, swa_page=4)
    serve(cache, span(0, 10))
    before = used(cache)
    lease = cache.acquire(NAMESPACE, span(0, 12))
    cache.reserve(lease, 12)
    assert used(cache) == before, "a page was copied"
    absorb(cache, lease, span(0, 12), 10, 12)
    cache.release(lease)
    check(cache)


@EACH
def test_second_turn_from_a_boundary_inside_a_page_copies_the_page(layout: str) -> None:
    cache = cache_of(layout, swa_page=4)
    serve(cache, span(0, 10))
    before = used(cache)
    sequences = [joined(span(0, 10), span(100 * n, 100 * n + 7)) for n in (1, 2, 3)]
    leases = [cache.acquire(NAMESPACE, sequence) for sequence in sequences]
    kinds = [kind for kind in (Kind.FULL, Kind.SWA) if kind in before]
    for kind in kinds:
        assert used(cache)[kind] == before[kind] + 2
    assert len({lease.windows[Kind.SWA].last for lease in leases}) == 3
    for at in range(10, 17):
        for lease, sequence in zip(leases, sequences, strict=True):
            cache.reserve(lease, at + 1)
            absorb(cache, lease, sequence, at, at + 1)
    for lease, sequence in zip(leases, sequences, strict=True):
        assert cache.commit(lease, sequence, 17, lease.row)
        cache.release(lease)
        check(cache)
    for sequence in sequences:
        assert serve(cache, joined(sequence, span(900, 903))).boundary == 17


@EACH
def test_request_that_filed_nothing_leaves_the_page_of_the_window_to_the_next(layout: str) -> None:
    cache = cache_of(layout, swa_page=4)
    serve(cache, span(0, 10))
    before = used(cache)
    for number in range(3):
        sequence = joined(span(0, 10), span(100 * number, 100 * number + 2))
        lease = cache.acquire(NAMESPACE, sequence)
        cache.reserve(lease, 12)
        assert used(cache) == before
        absorb(cache, lease, sequence, 10, 12)
        cache.release(lease)
        check(cache)
    assert used(cache) == before


@EACH
def test_request_given_up_far_beyond_what_it_filed_leaves_the_boundary_as_it_was(
    layout: str,
) -> None:
    cache = cache_of(layout, swa_page=4)
    serve(cache, span(0, 10))
    before = used(cache)
    lease = cache.acquire(NAMESPACE, span(0, 60))
    for at in range(10, 60, 5):
        cache.reserve(lease, at + 5)
        absorb(cache, lease, span(0, 60), at, at + 5)
    assert lease.windows[Kind.SWA].first > 10 // 4
    cache.release(lease)
    check(cache)
    assert used(cache) == before
    assert serve(cache, joined(span(0, 10), span(100, 103))).boundary == 10


@EACH
def test_equal_prompts_at_once_leave_one_window(layout: str) -> None:
    cache = cache_of(layout)
    leases = [cache.acquire(NAMESPACE, span(0, 13)) for _ in range(2)]
    for lease in leases:
        cache.reserve(lease, 13)
        absorb(cache, lease, span(0, 13), 0, 13)
    for lease in leases:
        assert cache.commit(lease, span(0, 13), 13, lease.row)
        cache.release(lease)
        check(cache)
    assert used(cache)[Kind.SWA] == 3
    assert serve(cache, span(0, 20)).boundary == 13


@EACH
def test_neighbouring_boundaries_share_what_their_windows_have_in_common(layout: str) -> None:
    cache = cache_of(layout)
    serve(cache, span(0, 20), structural=(18,))
    # positions 13 to 17 and 15 to 19, in pages of two
    assert used(cache)[Kind.SWA] == 4
    assert cache.evict_one()
    check(cache)
    assert used(cache)[Kind.SWA] == 3
    assert boundary(cache, span(0, 22)) == 20


@EACH
def test_running_request_keeps_its_window_whatever_is_evicted(layout: str) -> None:
    cache = cache_of(layout)
    serve(cache, span(0, 15))
    lease = cache.acquire(NAMESPACE, span(0, 30))
    cache.clear()
    check(cache)
    verify_prefix(cache, lease, span(0, 30), 15)
    assert used(cache)[Kind.SWA] == len(lease.windows[Kind.SWA].pages)
    cache.reserve(lease, 30)
    absorb(cache, lease, span(0, 30), 15, 30)
    assert cache.commit(lease, span(0, 30), 30, lease.row)
    cache.release(lease)
    assert serve(cache, span(0, 33)).boundary == 30


@EACH
def test_checkpoint_in_the_middle_leaves_as_a_whole(layout: str) -> None:
    cache = cache_of(layout)
    serve(cache, span(0, 20), structural=(9,))
    inner = cache.tree.match(cache.tree.root(NAMESPACE), span(0, 9), 9).node
    kinds = {kind for kind in inner.data if kind != Kind.FULL}
    assert cache.evict_one()
    assert set(inner.data) <= {Kind.FULL}, "none is of use without the rest"
    assert cache.metrics.group("evictions") == dict.fromkeys(kinds, 1)
    assert boundary(cache, span(0, 12)) == 0
    assert boundary(cache, span(0, 22)) == 20


@EACH
def test_what_lies_above_a_running_request_can_be_evicted_too(layout: str) -> None:
    cache = cache_of(layout, window=40)
    serve(cache, span(0, 20))
    branch = joined(span(0, 10), span(100, 110))
    lease = cache.acquire(NAMESPACE, branch)
    cache.reserve(lease, 20)
    absorb(cache, lease, branch, lease.boundary, 20)
    assert cache.commit(lease, branch, 20, lease.row)
    cache.clear()
    check(cache)
    assert used(cache)[Kind.SWA] == len(lease.windows[Kind.SWA].pages)
    verify_prefix(cache, lease, branch, 20)
    cache.release(lease)
    cache.clear()
    assert used(cache) == {}


def test_windows_alone_keep_to_a_small_memory() -> None:
    cache = cache_of("swa", num_pages=12)
    for number in range(20):
        serve(cache, span(100 * number, 100 * number + 60), chunk=4)
    left = [
        number for number in range(20) if boundary(cache, span(100 * number, 100 * number + 62))
    ]
    assert left == [17, 18, 19], "three pages each, and five while the last one was computed"


@EACH
def test_parked_session_is_resumed_or_gone_whatever_the_pressure(layout: str) -> None:
    resumed = gone = 0
    for num_pages in range(8 if layout == "swa" else 16, 72, 4):
        cache = cache_of(layout, num_pages=num_pages)
        fresh = iter(np.arange(10_000, dtype=np.int32))

        def take(num: int, fresh: Any = fresh) -> IntArray:
            return np.array([next(fresh) for _ in range(num)], dtype=np.int32)

        parked, others = Agent(cache), [Agent(cache), Agent(cache)]
        for _ in range(3):
            parked.turn(take(6), take(3))
        for other in (*others, *others, *others):
            if len(other.tokens) < num_pages:
                other.turn(take(7), take(2))
            check(cache)
        tokens = parked.tokens
        match = cache.tree.match(cache.tree.root(NAMESPACE), tokens, len(tokens))
        assert match.known_len == match.boundary, "held but unusable"
        assert all(length >= match.boundary for length in match.lens.values())
        resumed += match.boundary == len(tokens) - 1
        gone += match.boundary == 0
    assert resumed
    assert gone


@EACH
def test_parked_session_reads_its_own_window_again(layout: str) -> None:
    cache = cache_of(layout, num_pages=30)
    parked = span(0, 17)
    serve(cache, parked, chunk=4)
    hits = []
    for number in range(1, 8):
        serve(cache, span(1000 * number, 1000 * number + 15), chunk=4)
        longer = joined(parked, span(500 * number, 500 * number + 3))
        lease = cache.acquire(NAMESPACE, longer)
        hits.append(lease.boundary)
        verify_prefix(cache, lease, longer, lease.boundary)
        cache.release(lease)
        check(cache)
    assert set(hits) <= {0, 17}


@EACH
def test_request_for_which_there_is_no_room_takes_no_window(layout: str) -> None:
    cache = cache_of(layout, num_pages=14)
    serve(cache, span(0, 9))
    lease = cache.acquire(NAMESPACE, span(0, 12))
    before = used(cache)
    with pytest.raises(OutOfPages):
        cache.reserve(lease, 90)
    check(cache)
    cache.release(lease)
    check(cache)
    cache.clear()
    assert used(cache) == {}
    assert Kind.SWA in before


def test_two_windows_of_different_lengths_agree_on_one_boundary() -> None:
    rules = [FullComponent(4), SwaComponent(4, 2), SwaComponent(12, 4, kind="swa-long")]
    pools = Shadow(PageAllocator(120), RowAllocator(3), 0)
    cache = HybridCache(
        RadixTree(rules), pools, make_policy("session-lru"), ManualClock(), Metrics()
    )
    serve(cache, span(0, 30), structural=(10, 21), chunk=4)
    assert boundary(cache, joined(span(0, 25), span(100, 103))) == 21
    assert serve(cache, joined(span(0, 25), span(100, 103)), chunk=3).boundary == 21
    # the first eleven positions are within reach of the longer window alone
    match = cache.tree.match(cache.tree.root(NAMESPACE), span(0, 9), 8)
    assert match.lens == {Kind.FULL: 8, Kind.SWA: 0, "swa-long": 8}
    assert match.vetoed_by == Kind.SWA
    cache.clear()
    assert used(cache) == {}
