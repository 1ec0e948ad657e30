"""Evictable and protected pages: together what is used, and eviction frees just what it says."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from testkit.helpers import NAMESPACE, ids, make_cache, run
from testkit.models import micro_runtime
from testkit.tiers import COMPOSITIONS, Crowd, make_tiered, serve, wander

from agentcache.cache.accounting import Account
from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.cache import HybridCache
    from agentcache.runtime import Runtime
    from agentcache.types import IntArray

PAGE_SIZES = [(1, 1), (4, 4), (4, 3), (3, 4), (1, 4)]


def span(start: int, stop: int) -> IntArray:
    return np.arange(start, stop, dtype=np.int32)


def recount(cache: HybridCache) -> dict[str, Account]:
    """The same from nothing: page by page, who has it."""
    out = {}
    for rule in cache.tree.rules:
        kind = rule.kind
        running: set[int] = set()
        idle: set[int] = set()
        for lease in cache.leases:
            if kind == Kind.FULL:
                running.update(page for part in lease.own for page in part.tolist())
                for node in cache.tree.path(lease.locked):
                    running.update(node.data[kind].slots.tolist())
            elif kind in lease.windows:
                running.update(lease.windows[kind].pages.tolist())
        for node in cache.tree.nodes():
            if kind in node.data and node.data[kind].tier == 1:
                idle.update(node.data[kind].slots.tolist())
        out[kind] = Account(evictable=len(idle - running), protected=len(running))
    return out


def crowd_of(name: str, seed: int, *, num_pages: int = 40, lower_pages: int = 0) -> Crowd:
    """A crowd on a cache of that composition, its sizes drawn by the seed."""
    page_size, swa_page = PAGE_SIZES[seed % len(PAGE_SIZES)]
    sizes = {
        "num_pages": num_pages,
        "page_size": page_size,
        "swa_page": swa_page,
        "num_rows": 3,
        "policy": ("lru", "session-lru")[seed % 2],
        "state_pages": 0,
        **COMPOSITIONS[name],
    }
    if lower_pages:
        return Crowd(make_tiered(lower_pages=lower_pages, **sizes))
    return Crowd(make_cache(shadow=True, **sizes))


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("lower_pages", [0, 12])
def test_parts_add_up_to_what_is_used_and_equal_a_recount(name: str, lower_pages: int) -> None:
    shared = 0
    for seed in range(3):
        crowd, rng = crowd_of(name, seed, lower_pages=lower_pages), random.Random(seed)
        cache = crowd.cache
        for _ in range(40):
            wander(crowd, rng, 1)
            account = cache.account()
            assert account == recount(cache)
            used = cache.used_pages()
            assert {kind: a.evictable + a.protected for kind, a in account.items()} == used
            held = [lease.locked for lease in cache.leases if not lease.locked.is_root]
            shared += len(held) > len(set(held))
    assert shared or name == "swa", "no two requests ever stood on one node"


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("lower_pages", [0, 200])
def test_eviction_of_everything_idle_frees_exactly_the_evictable_pages(
    name: str, lower_pages: int
) -> None:
    for seed in range(6):
        crowd, rng = (
            crowd_of(name, seed, num_pages=80, lower_pages=lower_pages),
            random.Random(seed),
        )
        pages = crowd.cache.pools.pages
        for _ in range(3):
            wander(crowd, rng, 12)
            before, evictable = pages.num_free, crowd.cache.account()
            while crowd.evict():
                pass
            assert pages.num_free - before == sum(a.evictable for a in evictable.values())
            after = crowd.cache.account()
            assert all(account.evictable == 0 for account in after.values())
            assert {k: a.protected for k, a in after.items()} == {
                k: a.protected for k, a in evictable.items()
            }


def test_prefix_of_two_requests_is_protected_until_both_are_over() -> None:
    cache = make_cache(state_pages=2)
    run(cache, span(0, 8))
    assert cache.account() == {Kind.FULL: Account(2, 0), Kind.STATE: Account(2, 0)}
    one = cache.acquire(NAMESPACE, span(0, 12))
    two = cache.acquire(NAMESPACE, np.append(span(0, 8), ids(50)))
    assert cache.account()[Kind.FULL] == Account(0, 2)
    cache.reserve(one, 12)
    assert cache.account()[Kind.FULL] == Account(0, 3)
    cache.release(one)
    assert cache.account()[Kind.FULL] == Account(0, 2)
    cache.release(two)
    assert cache.account() == {Kind.FULL: Account(2, 0), Kind.STATE: Account(2, 0)}


def test_checkpoint_is_evictable_while_a_request_runs_on_its_copy() -> None:
    cache = make_cache(state_pages=2)
    run(cache, span(0, 8))
    lease = cache.acquire(NAMESPACE, span(0, 12))
    assert cache.account() == {Kind.FULL: Account(0, 2), Kind.STATE: Account(2, 0)}
    assert cache.evict_one()
    assert cache.account() == {Kind.FULL: Account(0, 2), Kind.STATE: Account(0, 0)}
    cache.release(lease)


def test_page_that_a_request_writes_on_in_is_protected_though_the_tree_has_it_too() -> None:
    cache = make_cache(state_pages=0)
    run(cache, span(0, 6))
    run(cache, np.append(span(0, 6), ids(7, 8, 9)))
    lease = cache.acquire(NAMESPACE, span(0, 7))
    claimed = cache.account()[Kind.FULL]
    assert claimed.protected == 3, "two of the prefix, and a copy of its last one"
    cache.release(lease)
    assert cache.account()[Kind.FULL] == Account(claimed.evictable + 2, 0)


def test_window_of_a_request_is_protected_and_that_of_its_boundary_is_not() -> None:
    cache = make_cache(window=5, state_pages=0, kv=False)
    run(cache, span(0, 16))
    lease = cache.acquire(NAMESPACE, span(0, 20))
    assert cache.account()[Kind.SWA] == Account(0, 1), "positions 12 to 15 are one page"
    cache.reserve(lease, 20)
    assert cache.account()[Kind.SWA] == Account(0, 2)
    cache.release(lease)
    assert cache.account()[Kind.SWA] == Account(1, 0)


def test_data_on_a_lower_tier_is_no_part_of_it() -> None:
    cache = make_tiered(state_pages=2)
    serve(cache, span(0, 8))
    while cache.evict_one():
        pass
    assert cache.account() == {Kind.FULL: Account(0, 0), Kind.STATE: Account(0, 0)}
    serve(cache, span(0, 12))
    assert cache.account() == {Kind.FULL: Account(3, 0), Kind.STATE: Account(4, 0)}


def parts(runtime: Runtime) -> dict[str, tuple[int, int, int]]:
    """Per kind that pages hold: used, evictable and protected bytes."""
    kinds = runtime.stats()["bytes"]
    return {
        kind: (kinds[kind]["used"], kinds[kind]["evictable"], kinds[kind]["protected"])
        for kind in ("full", "swa", "state")
    }


def test_stats_of_a_runtime_carry_both_parts_in_bytes() -> None:
    with micro_runtime() as runtime:
        assert set(parts(runtime).values()) == {(0, 0, 0)}
        session = runtime.session("a")
        session.generate(list(range(5, 45)), max_new_tokens=2)
        idle = parts(runtime)
        assert idle["full"][0] == idle["full"][1] > 0 == idle["full"][2]
        assert idle["state"][0] == idle["state"][1] > 0 == idle["state"][2]
        assert idle["swa"] == (0, 0, 0)
        stream = session.generate(
            [*session.ids.tolist(), *range(50, 60)], max_new_tokens=400, stream=True
        )
        next(stream)
        busy = runtime.on_engine(lambda: runtime._stats()["bytes"])
        for kind in ("full", "state"):
            both = busy[kind]["evictable"] + busy[kind]["protected"]
            assert both == busy[kind]["used"] > 0
        assert busy["full"]["protected"] >= idle["full"][0]
        stream.close()
        while runtime.stats()["leases"]:
            pass
        before = parts(runtime)
        freed = runtime.clear()
        assert freed == before["full"][1] + before["state"][1]
        assert set(parts(runtime).values()) == {(0, 0, 0)}
