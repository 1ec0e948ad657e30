"""What has to leave the device goes to a lower tier, comes back as it was, and is nowhere twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from testkit.helpers import NAMESPACE, absorb, ids, tick, verify_prefix
from testkit.tiers import (
    COMPOSITIONS,
    Ask,
    Crowd,
    check_content,
    check_tiers,
    demote_all,
    lower_of,
    make_tiered,
    mixed,
    node_at,
    serve,
    tiers_of,
)

from agentcache.tiers.base import CountingTier
from agentcache.types import Kind, Vote

if TYPE_CHECKING:
    from agentcache.cache import HybridCache, Lease
    from agentcache.tree.node import Node
    from agentcache.types import IntArray


def span(start: int, stop: int) -> IntArray:
    return np.arange(start, stop, dtype=np.int32)


def counts(cache: HybridCache, group: str) -> dict[str, int]:
    return {str(kind): count for kind, count in cache.metrics.group(group).items()}


def boundaries(cache: HybridCache, tokens: IntArray) -> tuple[int, int]:
    """How far a prompt would be reused as things lie, and with what can be loaded."""
    match = cache.tree.match(cache.tree.root(NAMESPACE), tokens, len(tokens) - 1)
    return match.boundary, match.loadable


def hold_all_but(cache: HybridCache, num_free: int) -> Lease:
    """A running request that holds the free pages but for so many, or one less."""
    lease = cache.acquire(b"others", span(500, 502))
    while cache.pools.pages.num_free > num_free:
        cache.reserve(lease, lease.reserved_len + 4)
    return lease


def lose(cache: HybridCache, node: Node, kind: str) -> None:
    """Data of one kind is gone, wherever it lay."""
    cache.memory._drop(node, kind)
    check_content(cache)


def test_nodes_are_demoted_from_the_bottom_up() -> None:
    cache = make_tiered()
    for length in (6, 12, 16):
        serve(cache, span(0, length))
    nodes = [node_at(cache, span(0, length)) for length in (6, 12, 16)]
    for resident in (2, 1, 0):
        assert cache.evict_one()
        check_tiers(cache)
        assert [tiers_of(node)[Kind.FULL] for node in nodes] == [1] * resident + [2] * (
            3 - resident
        )
    assert not cache.evict_one()
    assert cache.pools.pages.num_used == 0
    assert len(lower_of(cache).kept) == 2 + 2 + 1
    assert counts(cache, "demotions") == {"full": 3}
    assert counts(cache, "evictions") == {}


def test_inner_checkpoint_is_demoted_alone() -> None:
    cache = make_tiered(state_pages=2)
    serve(cache, span(0, 6))
    serve(cache, span(0, 12))
    inner, end = node_at(cache, span(0, 6)), node_at(cache, span(0, 12))
    assert cache.evict_one()
    check_tiers(cache)
    assert tiers_of(inner) == {Kind.FULL: 1, Kind.STATE: 2}
    assert tiers_of(end) == {Kind.FULL: 1, Kind.STATE: 1}
    assert counts(cache, "demotions") == {"state": 1}
    lease = serve(cache, mixed(range(6), [50, 51]))
    assert lease.boundary == 6
    assert counts(cache, "loads") == {"state": 1}, "its KV had never left"


def test_window_of_an_inner_boundary_is_demoted_alone_and_shared_pages_stay() -> None:
    cache = make_tiered(window=5, state_pages=1)
    serve(cache, span(0, 6))
    serve(cache, span(0, 8))
    inner, end = node_at(cache, span(0, 6)), node_at(cache, span(0, 8))
    assert cache.evict_one()
    check_tiers(cache)
    assert tiers_of(inner) == {Kind.FULL: 1, Kind.SWA: 2, Kind.STATE: 2}
    assert set(tiers_of(end).values()) == {1}, "windows overlap; the other is whole"
    assert serve(cache, mixed(range(8), [9])).boundary == 8
    assert counts(cache, "loads") == {}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_votes_are_loadable_where_data_lies_on_a_lower_tier(name: str) -> None:
    cache = make_tiered(**COMPOSITIONS[name])
    serve(cache, span(0, 9))
    demote_all(cache)
    node = node_at(cache, span(0, 9))
    assert {rule.vote(node, 9) for rule in cache.tree.rules} == {Vote.LOADABLE}
    assert cache.tree.is_usable(node)
    assert not cache.tree.is_boundary(node)
    assert boundaries(cache, span(0, 12)) == (0, 9)


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize(("page_size", "swa_page"), [(1, 1), (4, 3), (4, 4), (3, 4)])
def test_what_was_demoted_is_loaded_back_and_reads_right(
    name: str, page_size: int, swa_page: int
) -> None:
    cache = make_tiered(page_size=page_size, swa_page=swa_page, **COMPOSITIONS[name])
    for length in (5, 11, 14):
        serve(cache, span(0, length))
    demote_all(cache)
    assert cache.pools.pages.num_used == 0
    lease = serve(cache, span(0, 17))
    assert lease.boundary == 14
    assert cache.metrics.get("unloaded", "requests") == 0
    assert set(tiers_of(node_at(cache, span(0, 14))).values()) == {1}


def test_only_what_the_boundary_needs_is_loaded() -> None:
    cache = make_tiered(state_pages=2)
    for length in (4, 8, 12):
        serve(cache, span(0, length))
    demote_all(cache)
    assert serve(cache, mixed(range(8), [50, 51])).boundary == 8
    tiers = [tiers_of(node_at(cache, span(0, length))) for length in (4, 8, 12)]
    assert tiers == [
        {Kind.FULL: 1, Kind.STATE: 2},
        {Kind.FULL: 1, Kind.STATE: 1},
        {Kind.FULL: 2, Kind.STATE: 2},
    ]
    assert counts(cache, "loads") == {"full": 2, "state": 1}


def test_boundary_inside_a_demoted_edge_is_loaded_too() -> None:
    cache = make_tiered()
    serve(cache, span(0, 12))
    demote_all(cache)
    assert serve(cache, mixed(range(7), [50, 51])).boundary == 7


def test_resident_boundary_needs_no_load_however_much_is_below() -> None:
    cache = make_tiered()
    serve(cache, span(0, 8))
    serve(cache, span(0, 16))
    assert cache.evict_one()
    assert serve(cache, mixed(range(8), [50])).boundary == 8
    assert counts(cache, "loads") == {}


@pytest.mark.parametrize("name", ["full", "full-state", "full-swa", "full-swa-state"])
def test_load_back_that_does_not_fit_leaves_the_boundary_on_the_device(name: str) -> None:
    cache = make_tiered(num_pages=40, **COMPOSITIONS[name])
    for length in (8, 28, 48):
        serve(cache, span(0, length))
    below = [node_at(cache, span(0, length)) for length in (28, 48)]
    demote_all(cache)
    cache.release(cache.acquire(NAMESPACE, span(0, 9)))
    assert boundaries(cache, span(0, 50)) == (8, 48)
    other = hold_all_but(cache, 9)
    lease = cache.acquire(NAMESPACE, span(0, 50))  # five pages up to 28, and as many to 48
    check_tiers(cache)
    assert lease.boundary == 8
    verify_prefix(cache, lease, span(0, 50), 8)
    assert cache.metrics.get("unloaded", "requests") == 1
    for node in below:
        assert set(tiers_of(node).values()) == {2}, "nothing was loaded in vain"
    cache.release(lease)
    cache.release(other)
    assert serve(cache, span(0, 50)).boundary == 48


def test_load_back_does_not_cost_the_boundary_that_it_would_replace() -> None:
    """Room for the lower boundary could be had only from the checkpoint of the upper one."""
    cache = make_tiered(num_pages=14, state_pages=3)
    serve(cache, span(0, 8))
    serve(cache, span(0, 24))
    demote_all(cache)
    cache.release(cache.acquire(NAMESPACE, span(0, 9)))
    assert boundaries(cache, span(0, 30)) == (8, 24)
    other = hold_all_but(cache, 5)
    lease = cache.acquire(NAMESPACE, span(0, 30))  # 4 pages and 3 for the state
    assert lease.boundary == 8
    verify_prefix(cache, lease, span(0, 30), 8)
    cache.release(lease)
    cache.release(other)
    check_tiers(cache)


def test_boundary_that_was_kept_during_a_load_may_leave_after_it() -> None:
    cache = make_tiered(num_pages=14, state_pages=2, policy="lru")
    for length in (8, 16, 24):
        serve(cache, span(0, length))
    upper, end = node_at(cache, span(0, 8)), node_at(cache, span(0, 24))
    for _ in range(3):  # the checkpoints of 8 and 16, and all of 24
        assert cache.evict_one()
    cache.release(cache.acquire(NAMESPACE, span(0, 9)))
    assert boundaries(cache, span(0, 30)) == (8, 24)
    serve(cache, ids(50, 51))
    other = hold_all_but(cache, 3)
    lease = cache.acquire(NAMESPACE, span(0, 30))  # four pages: those of 50, 51 go for it
    assert lease.boundary == 24
    assert set(tiers_of(end).values()) == {1}
    assert tiers_of(upper)[Kind.STATE] == 1
    demote_all(cache)
    assert tiers_of(upper)[Kind.STATE] == 2
    cache.release(lease)
    cache.release(other)


def test_state_of_the_device_gone_and_tokens_on_two_tiers_is_the_same_as_cold() -> None:
    """Half of a prompt's KV on the device, the whole on two tiers, and no state that fits."""
    cache = make_tiered(state_pages=1)
    prompt = span(0, 16)
    serve(cache, prompt, structural=(8,))
    half, whole = node_at(cache, prompt[:8]), node_at(cache, prompt)
    while tiers_of(whole)[Kind.FULL] == 1:
        assert cache.evict_one()
    assert tiers_of(half) == {Kind.FULL: 1, Kind.STATE: 2}
    for node in (half, whole):
        lose(cache, node, Kind.STATE)
    assert boundaries(cache, span(0, 18)) == (0, 0)
    match = cache.tree.match(cache.tree.root(NAMESPACE), span(0, 18), 17)
    assert match.known_len == 16
    assert match.lens == {Kind.FULL: 8, Kind.STATE: 0}
    lease = cache.acquire(NAMESPACE, span(0, 18))
    assert lease.boundary == len(lease.table) == 0
    verify_prefix(cache, lease, span(0, 18), 0)
    cache.release(lease)
    assert counts(cache, "loads") == {}


def test_state_is_never_taken_from_another_position_than_its_kv() -> None:
    """KV reaches to 16 over two tiers, the only state stands at 8 on the lower one."""
    cache = make_tiered(state_pages=1)
    prompt = span(0, 16)
    serve(cache, prompt, structural=(8,))
    half, whole = node_at(cache, prompt[:8]), node_at(cache, prompt)
    while tiers_of(whole)[Kind.STATE] == 1:
        assert cache.evict_one()
    assert tiers_of(half)[Kind.STATE] == 2
    lose(cache, whole, Kind.STATE)
    lease = cache.acquire(NAMESPACE, span(0, 18))
    assert lease.boundary == 8
    verify_prefix(cache, lease, span(0, 18), 8)
    cache.release(lease)


@pytest.mark.parametrize("kind", [Kind.SWA, Kind.STATE])
@pytest.mark.parametrize("demoted", [0, 2, 4])
def test_boundary_that_lacks_a_kind_is_none_whatever_lies_where(kind: str, demoted: int) -> None:
    cache = make_tiered(window=5, state_pages=1)
    serve(cache, span(0, 12), structural=(6,))
    for _ in range(demoted):
        cache.evict_one()
    lose(cache, node_at(cache, span(0, 12)), kind)
    assert boundaries(cache, span(0, 14))[1] == 6
    lease = cache.acquire(NAMESPACE, span(0, 14))
    assert lease.boundary == 6
    verify_prefix(cache, lease, span(0, 14), 6)
    cache.release(lease)


def test_full_lower_tier_forgets_its_least_recently_used() -> None:
    cache = make_tiered(lower_pages=4)
    one, two, three = (ids(*range(at, at + 8)) for at in (0, 100, 200))
    for sequence in (one, two, three):
        serve(cache, sequence)
    demote_all(cache)
    assert [boundaries(cache, mixed(s, [9]))[1] for s in (one, two, three)] == [0, 8, 8]
    assert lower_of(cache).num_free == 0
    assert counts(cache, "evictions") == {"full": 1}
    assert serve(cache, mixed(two, [9])).boundary == 8


def test_use_counts_for_what_was_demoted_before() -> None:
    cache = make_tiered(lower_pages=4)
    one, two, three = (ids(*range(at, at + 8)) for at in (0, 100, 200))
    serve(cache, one)
    serve(cache, two)
    demote_all(cache)
    lease = serve(cache, one)  # one token is left to compute
    assert lease.boundary == 7
    demote_all(cache)
    serve(cache, three)
    demote_all(cache)
    assert [boundaries(cache, mixed(s, [9]))[1] for s in (one, two, three)] == [8, 0, 8]


def test_what_could_not_be_loaded_is_forgotten_in_its_turn() -> None:
    """While it was to be loaded, room below was asked for, and it was not to be had for that."""
    cache = make_tiered(num_pages=8, lower_pages=4)
    serve(cache, span(0, 16))
    demote_all(cache)
    serve(cache, ids(50, 51))
    other = hold_all_but(cache, 2)
    lease = cache.acquire(NAMESPACE, span(0, 20))
    assert (lease.boundary, cache.metrics.get("unloaded", "requests")) == (0, 1)
    assert boundaries(cache, span(0, 20)) == (0, 16)
    cache.release(lease)
    cache.release(other)
    serve(cache, ids(60, 61))
    demote_all(cache)
    assert boundaries(cache, span(0, 20)) == (0, 0)
    assert boundaries(cache, ids(60, 61, 62)) == (0, 2)


def test_inner_checkpoint_on_the_lower_tier_is_forgotten_alone() -> None:
    cache = make_tiered(lower_pages=7, state_pages=2)
    serve(cache, span(0, 4))
    serve(cache, span(0, 8))
    inner, end = node_at(cache, span(0, 4)), node_at(cache, span(0, 8))
    demote_all(cache)
    assert lower_of(cache).num_free == 1
    serve(cache, ids(50, 51))
    demote_all(cache)  # a page and a checkpoint of two more
    check_tiers(cache)
    assert tiers_of(inner) == {Kind.FULL: 2}
    assert tiers_of(end) == {Kind.FULL: 2, Kind.STATE: 2}
    assert boundaries(cache, mixed(range(4), [50])) == (0, 0)
    assert serve(cache, span(0, 9)).boundary == 8


def test_leaf_whose_checkpoint_is_forgotten_leaves_the_device_too() -> None:
    """Its checkpoint went down while something hung below it, which has left since."""
    cache = make_tiered(num_pages=20, lower_pages=3, state_pages=2)
    serve(cache, span(0, 4))
    leaf = node_at(cache, span(0, 4))
    lease = cache.acquire(NAMESPACE, span(0, 8))
    cache.reserve(lease, 8)
    absorb(cache, lease, span(0, 8), 4, 8)
    assert cache.evict_one()
    other = hold_all_but(cache, 1)
    assert not cache.commit(lease, span(0, 8), 8, lease.row), "no room for its checkpoint"
    cache.release(lease)
    cache.release(other)
    assert tiers_of(leaf) == {Kind.FULL: 1, Kind.STATE: 2}
    assert leaf.is_leaf
    cache.stand(leaf)  # so that others leave the device before it
    serve(cache, ids(70, 71))
    assert cache.evict_one()
    check_tiers(cache)
    assert set(tiers_of(node_at(cache, ids(70, 71))).values()) == {2}
    assert leaf.generation == 1
    assert cache.pools.pages.num_used == 0


def test_demoted_subtree_goes_with_the_node_above_it() -> None:
    cache = make_tiered(num_pages=64, lower_pages=20)
    serve(cache, span(0, 8))
    serve(cache, span(0, 12))
    serve(cache, span(0, 16))
    upper, *lower = (node_at(cache, span(0, length)) for length in (8, 12, 16))
    assert cache.evict_one()
    assert cache.evict_one()
    assert [tiers_of(node)[Kind.FULL] for node in (upper, *lower)] == [1, 2, 2]
    assert cache.memory.clear() == 2
    check_tiers(cache)
    assert all(node.generation == 1 for node in (upper, *lower))
    assert not lower_of(cache).kept


def test_node_that_nobody_below_needs_any_more_leaves_while_it_is_demoted() -> None:
    """To make room below, the last that made the node useful is forgotten: it goes along."""
    cache = make_tiered(lower_pages=3, state_pages=1)
    serve(cache, span(0, 12), structural=(4,))
    top, end = node_at(cache, span(0, 4)), node_at(cache, span(0, 12))
    while tiers_of(end)[Kind.FULL] == 1:
        assert cache.evict_one()
    assert tiers_of(end) == {Kind.FULL: 2, Kind.STATE: 2}
    assert tiers_of(top) == {Kind.FULL: 1}, "its checkpoint was forgotten for those"
    assert cache.evict_one()
    check_tiers(cache)
    assert (top.generation, end.generation) == (1, 1)
    assert cache.pools.pages.num_used == 0


def test_entry_larger_than_the_lower_tier_costs_nobody_his_place_there() -> None:
    cache = make_tiered(lower_pages=5)
    serve(cache, span(0, 16))
    demote_all(cache)
    serve(cache, span(100, 124))
    demote_all(cache)
    assert cache.pools.pages.num_used == 0
    assert boundaries(cache, span(0, 20)) == (0, 16)
    assert boundaries(cache, span(100, 130)) == (0, 0)


def test_order_on_the_lower_tier_stays_small_over_many_moves() -> None:
    cache = make_tiered(num_pages=8, lower_pages=16)
    for turn in range(1200):
        tokens = span(10 * (turn % 3), 10 * (turn % 3) + 9)
        tick(cache)
        lease = cache.acquire(NAMESPACE, tokens)
        cache.reserve(lease, 9)
        cache.pools.arena = [held or [0] for held in cache.pools.arena]  # type: ignore[attr-defined]
        cache.commit(lease, tokens, 9, lease.row)
        cache.release(lease)
        while cache.evict_one():
            pass
    assert len(cache.memory._demoted._heap) <= 1025


def test_tier_too_small_for_an_entry_is_no_obstacle() -> None:
    cache = make_tiered(lower_pages=1, state_pages=2)
    serve(cache, span(0, 12), structural=(6,))
    demote_all(cache)
    assert cache.pools.pages.num_used == 0
    assert not list(cache.tree.nodes())


def test_long_demoted_path_is_forgotten_at_once() -> None:
    """Longer than Python's stack is deep."""
    cache = make_tiered(num_pages=1600, lower_pages=1600, page_size=1)
    tokens = span(0, 1500)
    lease = cache.acquire(NAMESPACE, tokens)
    cache.reserve(lease, len(tokens))
    cache.pools.arena = [[(0,)] for _ in range(1600)]  # type: ignore[attr-defined]
    for length in range(1, len(tokens) + 1):
        assert cache.commit(lease, tokens, length, lease.row)
    cache.release(lease)
    for _ in range(len(tokens) - 1):
        assert cache.evict_one()
    assert cache.clear() == 1
    assert not list(cache.tree.nodes())
    assert not lower_of(cache).kept


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_clear_empties_both_tiers(name: str) -> None:
    cache = make_tiered(num_pages=40, lower_pages=60, **COMPOSITIONS[name])
    rng = np.random.default_rng(3)
    for _ in range(8):
        serve(cache, rng.integers(0, 2, 12).astype(np.int32), structural=(5,))
    for _ in range(6):
        cache.evict_one()
    assert lower_of(cache).kept
    used = cache.pools.pages.num_used
    assert cache.clear() == used * cache.pools.page_bytes
    check_tiers(cache)
    assert not lower_of(cache).kept
    assert not list(cache.tree.nodes())


def test_clear_leaves_a_running_request_what_it_reads() -> None:
    cache = make_tiered(state_pages=1)
    serve(cache, span(0, 8), structural=(4,))
    lease = cache.acquire(NAMESPACE, span(0, 10))
    demote_all(cache)
    cache.clear()
    check_tiers(cache)
    assert not lower_of(cache).kept
    verify_prefix(cache, lease, span(0, 10), 8)
    cache.release(lease)
    check_tiers(cache)


def test_edge_that_is_demoted_can_be_split() -> None:
    cache = make_tiered(state_pages=1)
    serve(cache, span(0, 15))
    demote_all(cache)
    before = len(lower_of(cache).kept)
    lease = serve(cache, mixed(range(6), [50, 51]))
    assert lease.boundary == 0
    assert lease.plan == (6,)
    upper, end = node_at(cache, span(0, 6)), node_at(cache, span(0, 15))
    assert tiers_of(upper) == {Kind.FULL: 1, Kind.STATE: 1}, "just computed"
    assert tiers_of(end) == {Kind.FULL: 2, Kind.STATE: 2}
    assert len(lower_of(cache).kept) == before - 1, "the page in which they part is the end's too"
    assert serve(cache, span(0, 18)).boundary == 15


@pytest.mark.parametrize("name", ["full-swa", "swa"])
@pytest.mark.parametrize("first", [6, 15])
def test_slot_of_both_parts_of_a_split_is_free_when_both_have_left_it(
    name: str, first: int
) -> None:
    """A window has a page in common with that of the position inside it where an edge is cut."""
    cache = make_tiered(window=20, kv=name != "swa")
    serve(cache, span(0, 15))
    demote_all(cache)
    branch = mixed(range(6), [50, 51])
    lease = cache.acquire(NAMESPACE, branch, limit=0)
    cache.reserve(lease, 8)
    absorb(cache, lease, branch, 0, 8)
    assert cache.commit(lease, branch, 8, lease.row)
    cache.release(lease)
    check_tiers(cache)
    assert tiers_of(node_at(cache, span(0, 6)))[Kind.SWA] == 2
    for length in (first, 21 - first):
        assert serve(cache, mixed(range(length), [60])).boundary == length
    cache.clear()
    check_tiers(cache)
    assert not lower_of(cache).kept


@pytest.mark.parametrize("name", ["full-swa", "swa"])
def test_window_of_the_upper_part_of_a_split_can_be_forgotten(name: str) -> None:
    """Also while requests run on all that goes on from it."""
    cache = make_tiered(window=20, kv=name != "swa")
    serve(cache, span(0, 15))
    demote_all(cache)
    branch = mixed(range(6), [50, 51])
    one = cache.acquire(NAMESPACE, branch, limit=0)
    cache.reserve(one, 8)
    absorb(cache, one, branch, 0, 8)
    assert cache.commit(one, branch, 8, one.row)
    two = cache.acquire(NAMESPACE, span(0, 16))
    assert two.boundary == 15
    assert tiers_of(node_at(cache, span(0, 6)))[Kind.SWA] == 2
    cache.clear()
    check_tiers(cache)
    assert not lower_of(cache).kept
    cache.release(one)
    cache.release(two)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_what_is_computed_again_is_filed_on_the_device(name: str) -> None:
    """A request that does not use what is demoted files what it computed in its place."""
    cache = make_tiered(**COMPOSITIONS[name])
    serve(cache, span(0, 12), structural=(6,))
    demote_all(cache)
    lease = serve(cache, span(0, 20), structural=(6, 12), limit=0)
    assert lease.boundary == 0
    for length in (6, 12, 20):
        assert set(tiers_of(node_at(cache, span(0, length))).values()) == {1}
    assert not lower_of(cache).kept
    assert serve(cache, span(0, 22)).boundary == 20
    assert counts(cache, "loads") == {}


@pytest.mark.parametrize("name", ["full", "full-state", "full-swa-state"])
@pytest.mark.parametrize("num", [2, 3, 4, 7])
def test_handle_finds_the_tables_that_a_stranger_finds_after_any_demotion(
    name: str, num: int
) -> None:
    """So many entries leave between two turns of an agent whose mark remembers its pages."""
    cache = make_tiered(num_pages=120, lower_pages=120, **COMPOSITIONS[name])
    rng = np.random.default_rng(num)
    known, ref = ids(), None
    for turn in range(5):
        prompt = np.append(known, rng.integers(0, 50, 5)).astype(np.int32)
        lease = serve(cache, prompt, passing=(len(prompt) - 2,), after=ref, known_len=len(known))
        ref = cache.stand(lease.frontier, lease.filed[:-1], after=ref, lease=lease)
        known = prompt
        for _ in range(num if turn != 3 else 0):
            cache.evict_one()
        if turn == 2:  # and back again, for somebody else
            cache.release(cache.acquire(NAMESPACE, np.append(known, ids(1))))
        check_tiers(cache)
        prompt = np.append(known, ids(1, 2, 3))
        mine = cache.acquire(NAMESPACE, prompt, after=ref, known_len=len(known))
        theirs = cache.acquire(NAMESPACE, prompt)
        assert mine.boundary == theirs.boundary == len(known)
        whole = mine.boundary // 4
        assert mine.table.pages[:whole].tolist() == theirs.table.pages[:whole].tolist()
        for held in (mine, theirs):
            verify_prefix(cache, held, prompt, held.boundary)
            cache.release(held)
    assert counts(cache, "demotions")
    assert counts(cache, "loads")


def test_counting_tier_keeps_count_of_its_slots() -> None:
    tier = CountingTier(5)
    one, two = tier.store(span(0, 3)), tier.store(span(3, 5))
    assert sorted([*one.tolist(), *two.tolist()]) == [0, 1, 2, 3, 4]
    assert tier.num_free == 0
    with pytest.raises(AssertionError, match="more than there is room for"):
        tier.store(span(0, 1))
    tier.load(one, span(7, 10))
    assert tier.num_free == 0
    tier.free(one)
    assert tier.num_free == 3
    with pytest.raises(AssertionError, match="twice"):
        tier.free(one)


NUMBER = st.integers(0, 7)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
ASKS = st.builds(
    Ask,
    new=TOKENS,
    reply_len=st.integers(0, 2),
    tip=NUMBER,
    cut=st.sampled_from([0, 0, 0, 1, 3, 9]),
    structural=st.lists(st.integers(1, 12), max_size=2).map(tuple),
    passing=st.lists(st.integers(1, 24), max_size=2).map(tuple),
    salt=st.sampled_from([None, None, 0, 2]),
    from_mark=st.booleans(),
    limit=st.none() | st.integers(0, 20),
)


class TierMachine(RuleBasedStateMachine):
    """Turns in pieces over a small device and a small tier; evictions and loads are many."""

    composition: dict[str, Any]

    @initialize(
        page_sizes=st.sampled_from([(1, 1), (4, 4), (4, 3), (1, 4), (4, 1)]),
        num_pages=st.sampled_from([10, 20, 40]),
        lower_pages=st.sampled_from([3, 10, 40]),
        policy=st.sampled_from(["lru", "session-lru"]),
        min_gain=st.sampled_from([1, 1, 3]),
    )
    def start(
        self,
        page_sizes: tuple[int, int],
        num_pages: int,
        lower_pages: int,
        policy: str,
        min_gain: int,
    ) -> None:
        page_size, swa_page = page_sizes
        self.crowd = Crowd(
            make_tiered(
                page_size=page_size,
                swa_page=swa_page,
                num_pages=num_pages,
                lower_pages=lower_pages,
                policy=policy,
                min_gain=min_gain,
                num_rows=3,
                **self.composition,
            )
        )

    @rule(ask=ASKS)
    def begin(self, ask: Ask) -> None:
        self.crowd.begin(ask)

    @rule(ask=ASKS)
    def whole_turn(self, ask: Ask) -> None:
        if self.crowd.begin(ask) is not None:
            self.crowd.finish(-1)

    @precondition(lambda self: self.crowd.flights)
    @rule(flight=NUMBER, num=st.integers(1, 9))
    def step(self, flight: int, num: int) -> None:
        self.crowd.step(flight, num)

    @precondition(lambda self: self.crowd.flights)
    @rule(flight=NUMBER, how=st.sampled_from(["finish", "finish", "abort", "suspend"]))
    def end_one(self, flight: int, how: str) -> None:
        getattr(self.crowd, how)(flight)

    @precondition(lambda self: self.crowd.tips)
    @rule(tip=NUMBER, how=st.sampled_from(["fork", "close"]))
    def change_tips(self, tip: int, how: str) -> None:
        getattr(self.crowd, how)(tip)

    @rule(num=st.integers(1, 6))
    def evict(self, num: int) -> None:
        for _ in range(num):
            self.crowd.evict()

    @rule()
    def clear(self) -> None:
        self.crowd.clear()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "crowd"):
            self.crowd.check()

    def teardown(self) -> None:
        if hasattr(self, "crowd"):
            self.crowd.end()


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_any_order_of_operations_keeps_both_tiers_right(name: str) -> None:
    machine = type(name, (TierMachine,), {"composition": COMPOSITIONS[name]})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None)
    )
