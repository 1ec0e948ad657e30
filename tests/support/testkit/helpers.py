"""Small builders that tests of several rooms use."""

from __future__ import annotations

import numpy as np

from agentcache.cache import HybridCache, Lease
from agentcache.clock import ManualClock
from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.metrics import Metrics
from agentcache.policy.eviction import policy_key
from agentcache.pools.base import Counting, PageAllocator, RowAllocator
from agentcache.tree.check import check_pages, check_tree
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import IntArray, Kind

NAMESPACE = b"tests"


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def make_cache(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    num_rows: int = 4,
    state_pages: int = 2,
    policy: str = "session-lru",
    kv: bool = True,
) -> HybridCache:
    """A cache over counting pools."""
    rules: list[FullComponent | StateComponent] = []
    if kv:
        rules.append(FullComponent(page_size))
    if state_pages:
        rules.append(StateComponent())
    pools = Counting(PageAllocator(num_pages, page_size), RowAllocator(num_rows), state_pages)
    return HybridCache(RadixTree(rules), pools, policy_key(policy), ManualClock(), Metrics())


def tick(cache: HybridCache) -> None:
    """Let time pass, so that recency differs."""
    clock = cache._clock
    assert isinstance(clock, ManualClock)
    clock.advance(1.0)


def run(
    cache: HybridCache,
    tokens: IntArray,
    *,
    structural: tuple[int, ...] = (),
    namespace: bytes = NAMESPACE,
    commit: bool = True,
) -> Lease:
    """A whole request: acquire, reserve, commit the plan and the end, release."""
    tick(cache)
    lease = cache.acquire(namespace, tokens, structural=structural)
    try:
        cache.reserve(lease, len(tokens))
        if commit:
            for length in lease.plan:
                cache.commit(lease, tokens, length, lease.row)
            cache.commit(lease, tokens, len(tokens), lease.row)
    finally:
        cache.release(lease)
    return lease


def check(cache: HybridCache) -> None:
    """Everything that always holds between tree, pages and leases."""
    pages = cache.pools.pages
    check_tree(cache.tree, pages.page_size)
    held = [part for lease in cache.leases for part in lease.own]
    check_pages(cache.tree, pages.refs, held, pages.num_free)
    checkpoints = sum(Kind.STATE in node.data for node in cache.tree.nodes())
    assert checkpoints == cache.num_checkpoints
    assert cache.pools.rows.num_free + len(cache.leases) == cache.pools.rows.num_rows
