"""What the cache tells its policy, and how it takes the checkpoints that admission asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from testkit.helpers import NAMESPACE, ids, rules_of, run

from agentcache.cache import HybridCache
from agentcache.clock import ManualClock
from agentcache.metrics import Metrics
from agentcache.policy.admission import make_admission
from agentcache.policy.base import Origin
from agentcache.policy.recency import LRU
from agentcache.policy.session_lru import SessionLRU
from agentcache.pools.base import Counting, RowAllocator
from agentcache.pools.pages import PageAllocator
from agentcache.tree.radix_tree import RadixTree

if TYPE_CHECKING:
    from agentcache.policy.base import Arrival, Filed, Policy, Served
    from agentcache.tree.node import Node
    from agentcache.types import IntArray


def cache_with(policy: Policy, admission: str = "structural", num_pages: int = 256) -> HybridCache:
    pools = Counting(PageAllocator(num_pages), RowAllocator(2), state_pages=2)
    return HybridCache(
        RadixTree(rules_of(4)),
        pools,
        policy,
        ManualClock(),
        Metrics(),
        admission=make_admission(admission),
    )


def span(start: int, stop: int) -> IntArray:
    return np.arange(start, stop, dtype=np.int32)


def node_at(cache: HybridCache, tokens: IntArray) -> Node:
    found = cache.tree.match(cache.tree.root(NAMESPACE), tokens, len(tokens))
    assert found.known_node.end == len(tokens)
    return found.known_node


def test_request_uses_the_node_that_it_goes_on_from() -> None:
    cache = cache_with(SessionLRU())
    run(cache, span(0, 6))
    run(cache, span(0, 9))
    first, second = node_at(cache, span(0, 6)), node_at(cache, span(0, 9))
    earlier = first.last_access, second.last_access
    run(cache, span(0, 12))
    assert (first.hits, second.hits) == (1, 1)
    assert first.last_access == earlier[0]
    assert second.last_access > earlier[1]


def test_request_uses_all_of_its_known_path_where_the_policy_asks_for_that() -> None:
    cache = cache_with(LRU())
    run(cache, span(0, 6))
    run(cache, span(0, 9))
    branched = np.append(span(0, 8), [99, 98]).astype(np.int32)
    lease = run(cache, branched)
    assert lease.boundary == 6
    first, beyond = node_at(cache, span(0, 6)), node_at(cache, span(0, 9))
    assert (first.hits, beyond.hits) == (2, 1), "known beyond too, though of no use to the request"
    assert first.last_access == beyond.last_access == node_at(cache, branched).last_access
    assert node_at(cache, span(0, 8)).hits == 1, "the upper part was used as often"


def test_entries_have_the_highest_priority_of_those_who_use_them() -> None:
    cache = cache_with(SessionLRU())

    def serve(tokens: IntArray, priority: int) -> None:
        lease = cache.acquire(NAMESPACE, tokens, priority=priority)
        cache.reserve(lease, len(tokens))
        cache.commit(lease, tokens, len(tokens), lease.row)
        cache.release(lease)

    serve(span(0, 6), -2)
    assert node_at(cache, span(0, 6)).priority == -2
    serve(span(0, 9), 3)
    assert node_at(cache, span(0, 6)).priority == 3
    serve(span(0, 12), 1)
    found = [node_at(cache, span(0, end)).priority for end in (6, 9, 12)]
    assert found == [3, 3, 1]


class Listener(SessionLRU):
    """Hears of requests that are over."""

    wants_served = True

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Served] = []

    def served(self, request: Served) -> None:
        self.heard.append(request)


def test_policy_hears_of_each_request_once_it_is_over() -> None:
    policy = Listener()
    cache = cache_with(policy)
    run(cache, span(0, 6))
    lease = cache.acquire(NAMESPACE, span(0, 9), structural=(7,))
    cache.reserve(lease, 11)
    for length in (*lease.plan, 11):
        cache.commit(lease, span(0, 11), length, lease.row)
    assert len(policy.heard) == 1
    cache.release(lease)
    first, second = policy.heard
    assert (first.cached_len, first.prompt_len, first.declared) == (0, 6, ())
    assert (second.cached_len, second.prompt_len, second.declared) == (6, 9, (7,))
    assert second.tokens.tolist() == list(range(11))


def test_admission_that_heeds_nobody_marks_no_shared_boundary() -> None:
    cache = cache_with(SessionLRU(), "marconi")
    lease = cache.acquire(NAMESPACE, span(0, 9), structural=(4,), passing=(8,))
    assert lease.plan == ()
    assert lease.structural == frozenset()
    cache.release(lease)


def test_every_block_makes_each_block_reusable() -> None:
    cache = cache_with(SessionLRU(), "every-block:4")
    lease = cache.acquire(NAMESPACE, span(0, 10))
    assert lease.plan == (4, 8)
    cache.reserve(lease, 17)
    for length in (*lease.plan, *cache.admission.decoded(10, 17)):
        assert cache.commit(lease, span(0, 17), length, lease.row)
    cache.release(lease)
    assert cache.num_checkpoints == 4
    found = cache.acquire(NAMESPACE, np.append(span(0, 15), ids(99)).astype(np.int32))
    assert found.boundary == 12
    cache.release(found)


class Asking(SessionLRU):
    """Asks for checkpoints at the same lengths every time, and notes what was filed."""

    wants_boundaries = True

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self._lengths = lengths
        self.filed_as: list[tuple[int, Origin]] = []

    def arrives(self, arrival: Arrival) -> tuple[int, ...]:
        return self._lengths

    def filed(self, filed: Filed) -> None:
        self.filed_as.append((filed.node.end, filed.origin))


@pytest.mark.parametrize(("admission", "plan"), [("structural", (7,)), ("marconi", ())])
def test_what_a_policy_asks_for_is_planned_where_admission_heeds_anybody(admission, plan) -> None:
    cache = cache_with(Asking(7), admission)
    lease = cache.acquire(NAMESPACE, span(0, 12))
    assert lease.plan == plan
    cache.release(lease)


def test_what_a_policy_asks_for_has_to_save_as_much_as_a_branch_point() -> None:
    cache = cache_with(Asking(10, 16))
    cache._min_gain = 8
    run(cache, span(0, 6))
    lease = cache.acquire(NAMESPACE, span(0, 20))
    assert lease.boundary == 6
    assert lease.plan == (16,), "10 saves four tokens only"
    cache.release(lease)


def test_policy_hears_why_each_boundary_is_there() -> None:
    policy = Asking()
    cache = cache_with(policy)
    run(cache, span(0, 20))
    policy.filed_as.clear()
    other = np.concatenate([span(0, 12), span(100, 110)])
    lease = cache.acquire(NAMESPACE, other, structural=(5,), passing=(18,))
    cache.reserve(lease, 22)
    for length in (*lease.plan, 22):
        cache.commit(lease, other, length, lease.row)
    cache.release(lease)
    assert policy.filed_as == [
        (5, Origin.DECLARED),
        (12, Origin.BRANCH),
        (18, Origin.PASSING),
        (22, Origin.END),
    ]
